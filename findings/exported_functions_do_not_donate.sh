#!/usr/bin/env bash
# A jitted function that donates an argument does not donate it after jax.export.
#
# Versions: jax 0.10.2 (the same with jax 0.12.0.1).
# Seen: jax.jit(f, donate_argnums=0) deletes its argument. Exported, serialized and read back, `call`
#   leaves it alive, and so does jax.jit(call): a train step that is exported needs its state twice,
#   without a warning. jax.jit(call, donate_argnums=0) donates again.
# Expected: what was exported donates what it donated, or says that it does not.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet jax==0.10.2 flatbuffers==25.12.19
"$work/env/bin/python" -W error - <<'PYTHON'
import jax, jax.export, jax.numpy as jnp

step = jax.jit(lambda state, x: state + x, donate_argnums=0)
exported = jax.export.export(step)(jnp.ones(4), jnp.ones(4))
call = jax.export.deserialize(exported.serialize()).call

def donates(f):
    state = jnp.ones(4)
    f(state, jnp.ones(4))
    return state.is_deleted()

seen = {
    "jit": donates(step),
    "exported": donates(call),
    "jit of exported": donates(jax.jit(call)),
    "jit of exported, donating": donates(jax.jit(call, donate_argnums=0)),
}
print(seen)
assert [*seen.values()] == [True, False, False, True]
PYTHON
