#!/bin/sh
# npc_sdl.sh BUILD - build/npc_sdl on a display of its own, without a screen: asked by its demo, all
# characters answer, one is silenced, the last picture shows something and the histogram counts each
# frame once. How long frames took is printed and not judged. Closes with N passed, N failed, N
# skipped.
set -u
program=$1/npc_sdl log=$1/log
passed=0 failed=0

for command in "$program" Xvfb; do
    if ! command -v "$command" > /dev/null; then
        echo "skipped: no $command"
        echo '0 passed, 0 failed, 1 skipped'
        exit 0
    fi
done

mkdir -p "$log"
screen=0
stop()
{
    [ "$screen" -eq 0 ] || kill "$screen" 2> /dev/null
}
trap stop EXIT
trap 'exit 1' INT TERM

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

# The server takes a number that is free and writes it down when it is ready.
: > "$log/npc_sdl.display"
Xvfb -displayfd 3 -screen 0 1024x600x24 -nolisten tcp 3> "$log/npc_sdl.display" \
    > "$log/npc_sdl.xvfb" 2>&1 &
screen=$!
try=0
until [ -s "$log/npc_sdl.display" ] || [ $try -eq 300 ]; do
    kill -0 "$screen" 2> /dev/null || break
    try=$((try + 1))
    sleep 0.1
done
[ -s "$log/npc_sdl.display" ]
verdict 'a display' "$log/npc_sdl.xvfb"
DISPLAY=:$(cat "$log/npc_sdl.display")
export DISPLAY SDL_VIDEODRIVER=x11 SDL_RENDER_DRIVER=software SDL_FRAMEBUFFER_ACCELERATION=0

# SDL unloads libraries that keep memory, whose leaks then have no name to be left out by.
export ASAN_OPTIONS=${ASAN_OPTIONS:+$ASAN_OPTIONS:}detect_leaks=0

said=$log/npc_sdl.said picture=$log/npc_sdl.bmp histogram=$log/npc_sdl.histogram
demo()
{
    "$program" --demo --frames "$1" --screenshot "$picture" --histogram "$histogram" \
        > "$said" 2>&1
}

everybody()     # has answered at least once
{
    for name in Gordin Selana Walnawin Borna Korbin; do
        grep -q "^$name: .* -> [^( ]" "$said" || return 1
    done
}

# A program full of checks needs many more frames for the same words.
frames=600
demo $frames && { everybody || { frames=4000 && demo $frames; }; }
verdict 'the demo' "$said"

everybody && ! grep -q ' -> $' "$said"
verdict 'all characters answer' "$said"

grep -q ' -> (silenced)$' "$said"
verdict 'one is silenced' "$said"

# Without the head of the file, as BMP files of 24 bits have it.
colors=$(od -An -v -tx1 -w3 -j54 "$picture" | awk '!seen[$0]++ { n++ } END { print n + 0 }')
[ "$(wc -c < "$picture")" -gt $((960 * 540 * 3)) ] && [ "$colors" -gt 100 ]
verdict "a picture; it has $colors colours"

awk -v frames=$frames '
NR == 1 { good = $1 == frames && $2 == "frames," }
NR > 1 && /^([0-9.]+|more) / { for (i = 1; i <= 3; i++) sum[i] += $(i + 1) }
/^(mean|most) ms / { n += NF == 5 && $3 > 0 }
/^(frames with|of these|most characters|tokens of)/ { n++ }
END { exit !(good && n == 6 && sum[1] == frames && sum[2] == frames && sum[3] == frames) }
' "$histogram"
verdict 'the histogram' "$histogram"
cat "$histogram"

"$program" --font tests/npc_sdl.sh --frames 1 > "$said" 2>&1
[ $? -eq 2 ] && grep -q '^npc_sdl: font: ' "$said"
verdict 'a font that is none' "$said"

echo "$passed passed, $failed failed, 0 skipped"
[ "$failed" -eq 0 ]
