#!/bin/bash
# Runs `python -m benchmarks.gpu` with the wheels in this script's folder, or tests:
#
#   bash .gpu/run.sh --out results
#   bash .gpu/run.sh pytest tests/core
set -u
site=$(mktemp -d)
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" \
  "$(dirname "$0")"/wheels/*.whl
export PYTHONUNBUFFERED=1 PYTHONPATH="$site:$PWD"
nvidia-smi --query-gpu=name,driver_version,memory.total,memory.used --format=csv
if [ "${1-}" = pytest ]; then
  export JAX_PLATFORMS=cuda
  exec python3 -m pytest -p no:cacheprovider -q "${@:2}"
fi
exec python3 -m benchmarks.gpu "$@"
