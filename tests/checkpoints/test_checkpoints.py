"""Training resumes in an open window from checkpoints of earlier versions."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoints.kinds import KINDS, SAVED, STEPS, after, in_plain_jax

from optax_tokenaccum import regroup_sums

VERSIONS = sorted(Path(__file__).parent.glob("v*"))


@functools.cache
def written(version: Path) -> Any:
    target = {
        name: {"state": (state := kind.init()), "end": kind.weights(state)}
        for name, kind in KINDS.items()
    }
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, target)
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(version, target)


@pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name)
@pytest.mark.parametrize("name", KINDS)
def test_the_window_is_finished_as_the_earlier_version_did(version: Path, name: str):
    kind, saved = KINDS[name], written(version)[name]
    state, end = jax.tree.map(jnp.copy, saved["state"]), saved["end"]
    # The open window moves the weights when it closes.
    assert np.abs(kind.weights(state) - end).max() > 1e-3
    resumed = kind.weights(after(kind, state, range(SAVED, STEPS)))
    np.testing.assert_allclose(resumed, end, rtol=1e-6)
    expected = in_plain_jax(kind.weights(kind.init()))
    if name in ("nnx_train_step", "nnx_window_step"):  # with dropout
        expected = kind.weights(after(kind, kind.init(), range(STEPS)))
    np.testing.assert_allclose(resumed, expected, rtol=1e-6)


@pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name)
def test_the_window_goes_on_without_the_devices_that_began_it(version: Path):
    kind, saved = KINDS["train_step"], written(version)["train_step_on_8_devices"]
    held = jax.device_get(saved["state"])
    assert held.opt_state.acc_grads["w"].shape == (8, 2, 3)
    state = regroup_sums(held, kind.init())
    resumed = kind.weights(after(kind, state, range(SAVED, STEPS)))
    np.testing.assert_allclose(resumed, saved["end"], rtol=1e-6)
