#!/bin/sh
# bits.sh BUILD here                  - every instruction set of this machine gives the same bits
# bits.sh BUILD NAME EMULATOR CC...   - and so does a static build by CC, run under the emulator if
#                                       this machine does not run it by itself
# Closes with N passed, N failed. A compiler or emulator that is not there is said and skipped.
set -u
build=$1 name=$2
here=$build/bits.$name.here.txt there=$build/bits.$name.txt probe=$build/bits.$name.probe

if [ "$name" = here ]; then
    "$build/bits" --all-isa > "$here"
    status=$?
    cat "$here"
    good=$(grep -c '^[A-Z]' "$here")
    bad=$(grep -c '^ ' "$here")
    if [ "$status" -ne 0 ] && [ "$bad" -eq 0 ]; then bad=1; fi
    echo "$good passed, $bad failed"
    exit "$status"
fi

emulator=$3
shift 3
printf '#include <stdio.h>\nint main(void) { return 0; }\n' > "$probe.c"
"$@" -static -o "$probe" "$probe.c" 2> /dev/null || {
    echo "skipped: $1 builds no program for $name"
    exit 0
}
if "$probe" 2> /dev/null; then
    emulator=
elif ! command -v "$emulator" > /dev/null; then
    echo "skipped: no $emulator"
    exit 0
fi
set -e
"$build/bits" > "$here"
"$@" -std=c99 -O2 -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror -static -Itests/cross \
    -o "$build/bits.$name" tests/bits.c -pthread -lm
$emulator "$build/bits.$name" --all-isa > "$there"
diff "$here" "$there"
cat "$there"
echo "$(wc -l < "$there") passed, 0 failed"
