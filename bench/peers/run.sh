#!/bin/sh
# run.sh BUILD THREADS CC [OPTION...] [MODEL.gguf...] - kvc.h beside OpenBLAS and beside llama.cpp;
# `make bench-peers` calls it in the repository's root. Options are those of turns.mjs. Without a
# model it makes files of random weights. Everything it needs is put into BUILD/peers; the only
# thing fetched is the npm package, once.
set -eu
build=$1 threads=$2 cc=$3
shift 3
here=bench/peers peers=$build/peers
package=$peers/node_modules/node-llama-cpp
libraries=$peers/node_modules/@node-llama-cpp/linux-x64/bins/linux-x64

case " $* " in *' --help '*)
    node $here/turns.mjs --help
    exit ;;
esac

# Settings that make OpenBLAS choose other kernels or sizes than its own for this processor.
unset OPENBLAS_CORETYPE OPENBLAS_L2_SIZE OPENBLAS_L2_FACTOR

# The package without its install script, which would look for GPUs and build from source, and
# without the optional binaries for other systems and GPUs.
fetch_package()
{
    mkdir -p "$peers"
    cp $here/*.mjs "$peers"
    cmp -s $here/package.json "$peers/package.json" && [ -d "$package" ] && return
    rm -rf "$peers/llama.cpp"
    cp $here/package.json "$peers"
    (cd "$peers" && npm install --ignore-scripts --omit=optional --no-package-lock --no-audit \
        --no-fund --loglevel=error)
}

# The package brings llama.cpp's sources as a git bundle, of which the C headers are needed.
take_headers()
{
    [ -f "$peers/llama.cpp/include/llama.h" ] && return
    rm -rf "$peers/llama.cpp"
    git clone --quiet --no-checkout "$package/llama/gitRelease.bundle" "$peers/llama.cpp"
    git -C "$peers/llama.cpp" checkout --quiet HEAD -- include ggml/include
}

compile_llama()
{
    folder=$(cd "$libraries" && pwd)
    # CC may be several words.
    # shellcheck disable=SC2086
    $cc -std=c99 -O2 -Wall -Wextra -isystem "$peers/llama.cpp/include" \
        -isystem "$peers/llama.cpp/ggml/include" -DBACKENDS="\"$folder\"" \
        -o "$peers/llama_turn" $here/llama_turn.c "$folder"/libllama.*.so "$folder"/libggml.*.so \
        "$folder/libggml-base.so" -ldl -Wl,-rpath,"$folder" -Wl,-rpath-link,"$folder"
}

# The files of random weights, unless a model is among the arguments.
random_models()
{
    case " $* " in *.gguf\ *) return ;; esac
    mkdir -p "$build/models"
    for shape in 135m 1b; do
        for type in F16 Q8_0 Q4_0; do
            file=$build/models/$shape-$type.gguf
            [ -f "$file" ] || "$build/mkmodel" $shape $type "$file" >&2
            echo "$file"
        done
    done
}

fetch_package
take_headers
compile_llama
cp "$build/kvc_turn" "$peers"
models=$(random_models "$@")
# Names of random models have no blanks.
# shellcheck disable=SC2086
node "$peers/turns.mjs" --programs "$peers" --threads "$threads" --csv "$build/peers.csv" "$@" \
    $models
if [ -x "$build/gemm" ]; then
    echo
    "$build/gemm" "$threads" | tee "$build/gemm.csv"
fi
