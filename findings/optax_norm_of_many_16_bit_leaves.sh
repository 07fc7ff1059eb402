#!/usr/bin/env bash
# optax's global norm of many bfloat16 arrays stops growing, and of large float16 arrays is infinite.
#
# Versions: optax 0.2.8, jax 0.10.2 (the same with jax 0.12.0.1).
# Seen: global_norm of 1,000 bfloat16 arrays that hold one 1 each is 16, and clip_by_global_norm(1.0)
#   leaves a norm of 1.98. The squares of the arrays are added in bfloat16, where 256 + 1 is 256. For
#   an array of 100,000 ones in float16 the norm is infinite, and the clipped gradient is zeros: the
#   run stands still without an error.
# Expected: 31.62 and 316.2, as sums in float32 give, and a clipped norm of 1.
# A network of unrolled bfloat16 layers has as many arrays: clipping is weaker than one set it.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet jax==0.10.2 optax==0.2.8
"$work/env/bin/python" - <<'PYTHON'
import jax, jax.numpy as jnp, optax

def clipped(gradients):
    return optax.clip_by_global_norm(1.0).update(gradients, optax.EmptyState())[0]

def norm(gradients):  # in float32
    return float(optax.global_norm(jax.tree.map(jnp.float32, gradients)))

many = [jnp.ones((), jnp.bfloat16) for _ in range(1000)]
print("bfloat16: norm", optax.global_norm(many), "of", norm(many), "clipped", norm(clipped(many)))
assert optax.global_norm(many) == 16
assert norm(clipped(many)) > 1.9
large = [jnp.ones(100_000, jnp.float16)]
print("float16: norm", optax.global_norm(large), "of", norm(large), "clipped", norm(clipped(large)))
assert jnp.isinf(optax.global_norm(large)) and norm(clipped(large)) == 0
wide = jax.tree.map(jnp.float32, many)
assert abs(norm(clipped(wide)) - 1) < 1e-5
PYTHON
