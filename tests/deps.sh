#!/bin/sh
# deps.sh - installs what the tests need on Debian or Ubuntu. The first list is required. Each later
# package is for one check that says so and passes without it; their names differ between releases.
set -eu
root=
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo > /dev/null || { echo 'make deps: needs root or sudo' >&2; exit 1; }
    root=sudo
fi
command -v apt-get > /dev/null || {
    echo 'make deps: no apt-get; install gcc, make, pkg-config, cmocka and cJSON by hand' >&2
    exit 1
}
install()
{
    $root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@" \
        > /dev/null
}

$root apt-get update > /dev/null
install gcc g++ libc6-dev make pkg-config libcmocka-dev libcjson-dev

# gcc-multilib conflicts with gcc-aarch64-linux-gnu, the package of the compiler's own version not.
gcc_major=$(gcc -dumpversion | cut -d. -f1)
for package in libopenblas-dev clang redis-server libhiredis-dev libsdl2-dev libsdl2-ttf-dev \
    fonts-dejavu-core xvfb qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross \
    "gcc-$gcc_major-multilib" "g++-$gcc_major-multilib" libc6-dev-i386 libsimde-dev; do
    install "$package" || echo "make deps: no $package; a check will be left out"
done
if command -v clang > /dev/null; then
    clang_major=$(clang -dumpversion | cut -d. -f1)
    install "libclang-rt-$clang_major-dev" \
        || echo "make deps: no libclang-rt-$clang_major-dev; clang has no sanitizers"
fi
