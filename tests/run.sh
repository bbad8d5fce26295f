#!/bin/sh
# run.sh BUILD SHARED CBLAS - runs every test program in BUILD and closes with one line:
# N passed, N failed. Each cmocka test counts as one, and each model or text of an oracle. A program
# that crashes, hangs or says no closing line counts as failed. Output goes to BUILD/log; that of a
# program with failures is shown.
set -u
build=$1 shared=$2 cblas=$3
passed=0 failed=0
mkdir -p "$build/log"
limit=
command -v timeout > /dev/null && limit='timeout 900'

# say NAME STATUS PASSED FAILED SKIPPED: one line, and the sums.
say()
{
    p=$3 f=$4
    if [ "$2" -ne 0 ] && [ "$f" -eq 0 ]; then f=1; fi
    passed=$((passed + p)) failed=$((failed + f))
    note=
    [ "$5" -gt 0 ] && note=" ($5 skipped)"
    if [ "$f" -eq 0 ]; then
        printf 'ok      %4d  %s%s\n' "$p" "$1" "$note"
    else
        printf 'FAILED  %4d  %s (exit %d, %d passed)%s\n' "$f" "$1" "$2" "$p" "$note"
        grep -v '\[ RUN  \|\[       OK' "$build/log/$1.txt" | tail -n 40 | sed 's/^/    /'
    fi
}

# Numbers of cmocka's lines that match, summed: a program may run several groups.
sum()
{
    sed -n "s/^$1 \([0-9][0-9]*\) test(s).*/\1/p" "$2" | awk '{ n += $1 } END { print n + 0 }'
}

run_cmocka()
{
    name=$1 log=$build/log/$1.txt
    $limit "$build/$name" > "$log" 2>&1
    status=$?
    promised=$(sum '\[==========\] Running' "$log")
    good=$(sum '\[  PASSED  \]' "$log")
    skipped=$(sum '\[  SKIPPED \]' "$log")
    bad=$((promised - good - skipped))
    [ "$promised" -eq 0 ] && bad=1
    say "$name" "$status" "$good" "$bad" "$skipped"
}

# run_closing NAME COMMAND...: a program that ends with `N passed, N failed[, N skipped]`.
run_closing()
{
    name=$1 log=$build/log/$1.txt
    shift
    $limit "$@" > "$log" 2>&1
    status=$?
    set -- $(tail -n 1 "$log" | grep -E '^[0-9]+ passed, [0-9]+ failed(, [0-9]+ skipped)?$')
    say "$name" "$status" "${1:-0}" "${3:-1}" "${5:-0}"
}

for source in tests/test_*.c; do
    run_cmocka "$(basename "$source" .c)"
done

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
    run_closing "oracle_$name" "$build/oracle" "$shared/$dir" --only "$glob" "$@"
}

if [ -d "$shared/goldens" ]; then
    run_closing oracle_naive "$build/oracle_naive" "$shared/goldens"
    for gemm in $gemms; do
        for isa in $isas; do
            oracle "llama_${gemm}_$isa" goldens 'llama*' --gemm "$gemm" --isa "$isa"
        done
        for threads in 1 2 3; do
            oracle "llama_${gemm}_threads$threads" goldens 'llama*' --gemm "$gemm" \
                --threads "$threads"
        done
        oracle "window_$gemm" goldens 'mistral-swa' --gemm "$gemm"
        for type in f16 bf16 q8_0 q4_0; do
            oracle "${type}_$gemm" goldens/quant "$type" --gemm "$gemm"
        done
    done
else
    echo "skipped: no $shared/goldens to compare logits with"
fi
if [ -d "$shared/tokenizers" ] && [ -x "$build/oracle_tokenizer" ]; then
    run_closing oracle_tokenizer "$build/oracle_tokenizer" "$shared/tokenizers"
else
    echo "skipped: no $shared/tokenizers to compare token ids with"
fi
run_closing bits sh tests/bits.sh "$build" here
run_closing generate sh tests/generate.sh "$build" "$shared/models" "$isas" "$gemms"

echo
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
