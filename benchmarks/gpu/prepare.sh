#!/bin/bash
# Fills the folder .gpu of this repository, which git ignores, with what a machine without
# a network needs besides Python 3.12 and jax for CUDA: wheels, and run.sh.
set -eu
cd "$(dirname "$0")/../.."
rm -rf .gpu
mkdir -p .gpu/wheels
cp benchmarks/gpu/run.sh .gpu
platforms=()
for name in _2_28 _2_27 _2_17 2014 1; do
  platforms+=(--platform "manylinux${name}_x86_64")
done
# flax needs neither orbax nor tensorstore here.
python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 \
  --implementation cp "${platforms[@]}" -d .gpu/wheels optax absl-py flax msgpack \
  treescope rich pyyaml typing_extensions \
  pytest pytest-xdist execnet iniconfig pluggy packaging pygments hypothesis sortedcontainers chex toolz
du -sh .gpu
