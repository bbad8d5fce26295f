#!/bin/sh
# characters.sh BUILD - build/characters: forty characters say with a prefix table what they say
# without, and reuse at least 39 times the description of the town. Closes with N passed, N failed.
set -u
out=$1/log/characters.out
mkdir -p "$1/log"
if "$1/characters" > "$out" 2>&1; then
    n=$(sed -n 's/.*of them reused *0 *\([0-9]*\)$/\1/p' "$out")
    if [ "${n:-0}" -ge 4000 ]; then
        echo '1 passed, 0 failed'
        exit 0
    fi
fi
cat "$out"
echo '0 passed, 1 failed'
exit 1
