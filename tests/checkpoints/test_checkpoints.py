"""Training resumes in an open window from checkpoints of earlier versions."""

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import platforms
import problems
import pytest
from checkpoints.kinds import KINDS, SAVED, STEPS, after, in_plain_jax
from helpers import slow

from optax_tokenaccum import make_train_step, reshard_state

VERSIONS = sorted(Path(__file__).parent.glob("v*"))


# The state and the path through the library of each other kind is like one of these.
QUICK = {"train_step", "train_step_on_8_devices", "window_step"}
QUICK |= {"transformation", "linen", "nnx"}


def written(version: Path, name: str) -> Any:
    if name in ("train_step_on_8_devices", "train_step_fsdp"):
        platforms.require(devices=8)
    return restored(version)[name]


@functools.cache
def restored(version: Path) -> Any:
    with ocp.PyTreeCheckpointer() as checkpointer:
        found: Any = checkpointer.metadata(version)
        found = getattr(found, "item_metadata", found)  # newer Orbax
        structure = getattr(found, "tree", found)
        as_arrays = jax.tree.map(lambda _: ocp.RestoreArgs(np.ndarray), structure)
        restore = ocp.args.PyTreeRestore(restore_args=as_arrays)
        return checkpointer.restore(version, args=restore)


@pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name)
@pytest.mark.parametrize("name", [x if x in QUICK else slow(x) for x in KINDS])
def test_the_window_is_finished_as_the_earlier_version_did(version: Path, name: str):
    kind, saved = KINDS[name], written(version, name)
    state, end = reshard_state(saved["state"], kind.init()), saved["end"]
    # The open window moves the weights when it closes.
    assert np.abs(kind.weights(state) - end).max() > 1e-3
    resumed = kind.weights(after(kind, state, range(SAVED, STEPS)))
    np.testing.assert_allclose(resumed, end, rtol=1e-6)
    if name not in ("nnx_train_step", "nnx_window_step"):  # with dropout
        expected = in_plain_jax(kind.weights(kind.init()))
        np.testing.assert_allclose(resumed, expected, rtol=1e-6)


@pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name)
@pytest.mark.needs(devices=8)
def test_the_window_goes_on_without_the_devices_that_began_it(version: Path):
    kind, saved = KINDS["train_step"], written(version, "train_step_on_8_devices")
    assert saved["state"]["opt_state"]["grad_sums"]["w"].shape == (8, 2, 3)
    state = reshard_state(saved["state"], kind.init())
    resumed = kind.weights(after(kind, state, range(SAVED, STEPS)))
    np.testing.assert_allclose(resumed, saved["end"], rtol=1e-6)


@pytest.mark.parametrize("model_state", [None, np.zeros(2)], ids=["without", "with"])
def test_a_state_is_restored_with_a_target_or_without_as_one_of_0_5(
    model_state: Any, tmp_path: Path
):
    has_state = model_state is not None
    step = make_train_step(
        problems.linear_loss, optax.adam(0.1), 2, has_model_state=has_state
    )
    state = step.init(problems.PARAMS, model_state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        found = checkpointer.restore(tmp_path / "state", state)
        as_dictionary = checkpointer.restore(tmp_path / "state")
    assert jax.tree.structure(found) == jax.tree.structure(state)
    if not has_state:  # of which 0.5 had no part
        as_dictionary.pop("model_state")
    found = reshard_state(as_dictionary, state)
    assert jax.tree.structure(found) == jax.tree.structure(state)
