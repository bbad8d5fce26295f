#!/bin/sh
# run.sh BUILD SHARED CBLAS - runs every test program in BUILD, two at a time, and closes with one
# line: N passed, N failed. Each cmocka test counts as one, and each model or text of an oracle. A
# program that crashes, hangs or says no closing line counts as failed. Output goes to BUILD/log;
# that of a program with failures is shown.
set -u

# ---- one program: run.sh --one BUILD "KIND NAME COMMAND..." ----

# say NAME STATUS PASSED FAILED SKIPPED: one line, and the numbers to be added up.
say()
{
    p=$3 f=$4
    if [ "$2" -ne 0 ] && [ "$f" -eq 0 ]; then f=1; fi
    note=
    [ "$5" -gt 0 ] && note=" ($5 skipped)"
    echo "$p $f" > "$log/$1.sum"
    if [ "$f" -eq 0 ]; then
        printf 'ok      %4d  %s%s\n' "$p" "$1" "$note"
    else
        {
            printf 'FAILED  %4d  %s (exit %d, %d passed)%s\n' "$f" "$1" "$2" "$p" "$note"
            grep -v '\[ RUN  \|\[       OK' "$log/$1.txt" | tail -n 40 | sed 's/^/    /'
        } > "$log/$1.failed"
        cat "$log/$1.failed"
    fi
}

# Numbers of cmocka's lines that match, summed: a program may run several groups.
sum()
{
    sed -n "s/^$1 \([0-9][0-9]*\) test(s).*/\1/p" "$2" | awk '{ n += $1 } END { print n + 0 }'
}

# one KIND NAME COMMAND...: cmocka's programs, and those that end with
# `N passed, N failed[, N skipped]`
one()
{
    kind=$1 name=$2 out=$log/$2.txt
    shift 2
    limit=
    command -v timeout > /dev/null && limit='timeout 900'
    $limit "$@" > "$out" 2>&1
    status=$?
    if [ "$kind" = cmocka ]; then
        promised=$(sum '\[==========\] Running' "$out")
        good=$(sum '\[  PASSED  \]' "$out")
        skipped=$(sum '\[  SKIPPED \]' "$out")
        bad=$((promised - good - skipped))
        [ "$promised" -eq 0 ] && bad=1
        say "$name" "$status" "$good" "$bad" "$skipped"
    else
        set -- $(tail -n 1 "$out" | grep -E '^[0-9]+ passed, [0-9]+ failed(, [0-9]+ skipped)?$')
        say "$name" "$status" "${1:-0}" "${3:-1}" "${5:-0}"
    fi
}

if [ "$1" = --one ]; then
    log=$2/log
    set -f
    one $3
    exit 0
fi

# ---- all of them ----

build=$1 shared=$2 cblas=$3
log=$build/log
rm -rf "$log"
mkdir -p "$log"

case $(uname -m) in
    x86_64 | amd64) isas='base avx2 avx512 avx512vnni' ;;
    aarch64 | arm64) isas='base neon' ;;
    *) isas=base ;;
esac
gemms=builtin
[ "$cblas" = 1 ] && gemms='builtin cblas'

oracle()   # oracle NAME DIR GLOB [OPTION...]
{
    name=$1 dir=$2 glob=$3
    shift 3
    echo "closing oracle_$name $build/oracle $shared/$dir --only $glob $*"
}

# A line for each program; the longest first, so that none is left over at the end.
list()
{
    for name in test_walk test_tavern test_kernels test_step; do
        echo "cmocka $name $build/$name"
    done
    echo "closing bits sh tests/bits.sh $build here"
    for source in tests/test_*.c; do
        name=$(basename "$source" .c)
        case $name in test_walk | test_tavern | test_kernels | test_step) continue ;; esac
        echo "cmocka $name $build/$name"
    done
    if [ -d "$shared/goldens" ]; then
        echo "closing oracle_naive $build/oracle_naive $shared/goldens"
        for gemm in $gemms; do
            oracle "$gemm" goldens '*' --gemm "$gemm" --threads 2
            for type in f16 bf16 q8_0 q4_0; do
                oracle "${type}_$gemm" goldens/quant "$type" --gemm "$gemm"
            done
        done
    fi
    if [ -d "$shared/tokenizers" ] && [ -x "$build/oracle_tokenizer" ]; then
        echo "closing oracle_tokenizer $build/oracle_tokenizer $shared/tokenizers"
    fi
    echo "closing programs sh tests/programs.sh $build"
    echo "closing redis sh tests/redis.sh $build"
    echo "closing npc_sdl sh tests/npc_sdl.sh $build"
    set -- $isas
    words=$(IFS=,; echo "$*")
    set -- $gemms
    echo "closing generate sh tests/generate.sh $build $shared/models $words $(IFS=,; echo "$*")"
}

list > "$log/list"
tr '\n' '\0' < "$log/list" | xargs -0 -P 2 -n 1 sh "$0" --one "$build"
[ -d "$shared/goldens" ] || echo "skipped: no $shared/goldens to compare logits with"
[ -d "$shared/tokenizers" ] || echo "skipped: no $shared/tokenizers to compare token ids with"

echo
# A program whose numbers are missing counts as a failure.
set -- $(cat "$log"/*.sum | awk -v n="$(wc -l < "$log/list")" \
    '{ p += $1; f += $2 } END { print p + 0, f + n - NR }')
echo "$1 passed, $2 failed"
[ "$2" -eq 0 ] && [ "$1" -gt 0 ]
