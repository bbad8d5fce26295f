#!/bin/sh
# run.sh SCRATCH - builds and starts every file of this folder, each a use of the header that must
# compile without a warning, with every compiler that is there, also for 32-bit x86. What needs
# cblas is left out where pkg-config does not find OpenBLAS. Closes with N passed, N failed.
set -u
scratch=$1 here=tests/compile
warnings='-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wsign-conversion -Werror'
passed=0 failed=0 start='' libs=''
mkdir -p "$scratch"
cp kvc.h "$scratch/renamed_kvc.h"
# The quick start of the manual: the indented lines below its heading, up to the end of main.
awk '/^   QUICK START$/ { on = 1 }
on && /^       / { print substr($0, 8) }
on && /^       }$/ { exit }' kvc.h > "$scratch/manual.c"
# What a compiler without all of its headers and libraries cannot build.
printf '#include <math.h>\n#include <sys/stat.h>\nint main() { return 0; }\n' > "$scratch/probe.c"
# The kernel's headers serve both widths, but -m32 finds them only where gcc-multilib put a link.
m32="-m32 -msse2 -mfpmath=sse -idirafter /usr/include/$(gcc -print-multiarch 2> /dev/null)"

# build NAME COMPILER OPTION...: compiles, then starts the program with the name of no file. It must
# end with 0, but a quick start must end with 1.
build()
{
    name=$1 want=0 status=compiler
    case $name in quickstart | manual) want=1 ;; esac
    shift
    if "$@" -o "$own/program" -pthread $libs -lm > "$own/log" 2>&1; then
        $start "$own/program" absent.gguf >> "$own/log" 2>&1
        status=$?
    fi
    if [ "$status" = $want ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAILED ($status): $name: $*"
        head -n 20 "$own/log"
    fi
}

can()   # can COMPILER OPTION...
{
    "$@" -o "$own/probe" "$scratch/probe.c" > /dev/null 2>&1 || {
        echo "skipped: $* builds no programs here"
        return 1
    }
}

# The uses that differ between word sizes; -O2 finds more to warn of.
common()
{
    build c99 $cc -O2 -std=c99 "$@" $here/c99.c
    build no_simd $cc -O0 -std=c99 "$@" $here/no_simd.c
    build quickstart $cc -O0 -std=c99 "$@" -I. $here/quickstart.c
    if can ${cxx%% *} "$@" -x c++; then build cpp17 $cxx -O2 -std=c++17 "$@" $here/cpp17.cpp; fi
}

# all CC CXX: one compiler over everything; ends with the sums.
all()
{
    cc="$1 $warnings" cxx="$2 $warnings" own=$scratch/$1
    mkdir -p "$own"
    if can $1; then
        common
        for name in static no_threads no_files; do build $name $cc -O0 -std=c99 $here/$name.c; done
        build c11 $cc -O0 -std=c11 $here/c11.c
        build manual $cc -O0 -std=c99 -I. "$scratch/manual.c"
        build renamed $cc -O0 -std=c99 -I"$scratch" $here/renamed.c
        build two_tu $cc -O0 -std=c99 $here/two_tu_a.c $here/two_tu_b.c
        if pkg-config --exists openblas 2> /dev/null; then
            libs=$(pkg-config --libs openblas)
            build use_cblas $cc -O0 -std=c99 $(pkg-config --cflags openblas) $here/use_cblas.c
            libs=''
        else
            echo 'skipped: no OpenBLAS'
        fi
    fi
    if can $1 $m32; then
        if "$own/probe" 2> /dev/null; then start=''
        elif command -v qemu-i386 > /dev/null; then start=qemu-i386
        else start=false
        fi
        if [ "$start" = false ]; then echo 'skipped: nothing here runs 32-bit programs'
        else common $m32
        fi
    fi
    echo "$passed $failed"
}

all gcc g++ > "$scratch/gcc.txt" 2>&1 &
all clang clang++ > "$scratch/clang.txt" 2>&1 &
wait
for name in gcc clang; do
    sed '$d' "$scratch/$name.txt"
    set -- $(tail -n 1 "$scratch/$name.txt")
    echo "compile: $name: $1 built, $2 not"
    passed=$((passed + $1)) failed=$((failed + $2))
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
