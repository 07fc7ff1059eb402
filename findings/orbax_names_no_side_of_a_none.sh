#!/usr/bin/env bash
# Orbax refuses a target with a field that is None and not in the checkpoint: it is missing in both.
#
# Versions: orbax-checkpoint 0.12.8, jax 0.10.2 (the same with jax 0.12.0.1).
# Seen: a NamedTuple of two fields is saved, and restored into one with a third field whose value is
#   None, a tree with the same leaves. The error says that `extra` is "MISSING" in the source and
#   "MISSING" in the target, and advises partial_restore.
# Expected: None, which is no leaf, needs nothing from a checkpoint; or an error that says which side
#   has the field. One meets it after adding an optional field to a train state.
# Instead: restore without a target, and build the new state from the dictionary.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet jax==0.10.2 orbax-checkpoint==0.12.8
WORK="$work" "$work/env/bin/python" - <<'PYTHON'
import os
from typing import Any, NamedTuple
import jax.numpy as jnp, orbax.checkpoint as ocp

class Old(NamedTuple):
    params: Any
    count: Any

class New(NamedTuple):
    params: Any
    count: Any
    extra: Any = None

path = os.path.join(os.environ["WORK"], "checkpoint")
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path, Old(jnp.ones(3), jnp.zeros(())))
    checkpointer.wait_until_finished()
    try:
        checkpointer.restore(path, New(jnp.ones(3), jnp.zeros(())))
    except ValueError as error:
        said = str(error)
    else:
        raise SystemExit("it restores")
    as_dictionary = checkpointer.restore(path)
print(said)
assert said.count("MISSING") == 2 and "extra" in said
assert sorted(as_dictionary) == ["count", "params"]
PYTHON
