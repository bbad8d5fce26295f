#!/bin/sh
# redis.sh BUILD - build/prefix_redis and a Redis server on the loopback: a second process computes
# only what the first one has not, any byte that was changed makes a page one that is missing, and
# so does a server that is gone, stopped or full of something else. The logits are those of a run
# without a server, always. Closes with N passed, N failed, N skipped.
set -u
program=$1/prefix_redis
passed=0 failed=0

for command in "$program" redis-server redis-cli; do
    if ! command -v "$command" > /dev/null; then
        echo "skipped: no $command"
        echo '0 passed, 0 failed, 1 skipped'
        exit 0
    fi
done

dir=$(mktemp -d)
server=0 port=0 reader=0
stop()
{
    for process in $server $reader; do
        [ "$process" -eq 0 ] || kill -9 "$process" 2> /dev/null
    done
    rm -rf "$dir"
}
trap stop EXIT
trap 'exit 1' INT TERM

# start: a server of our own on a port that is free.
start()
{
    for try in 1 2 3 4 5 6 7 8 9; do
        port=$((20000 + ($$ * 9 + try * 101) % 40000))
        redis-server --port "$port" --bind 127.0.0.1 --save '' --appendonly no --dir "$dir" \
            > "$dir/server" 2>&1 &
        server=$!
        while kill -0 "$server" 2> /dev/null; do
            redis info server 2> "$dir/null" | grep -q "^process_id:$server" && return
            sleep 0.1
        done
        kill -9 "$server" 2> /dev/null
    done
    echo 'no server could be started'
    echo '0 passed, 1 failed, 0 skipped'
    exit 1
}

redis()
{
    redis-cli -h 127.0.0.1 -p "$port" --raw "$@"
}

# ask PORT FILE QUESTION > output
ask()
{
    echo "$2 $3" | "$program" 127.0.0.1 "$1"
}

# field WORD FILE: of the last line in brackets, the number before the word or the logits.
field()
{
    case $1 in
        logits) sed -n 's/.*logits \([0-9a-f]*\)]$/\1/p' "$2" ;;
        gave) sed -n 's/.*Redis gave \([0-9]*\) .*/\1/p' "$2" ;;
        got) sed -n 's/.*and got \([0-9]*\);.*/\1/p' "$2" ;;
        *) sed -n "s/.*[^0-9]\([0-9][0-9]*\) $1.*/\1/p" "$2" ;;
    esac | tail -n 1
}

