#!/bin/sh
# run.sh OUT - trains the tavern model into OUT and writes it to examples/models; `make train` calls
# it in the repository's root. Needs Debian's python3-torch and python3-numpy, which it installs.
# About an hour on two cores.
set -eu
out=$1
python=/usr/bin/python3
packages='python3-torch python3-numpy libopenblas0-pthread'
sudo=
[ "$(id -u)" -eq 0 ] || sudo=sudo
if ! $python -c 'import torch, numpy' 2> /dev/null; then
    # shellcheck disable=SC2086
    $sudo apt-get install -y --no-install-recommends $packages
fi
# One thread a process: threads that wait for each other lose more than they bring. The malloc
# settings keep freed blocks, so that the pages of large tensors are not cleared at every step.
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000 MALLOC_TOP_PAD_=268435456
cd examples/train
mkdir -p ../../"$out"
# Two parts: the course, left before its rate has fallen, then harder questions with a falling rate.
$python train.py --out ../../"$out" --steps 1900 --stop 980
$python train.py --out ../../"$out" --resume --steps 1450 --decay 1.4
$python export.py ../../"$out" --models ../models --eval ../models/eval.txt
