"""Grain pipelines of planned micro-batches, made as docs/ragged.md makes them."""

import json
from typing import Any

import chex
import grain
import helpers
import jax
import numpy as np
import optax
import pytest

from optax_tokenaccum import make_train_step
from optax_tokenaccum.ragged import pad_micro_batch, plan_window

pytestmark = pytest.mark.slow

PADS = {"tokens": 0, "labels": 0, "mask": False, "row": -1}
BATCH = helpers.ragged_batch(0, 37)
SEQUENCES = [
    {name: x[i, :n] for name, x in BATCH.items()} | {"row": np.int32(i)}
    for i, n in enumerate(BATCH["mask"].sum(1))
]
DATA = grain.MapDataset.source(SEQUENCES).shuffle(seed=3)


def cut_window(window: list[Any]) -> list[tuple[Any, bool]]:
    lengths = [len(sequence["mask"]) for sequence in window]
    plans = plan_window(lengths, max_tokens=144, length_buckets=[16, 64])
    return [
        (pad_micro_batch(window, plan, pad_values=PADS), plan is plans[-1])
        for plan in plans
    ]


class Flatten(grain.experimental.FlatMapTransform):
    def flat_map(self, window: Any) -> Any:
        return window


def windows_of() -> grain.IterDataset:
    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
    windows = DATA.batch(8, batch_fn=cut_window).repeat(2)
    return windows.to_iter_dataset(options)


def flat(windows: grain.IterDataset) -> grain.IterDataset:
    return grain.experimental.FlatMapIterDataset(windows, Flatten())


def test_each_window_is_its_full_batch_and_a_mean_of_means_is_not():
    params, inner = helpers.init_params(0), optax.sgd(0.1, momentum=0.0)
    step = make_train_step(helpers.loss_sum_fn, inner)  # its trace is the gradient
    grad = jax.jit(jax.grad(lambda *args: helpers.loss_mean_fn(*args)[0]))
    state, rows, means, sizes = step.init(params), [], [], []
    for batch, is_last in flat(windows_of()):
        rows += [row for row in batch["row"].tolist() if row >= 0]
        means.append(grad(state.params, batch))
        state, _ = step.accumulate(state, batch)
        if not is_last:
            continue
        full = {name: x[np.array(rows)] for name, x in BATCH.items()}
        exact = helpers.float64_gradient(state.params, full)
        naive = jax.tree.map(lambda *x: sum(x) / len(x), *means)
        state, metrics = step.close_window(state)
        applied = state.opt_state.inner_opt_state[0].trace
        assert helpers.relative_error(applied, exact) < helpers.RTOL["float32"]
        assert helpers.relative_error(naive, exact) > 0.01
        assert metrics.num_tokens == full["mask"].sum()
        sizes.append(len(rows))
        rows, means = [], []
    assert not rows
    assert sizes == [8, 8, 8, 8, 5] * 2


def test_resumes_bit_for_bit_after_a_micro_batch():
    whole = list(flat(windows_of()))
    iterator = iter(flat(windows_of()))
    states = [iterator.get_state()]
    for micro_batch, expected in zip(iterator, whole, strict=True):
        chex.assert_trees_all_equal(micro_batch, expected)
        states.append(json.loads(json.dumps(iterator.get_state())))
    assert len(whole) > 10
    for done in (0, 1, 5, len(states) - 1):
        iterator = iter(flat(windows_of()))
        iterator.set_state(states[done])
        rest = list(iterator)
        assert len(rest) == len(whole) - done
        chex.assert_trees_all_equal(rest, whole[done:])
