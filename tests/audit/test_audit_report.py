"""What the audit cannot judge, what it refuses, and what its report says."""

from typing import Any

import broken_loops
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from broken_loops import K, cut, loss_fn, make_step, parameters
from data import Batch
from llama import make_rows
from right_loops import (
    RIGHT,
    by_transformation,
    full_batch,
    mean_and_count,
)

from optax_tokenaccum import Verdict, audit

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["full batch", "token_accumulation"])
@pytest.mark.parametrize("k", [1, K])
def test_equal_lengths_are_never_a_pass(name: str, k: int):
    rows = make_rows(0, 33, 33)
    micro_batches = cut(rows) if k == K else [rows]
    report = audit(RIGHT[name], loss_fn, parameters(0), micro_batches)
    assert report.verdict is Verdict.UNKNOWN and not report.passed
    assert report.explanation.startswith("cannot tell")
    assert "ragged" in report.explanation


def test_several_windows_are_no_window():
    def twice(optimizer: Any, params: Any, micro_batches: Any) -> Any:
        rows = jax.tree.map(lambda *parts: np.concatenate(parts), *micro_batches)
        step, state = make_step(optimizer), optimizer.init(params)
        for _ in range(2):
            grads, _ = mean_and_count(params, rows)
            params, state = step(params, state, grads)
        return params

    report = audit(twice, loss_fn, parameters(0), cut(make_rows(0)))
    assert report.verdict is Verdict.UNKNOWN
    assert "run must be one window" in report.explanation


def test_a_loop_may_change_or_donate_its_micro_batches():
    def popping(optimizer: Any, params: Any, micro_batches: Any) -> Any:
        batches = [Batch(**{name: b.pop(name) for name in [*b]}) for b in micro_batches]
        return full_batch(optimizer, params, batches)

    def donating(optimizer: Any, params: Any, micro_batches: Any) -> Any:
        params = popping(optimizer, params, [{**b} for b in micro_batches])
        for leaf in jax.tree.leaves(micro_batches):
            leaf.delete()
        return params

    def in_place(optimizer: Any, params: Any, micro_batches: Any) -> Any:
        params = popping(optimizer, params, [{**b} for b in micro_batches])
        for batch in micro_batches:
            batch["mask"][:] = 0
        return params

    def loss_of_dict(params: Any, batch: Any) -> Any:
        return loss_fn(params, Batch(**batch))

    micro_batches = [batch._asdict() for batch in cut(make_rows(0))]
    on_device = jax.tree.map(jnp.asarray, micro_batches)
    for run, given in (
        (popping, micro_batches),
        (donating, on_device),
        (in_place, micro_batches),
    ):
        assert audit(run, loss_of_dict, parameters(0), given).passed


def test_a_loss_fn_that_is_a_mean_may_be_why_a_right_loop_fails():
    def mean_loss_fn(params: Any, batch: Batch) -> Any:
        loss_sum, num_tokens = loss_fn(params, batch)
        return loss_sum / num_tokens, num_tokens

    micro_batches = cut(make_rows(0))
    report = audit(by_transformation, mean_loss_fn, parameters(0), micro_batches)
    assert "the loop is right, and loss_fn returns a mean" in report.explanation


def test_a_step_with_another_optimizer_is_named():
    def run(optimizer: Any, params: Any, micro_batches: Any) -> Any:
        return by_transformation(optax.adam(0.1), params, micro_batches)

    report = audit(run, loss_fn, parameters(0), cut(make_rows(0)))
    assert report.verdict is Verdict.DISCARDED
    assert "another optimizer than the one that it is given" in report.explanation


def test_parameters_that_only_the_loop_freezes_are_named():
    def run(optimizer: Any, params: Any, micro_batches: Any) -> Any:
        trained = {name: name != "embedding" for name in params}
        frozen = {name: not is_trained for name, is_trained in trained.items()}
        optimizer = optax.chain(optimizer, optax.masked(optax.set_to_zero(), frozen))
        return by_transformation(optimizer, params, micro_batches)

    def also_frozen(params: Any, batch: Batch) -> Any:
        embedding = jax.lax.stop_gradient(params["embedding"])
        return loss_fn(params | {"embedding": embedding}, batch)

    micro_batches = cut(make_rows(0))
    report = audit(run, loss_fn, parameters(0), micro_batches)
    assert report.verdict is Verdict.UNKNOWN
    assert "also stop their gradient in loss_fn" in report.explanation
    assert audit(run, also_frozen, parameters(0), micro_batches).passed


def test_a_micro_batch_without_tokens():
    micro_batches = cut(make_rows(0))
    empty = micro_batches[2]._replace(mask=np.zeros_like(micro_batches[2].mask))
    micro_batches[2] = empty
    assert audit(by_transformation, loss_fn, parameters(0), micro_batches).passed
    report = audit(broken_loops.overwritten, loss_fn, parameters(0), micro_batches)
    assert report.verdict is Verdict.LAST_MICRO_BATCH_ONLY


def test_what_cannot_be_audited_says_so():
    params, micro_batches = parameters(0), cut(make_rows(0))

    def zero_loss_fn(params: Any, batch: Batch) -> Any:
        loss_sum, n = loss_fn(params, batch)
        return 0 * loss_sum, n

    no_tokens = [batch._replace(mask=0 * batch.mask) for batch in micro_batches]
    for error, message, arguments in (
        (TypeError, "run must be a function", (None, loss_fn, params, micro_batches)),
        (TypeError, "loss_fn must be", (full_batch, None, params, micro_batches)),
        (ValueError, "at least one micro-batch", (full_batch, loss_fn, params, [])),
        (ValueError, "not all 0", (full_batch, loss_fn, params, no_tokens)),
        (
            ValueError,
            "one that is zero",
            (full_batch, zero_loss_fn, params, micro_batches),
        ),
        (
            ValueError,
            "run must return the parameters",
            (lambda *_: {}, loss_fn, params, micro_batches),
        ),
    ):
        with pytest.raises(error, match=message):
            audit(*arguments)


def test_report_says_what_a_person_needs():
    report = audit(
        broken_loops.mean_of_means, loss_fn, parameters(0), cut(make_rows(0))
    )
    text = str(report)
    first = text.splitlines()[0]
    assert first.startswith("MEAN_OF_MEANS: the loop averages the means")
    assert "num_tokens" in first
    assert f"relative error {report.relative_error:.1e}" in text
    assert f"cosine {report.cosine:.4f}" in text
    assert set(report.candidates) == set(Verdict) - {Verdict.UNKNOWN}
    for verdict in report.candidates:
        assert verdict.value in text
    paths = [line.split()[-1] for line in text.splitlines()[-3:]]
    worst = sorted(report.parameters, key=lambda p: -p.error)
    assert paths == [p.path for p in worst]
    total = np.linalg.norm([p.error for p in report.parameters])
    exact = np.linalg.norm([p.exact for p in report.parameters])
    assert total / exact == pytest.approx(report.relative_error)


def test_plot_shows_both_norms_of_every_parameter():
    report = audit(full_batch, loss_fn, parameters(0), cut(make_rows(0)))
    figure = report.plot()
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        p.path for p in report.parameters
    ]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "applied",
        "exact",
    ]
    widths = [bar.get_width() for bar in axes.patches]
    applied = [p.applied for p in report.parameters]
    assert widths == applied + [p.exact for p in report.parameters]
