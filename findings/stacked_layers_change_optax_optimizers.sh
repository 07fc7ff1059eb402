#!/usr/bin/env bash
# Layers stacked for a scan train differently with six transformations of optax.
#
# Versions: optax 0.2.8, jax 0.10.2 (the same with jax 0.12.0.1).
# Seen: the same weights and gradients, once as a list of four layers [8, 6] and once as one array
#   [4, 8, 6], get other updates. Relative difference: adaptive_grad_clip 1.08 (its unit-wise norm of
#   a 3-D array goes over the axis of the layers), scale_by_trust_ratio (LAMB, LARS) 0.97, adafactor
#   0.94, novograd 0.51 (one number for all layers), clip_by_block_rms 0.14, contrib.muon 2.89 (it
#   trains arrays of rank 3 by Adam). adamw, the control, has no difference.
# Expected: to stack layers, which Flax and MaxText do to scan over them, changes no update; or a
#   word about it in the documentation of these optimizers.
# Instead: map such an optimizer over the layers, jax.vmap(tx.init) and jax.vmap(tx.update), for the
#   stacked arrays alone (optax.partition). The script checks that this gives the updates of the list.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet jax==0.10.2 optax==0.2.8
"$work/env/bin/python" - <<'PYTHON'
import jax, jax.numpy as jnp, optax

scales = jnp.array([1.0, 10.0, 100.0, 1000.0])[:, None, None]
keys = jax.random.split(jax.random.key(0))
layers = jax.random.normal(keys[0], (4, 8, 6)) * scales
gradients = jax.random.normal(keys[1], (4, 8, 6))

def update(tx, params, gradients, is_mapped=False):
    init, step = (map(jax.vmap, tx) if is_mapped else tx)
    state = init(params)
    for _ in range(2):
        updates, state = step(gradients, state, params)
    return updates

seen = {}
for name, tx in {
    "adamw": optax.adamw(1.0),
    "adaptive_grad_clip": optax.adaptive_grad_clip(0.01),
    "scale_by_trust_ratio": optax.scale_by_trust_ratio(),
    "adafactor": optax.adafactor(1.0),
    "novograd": optax.novograd(1.0),
    "clip_by_block_rms": optax.clip_by_block_rms(0.1),
    "contrib.muon": optax.contrib.muon(1.0),
}.items():
    listed = jnp.stack(update(tx, [*layers], [*gradients]))
    def difference(updates):
        return float(jnp.linalg.norm(updates - listed) / jnp.linalg.norm(listed))
    seen[name] = difference(update(tx, layers, gradients))
    mapped = difference(update(tx, layers, gradients, is_mapped=True))
    print(f"{name}: stacked {seen[name]:.2f}, mapped over the layers {mapped:.0e}")
    assert mapped < 1e-5
assert seen.pop("adamw") < 1e-6
assert min(seen.values()) > 0.1
PYTHON
