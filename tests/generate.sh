#!/bin/sh
# generate.sh BUILD MODELS ISAS GEMMS - build/generate from outside: its text must be the story
# model's greedy one byte for byte, whatever the instruction set, engine, threads and cache; bad
# arguments and files must give one line and exit status 2. ISAS and GEMMS are names with commas
# between. Closes with N passed, N failed, N skipped.
set -u
build=$1 models=$2
isas=$(echo "$3" | tr , ' ') gemms=$(echo "$4" | tr , ' ')
model=$models/stories260K.gguf want=$models/stories260K.greedy.txt
out=$build/log/generate.out err=$build/log/generate.err
passed=0 failed=0 skipped=0
mkdir -p "$build/log"

verdict()   # verdict NAME: of the command before it
{
    if [ $? -eq 0 ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAILED: $1"
        head -c 600 "$err"
    fi
}

generate()
{
    "$build/generate" "$@" > "$out" 2> "$err" < /dev/null
}

same_story()
{
    generate -m "$model" -p 'Once upon a time' -n 400 --temp 0 "$@" &&
        cmp "$out" "$want" > "$err" 2>&1
    verdict "the story with $*"
}

same_output()   # same_output NAME OPTIONS, then -- OTHER OPTIONS: both print the same
{
    name=$1 first=
    shift
    while [ "$1" != -- ]; do
        first="$first $1"
        shift
    done
    shift
    # shellcheck disable=SC2086
    generate -m "$model" $first && cp "$out" "$out.first" && generate -m "$model" "$@" &&
        cmp "$out" "$out.first" > "$err" 2>&1
    verdict "$name"
}

# Exit status 2, nothing on standard output, one line on standard error that names what is wrong.
refuses()
{
    word=$1
    shift
    generate "$@"
    [ $? -eq 2 ] && [ ! -s "$out" ] && [ "$(wc -l < "$err")" -eq 1 ] && grep -q -e "$word" "$err"
    verdict "one line about $word for: $*"
}

says()   # says WORDS: on the standard error of the run before
{
    grep -q -e "$1" "$err"
    verdict "'$1' on standard error"
}

# ---- what needs no model ----
generate --help && grep -q -e '--repeat-penalty X' "$out"
verdict --help
printf 'not a model' > "$build/log/damaged.gguf"
: > "$build/log/empty.gguf"
refuses 'no model'
refuses 'no model' -p text
refuses 'either -p' -m x.gguf
refuses 'either -p' -m x.gguf -p text -f file
refuses -m -p text -m
refuses '--nonsense' --nonsense
refuses -n -m x.gguf -p text -n -1
refuses -n -m x.gguf -p text -n 12x
refuses -n -m x.gguf -p text -n ''
refuses -n -m x.gguf -p text -n 99999999999999999999
refuses --temp -m x.gguf -p text --temp warm
refuses --threads -m x.gguf -p text --threads 257
refuses --isa -m x.gguf -p text --isa mmx
refuses --gemm -m x.gguf -p text --gemm mkl
refuses absent.gguf -m "$build/log/absent.gguf" -p text
refuses damaged.gguf -m "$build/log/damaged.gguf" -p text
refuses empty.gguf -m "$build/log/empty.gguf" -p text
refuses log -m "$build/log" -p text

# ---- what needs the story model ----
if [ ! -f "$model" ]; then
    echo "skipped: no $model"
    skipped=1
else
    same_story
    for isa in $isas; do same_story --isa "$isa"; done
    for gemm in $gemms; do same_story --gemm "$gemm"; done
    for threads in 1 2 3; do same_story --threads "$threads"; done
    same_story --no-cache
    same_story --top-k 40 --top-p 0.9 --min-p 0.1 --seed 9    # temperature 0: of no effect
    same_story --stats
    same_story --temp 1 --top-k 1
    same_story --temp 1e-45
    same_output 'one seed, one text' -p One --temp 1 --seed 7 -n 50 --threads 1 \
        -- -p One --temp 1 --seed 7 -n 50 --threads 2 --isa base
    printf 'One' > "$build/log/prompt.txt"
    same_output 'a prompt from a file' -p One -n 9 -- -f "$build/log/prompt.txt" -n 9
    generate -m "$model" -p 'Once upon a time' -n 0 && [ "$(cat "$out")" = 'Once upon a time' ]
    verdict 'no token: the prompt alone'
    generate -m "$model" -p '' -n 5 && [ "$(wc -l < "$out")" -ge 1 ]
    verdict 'an empty prompt'

    # 2 * 1000 words: longer than a chunk of the prefill, and than one page.
    awk 'BEGIN { for (i = 0; i < 500; i++) printf "the cat " }' > "$build/log/long.txt"
    same_output 'a long prompt, with and without cache' -f "$build/log/long.txt" --ctx 4096 -n 8 \
        -- -f "$build/log/long.txt" --ctx 4096 -n 8 --no-cache
    refuses 'context holds' -m "$model" -f "$build/log/long.txt" --ctx 64
    generate -m "$model" -p 'Once upon a time' --ctx 32 -n 100 && [ "$(wc -c < "$out")" -gt 40 ]
    verdict 'a full context ends the text'
    says 'context is full'
    generate -m "$model" -p 'Once upon a time' -n 20 --stats
    says 'prompt  *[0-9][0-9]* tokens'
    says 'time to first token'
    says 'bytes per token'
    refuses absent.txt -m "$model" -f "$build/log/absent.txt"
    refuses temperature -m "$model" -p text --temp -1
    refuses temperature -m "$model" -p text --temp nan
    refuses top_p -m "$model" -p text --top-p 1.5
    head -c 500000 "$model" > "$build/log/cut.gguf"
    refuses cut.gguf -m "$build/log/cut.gguf" -p text
    case $gemms in *cblas*) ;; *) refuses gemm -m "$model" -p text --gemm cblas ;; esac
fi

echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
