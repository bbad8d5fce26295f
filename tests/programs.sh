#!/bin/sh
# programs.sh BUILD - examples that check themselves. build/characters: forty characters say with a
# prefix table what they say without, and reuse at least 39 times the description of the town.
# build/worker: five characters say in the background what they say alone, and a sixth is told to be
# quiet. Closes with N passed, N failed.
set -u
build=$1 log=$1/log passed=0 failed=0
mkdir -p "$log"

# check NAME CONDITION...: the program ends well, and so does the condition.
check()
{
    name=$1
    shift
    if "$build/$name" > "$log/$name.out" 2>&1 && "$@" "$log/$name.out"; then
        passed=$((passed + 1))
    else
        cat "$log/$name.out"
        failed=$((failed + 1))
    fi
}

reused()
{
    n=$(sed -n 's/.*of them reused *0 *\([0-9]*\)$/\1/p' "$1")
    [ "${n:-0}" -ge 4000 ]
}

answered()
{
    [ "$(grep -c '^[A-Z].* I live in the' "$1")" -ge 5 ]
}

check characters reused
check worker answered
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
