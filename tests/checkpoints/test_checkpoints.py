"""Training resumes in an open window from checkpoints of earlier versions."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoints.kinds import KINDS, SAVED, STEPS, after

from optax_tokenaccum import regroup_sums

VERSIONS = sorted(Path(__file__).parent.glob("v*"))


def metadata(version: Path) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.metadata(version).item_metadata


def names_in(version: Path) -> list[str]:
    return sorted(metadata(version))


def as_saved(tree: Any) -> Any:
    """A target with the dictionaries of a checkpoint, on this jax's own device.

    Restored without a target, the arrays would go to a device by the name that another
    version of jax gave it.
    """
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)


# Before 0.3.0, window steps kept the inner optimizer's state alone, and the noise of a
# window was in the state.
CONVERTED = {
    ("v0.1.0", "window_step"),
    ("v0.2.0", "window_step"),
    ("v0.2.0_more", "train_step_with_noise"),
}


@functools.cache
def written(version: Path) -> Any:
    kinds = {name: KINDS[name] for name in names_in(version)}
    target = {
        name: {"state": (state := kind.init()), "end": kind.weights(state)}
        for name, kind in kinds.items()
    }
    converted = {name for name in kinds if (version.name, name) in CONVERTED}
    target |= {name: as_saved(metadata(version)[name]) for name in converted}
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, target)
    with ocp.StandardCheckpointer() as checkpointer:
        result = checkpointer.restore(version, target)
    for name in converted:
        old = result[name]["state"]
        result[name]["state"] = regroup_sums(old, kinds[name].init())
    return result


@pytest.mark.parametrize(
    ("version", "name"),
    [
        pytest.param(
            path,
            name,
            id=f"{path.name} {name}",
            marks=pytest.mark.slow if path.name == "v0.1.0" else (),
        )
        for path in VERSIONS
        for name in names_in(path)
    ],
)
def test_the_window_is_finished_as_the_earlier_version_did(version: Path, name: str):
    kind, saved = KINDS[name], written(version)[name]
    state, end = saved["state"], saved["end"]
    # The open window moves the weights when it closes.
    assert np.abs(kind.weights(state) - end).max() > 1e-3
    resumed = kind.weights(after(kind, state, range(SAVED, STEPS)))
    np.testing.assert_allclose(resumed, end, rtol=1e-6)
    new = kind.weights(after(kind, kind.init(), range(STEPS)))
    np.testing.assert_allclose(new, end, rtol=1e-6)


def test_versions_0_1_0_and_0_2_0_are_there_with_all_kinds_of_state():
    assert {"v0.1.0", "v0.2.0", "v0.2.0_more"} <= {path.name for path in VERSIONS}
    assert {name for path in VERSIONS for name in names_in(path)} == {*KINDS}
