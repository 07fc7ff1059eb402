"""Training resumes in an open window from checkpoints of earlier versions."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoints.kinds import KINDS, SAVED, STEPS, after

VERSIONS = sorted(Path(__file__).parent.glob("v*"))


@pytest.fixture(scope="module", params=VERSIONS, ids=lambda path: path.name)
def written(request: pytest.FixtureRequest) -> Any:
    target = {
        name: {"state": (state := kind.init()), "end": kind.weights(state)}
        for name, kind in KINDS.items()
    }
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, target)
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(request.param, target)


@pytest.mark.parametrize("name", KINDS)
def test_the_window_is_finished_as_the_earlier_version_did(name: str, written: Any):
    kind, (state, end) = KINDS[name], (written[name]["state"], written[name]["end"])
    # The open window moves the weights when it closes.
    assert np.abs(kind.weights(state) - end).max() > 1e-3
    resumed = kind.weights(after(kind, state, range(SAVED, STEPS)))
    np.testing.assert_allclose(resumed, end, rtol=1e-6)
    new = kind.weights(after(kind, kind.init(), range(STEPS)))
    np.testing.assert_allclose(new, end, rtol=1e-6)


def test_version_0_1_0_is_there():
    assert "v0.1.0" in [path.name for path in VERSIONS]
