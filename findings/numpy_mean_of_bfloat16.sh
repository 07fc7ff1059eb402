#!/usr/bin/env bash
# NumPy's mean of a bfloat16 array of 1,000 ones is 0.256.
#
# Versions: numpy 2.4.6, ml_dtypes 0.6.0 (the same with numpy 2.5.5), on arrays that jax.device_get
#   returns (jax 0.10.2).
# Seen: np.sum of 1,000 bfloat16 ones is 256, and np.mean 0.256; of 100,000 ones 0.00256. NumPy adds
#   them one after another in bfloat16, where 256 + 1 is 256. jnp.mean of the same array is 1.
# Expected: 1, as np.mean of float16 gives, which NumPy adds in float32.
# A loop that collects bfloat16 losses on the host, and logs np.mean of them, reports too little.
# Instead: np.mean(x, dtype=np.float32), or jnp.mean.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet jax==0.10.2 numpy==2.4.6 ml_dtypes==0.6.0
"$work/env/bin/python" - <<'PYTHON'
import jax, jax.numpy as jnp, numpy as np

ones = jnp.ones(1000, jnp.bfloat16)
losses = jax.device_get(ones)
half = np.ones(5000, np.float16)
print("np.sum", np.sum(losses), "np.mean", np.mean(losses), "jnp.mean", jnp.mean(ones))
print("float16: np.mean", np.mean(half), "float32: np.mean", np.mean(losses, dtype=np.float32))
assert np.sum(losses) == 256 and abs(float(np.mean(losses)) - 0.256) < 1e-3
assert jnp.mean(ones) == np.mean(half) == np.mean(losses, dtype=np.float32) == 1
PYTHON