verdict()   # verdict NAME [FILE]: of the command before it
{
    if [ $? -eq 0 ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAILED: $1"
        [ $# -lt 2 ] || cat "$2"
    fi
}

gordin=examples/models/gordin.txt question='Where do you live?'
sed -n 's/^system //p' examples/models/eval.txt | sed -n 2p > "$dir/urlo"
start
ask 1 $gordin "$question" > "$dir/gordin.alone"
ask 1 "$dir/urlo" "$question" > "$dir/urlo.alone"
gordin_logits=$(field logits "$dir/gordin.alone") urlo_logits=$(field logits "$dir/urlo.alone")
[ -n "$gordin_logits" ] && [ "$gordin_logits" != "$urlo_logits" ] &&
    [ "$(field got "$dir/gordin.alone")" = 0 ]
verdict 'without a server' "$dir/gordin.alone"

# ---- two processes ----

ask "$port" $gordin "$question" > "$dir/first"
n=$(field tokens: "$dir/first")
pages=$(((n - 1) / 16))                 # of the prompt, without its last token
[ "$(field reused "$dir/first")" = 0 ] && [ "$(field got "$dir/first")" -ge "$pages" ]
verdict 'the first process computes all' "$dir/first"

ask "$port" $gordin "$question" > "$dir/second"
[ "$(field computed "$dir/second")" -le 16 ] &&
    [ "$(field gave "$dir/second")" = "$pages" ] &&
    [ "$(field logits "$dir/second")" = "$gordin_logits" ] &&
    [ "$(grep -v '^ ' "$dir/second")" = "$(grep -v '^ ' "$dir/gordin.alone")" ]
verdict 'a second process computes the suffix' "$dir/second"

ask "$port" $gordin 'Who are you?' > "$dir/other"
ask 1 $gordin 'Who are you?' > "$dir/alone"
[ "$(field computed "$dir/other")" -le 32 ] &&
    [ "$(field logits "$dir/other")" = "$(field logits "$dir/alone")" ]
verdict 'another question to the same character' "$dir/other"

# ---- damage ----

flip='local at, bits = tonumber(ARGV[1]), tonumber(ARGV[2])
    local byte = string.byte(redis.call("GETRANGE", KEYS[1], at, at))
    redis.call("SETRANGE", KEYS[1], at, string.char(bit.bxor(byte, bits)))'

# A page that was damaged is computed, put anew and right for the next process.
redis flushall > "$dir/null"
ask "$port" $gordin "$question" > "$dir/first"
bad=0 runs=0
for key in $(redis keys 'kvc:*'); do
    size=$(redis strlen "$key")
    for at in 0 9 13 17 30 33 41 45 60 100 $((size / 3)) $((size / 2)) $((size - 17)) $((size - 1))
    do
        redis eval "$flip" 1 "$key" "$at" $((1 << (at + runs) % 8)) > "$dir/null"
        ask "$port" $gordin "$question" > "$dir/damaged"
        [ "$(field logits "$dir/damaged")" = "$gordin_logits" ] || bad=$((bad + 1))
        if [ "$(field were "$dir/damaged")" = 1 ] &&
            [ "$(field gave "$dir/damaged")" -lt "$pages" ]; then
            runs=$((runs + 1))
        elif [ "$(field gave "$dir/damaged")" != "$pages" ]; then
            bad=$((bad + 1))            # the prompt does not ask for pages of the reply
        fi
    done
done
echo "$runs bytes changed, one at a time"
[ "$bad" -eq 0 ] && [ "$runs" -eq $((pages * 14)) ]
verdict 'a byte that was changed' "$dir/damaged"

ask "$port" $gordin "$question" > "$dir/second"
[ "$(field gave "$dir/second")" = "$pages" ]
verdict 'a page that was put anew' "$dir/second"

set -- $(redis keys 'kvc:*')
first=$1
shift
for key in "$@"; do redis copy "$first" "$key" replace > "$dir/null"; done
ask "$port" $gordin "$question" > "$dir/damaged"
[ "$(field logits "$dir/damaged")" = "$gordin_logits" ] &&
    [ "$(field gave "$dir/damaged")" -le 1 ]
verdict 'the same page everywhere' "$dir/damaged"

for key in "$first" "$@"; do
    redis del "$key" > "$dir/null"
    redis rpush "$key" 'not a page' > "$dir/null"
done
ask "$port" $gordin "$question" > "$dir/damaged"
[ "$(field logits "$dir/damaged")" = "$gordin_logits" ] && [ "$(field gave "$dir/damaged")" = 0 ]
verdict 'lists instead of pages' "$dir/damaged"

# ---- a server that stops, dies and comes back ----

redis flushall > "$dir/null"
ask "$port" $gordin "$question" > "$dir/first"
ask "$port" "$dir/urlo" "$question" > "$dir/first"
kill -STOP "$server"
ask "$port" $gordin "$question" > "$dir/stopped"
kill -CONT "$server"
[ "$(field logits "$dir/stopped")" = "$gordin_logits" ] && [ "$(field gave "$dir/stopped")" = 0 ]
verdict 'a server that does not answer' "$dir/stopped"

# until N: the reader has answered N lines.
until_lines()
{
    try=0
    while [ "$(grep -c ']$' "$dir/reader")" -lt "$1" ]; do
        try=$((try + 1))
        [ "$try" -lt 100 ] || return 1
        sleep 0.1
    done
}

mkfifo "$dir/lines"
"$program" 127.0.0.1 "$port" < "$dir/lines" > "$dir/reader" 2>&1 &
reader=$!
exec 3> "$dir/lines"
echo "$gordin $question" >&3
until_lines 1 && [ "$(field gave "$dir/reader")" -gt 0 ] &&
    [ "$(field logits "$dir/reader")" = "$gordin_logits" ]
verdict 'a process that reads from the server' "$dir/reader"

kill -9 "$server"
wait "$server" 2> /dev/null
echo "$dir/urlo $question" >&3
until_lines 2 && [ "$(field gave "$dir/reader")" = 0 ] &&
    [ "$(field reused "$dir/reader")" -lt 32 ] && [ "$(field got "$dir/reader")" = 0 ] &&
    [ "$(field logits "$dir/reader")" = "$urlo_logits" ]
verdict 'goes on when the server was killed' "$dir/reader"

redis-server --port "$port" --bind 127.0.0.1 --save '' --appendonly no --dir "$dir" \
    > "$dir/server" 2>&1 3>&- &
server=$!
sleep 2
echo "$gordin What do you fear?" >&3
until_lines 3 && [ "$(field got "$dir/reader")" -gt 0 ]
verdict 'and finds it when it is back' "$dir/reader"
exec 3>&-
wait "$reader"
verdict 'and ends well' "$dir/reader"
reader=0

echo "$passed passed, $failed failed, 0 skipped"
[ "$failed" -eq 0 ]
