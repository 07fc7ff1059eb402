"""`None` in the place of an array is no leaf: on a mesh as on one device."""

from typing import Any

import jax
import meshes
import numpy as np
import optax
import pytest
import ways_in
from helpers import count_compilations, relative_error, run_step, slow, stack
from meshes import make_mesh

# Rows 0 to 3 of every micro-batch have few tokens: devices differ.
BATCHES = [ways_in.batch_of(i, [1.0] * (4 + i) + [9.0] * (4 - i)) for i in range(3)]
# What `equinox.partition` makes of a model, and a layer without a bias.
PARAMS = {"w": ways_in.PARAMS["w"], "bias": None, "empty": {}, "rest": (None, None)}
MASK: Any = {"w": True, "bias": None, "empty": {}, "rest": (None, None)}
# Its state has a leaf less than the tree.
MASKED = optax.masked(optax.sgd(1.0, momentum=0.5), MASK)


def loss_fn(params: Any, batch: Any) -> Any:
    assert params["bias"] is None and params["rest"] == (None, None)
    assert batch["positions"] is None
    loss_sum, num_tokens = ways_in.loss_fn(params, batch)
    return loss_sum, (num_tokens, {"tokens": num_tokens, "missing": None})


def two_windows(way: str) -> list[Any]:
    given = [batch | {"positions": None} for batch in BATCHES]
    return [stack(given)] * 2 if "window" in way else given * 2


def expected() -> Any:
    """The parameters after two windows of all rows on one device, in float64."""
    params, trace = {"w": np.asarray(PARAMS["w"], np.float64)}, 0.0
    for _ in range(2):
        trace = ways_in.exact(params, *BATCHES)["w"] + 0.5 * trace
        params = {"w": params["w"] - trace}
    return params["w"]


@pytest.mark.parametrize(
    ("way", "kind", "reduce_every"),
    [
        ("two programs", "auto", "window"),
        slow("window", "explicit", "micro_batch"),
    ],
)
def test_parameters_without_some_leaves(way: str, kind: str, reduce_every: str):
    options: dict[str, Any] = {"loss_fn": loss_fn, "k": 3, "has_aux": True}
    mesh = make_mesh((8,), kind)
    step = meshes.make_step(way, MASKED, mesh, reduce_every=reduce_every, **options)
    state = first = step.init(PARAMS)
    before = first.params["w"]
    with count_compilations() as compilations:
        state, metrics = run_step(step, state, two_windows(way))
    assert len(compilations) == (2 if "two programs" in way else 1)
    assert relative_error(state.params["w"], expected()) < 1e-6
    assert jax.tree.structure(state) == jax.tree.structure(first)
    assert before.is_deleted()
    assert metrics.aux["missing"] is None and metrics.updated
