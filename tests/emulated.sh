#!/bin/sh
# emulated.sh BUILD MAKE... - the kernels of AVX-512, built over SIMDe so that no processor with it
# is needed (emulated/immintrin.h): each gives the bits of the base one, and all together those of
# BUILD/bits. Closes with N passed, N failed. Without SIMDe or AVX2 it says so and passes.
set -eu
build=$1 there=$1/emulated
shift
flags='-O2 -Itests/emulated -mavx2 -mfma -mf16c -ffp-contract=off -Wno-psabi'
mkdir -p "$there"
cat > "$there/probe.c" <<'END'
#include <immintrin.h>
int main(void)
{
    return !(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"));
}
END
${CC:-cc} $flags -o "$there/probe" "$there/probe.c" 2> "$there/probe.txt" || {
    echo "skipped: ${CC:-cc} builds nothing over SIMDe"
    exit 0
}
"$there/probe" || {
    echo 'skipped: no AVX2, over which AVX-512 is emulated'
    exit 0
}
"$@" --no-print-directory BUILD="$there" CBLAS=0 CFLAGS="$flags -Werror" \
    "$there/test_kernels" "$there/bits"
"$there/test_kernels" > "$there/kernels.txt" 2>&1 || {
    cat "$there/kernels.txt"
    exit 1
}
for isa in avx512 avx512vnni; do
    grep -x "$isa" "$there/kernels.txt" || {
        echo "$isa was not run"
        exit 1
    }
done
"$build/bits" > "$there/here.txt"
"$there/bits" --all-isa > "$there/bits.txt"
diff "$there/here.txt" "$there/bits.txt"
kernels=$(sed -n 's/^\[  PASSED  \] \([0-9]*\) test.*/\1/p' "$there/kernels.txt")
echo "$((kernels + $(wc -l < "$there/bits.txt"))) passed, 0 failed"
