"""The audit gives every broken loop its verdict and passes every right one."""

import dataclasses
import functools
import io
import itertools
import re
import sys
import time
from pathlib import Path
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from audited_loops import (
    GALLERY,
    MICRO_BATCHES,
    K,
    apply,
    apply_once,
    by_multi_steps,
    by_train_step,
    by_transformation,
    by_window_step,
    concatenated,
    full_batch,
    gradient_of,
    init_params,
    loss_mean_fn,
    mean,
    of_weights,
    ragged_batch,
    scale,
    tokens_of,
    with_counts,
    with_transformation,
)
from audited_loops import loss_sum_fn as loss_fn
from helpers import cut, slow
from jax.sharding import PartitionSpec as P
from meshes import make_mesh

from optax_tokenaccum import AuditReport, Verdict, audit, make_train_step
from optax_tokenaccum._audit_report import ParameterRow, progress
from optax_tokenaccum.ragged import pad_micro_batch, plan_window

OF_THEIR_OWN = [k for k, x in GALLERY.items() if x.verdict is not Verdict.UNKNOWN]
LATER = {"padding counted", "labels not shifted", "stale window", "float16 sums"}


@pytest.mark.parametrize(
    ("run", "dtype"),
    [
        (by_train_step, "float32"),
        slow(by_window_step, "float32"),
        slow(by_transformation, "bfloat16"),
        slow(by_multi_steps, "bfloat16"),
    ],
)
def test_right_loops_pass(run: Any, dtype: str):
    report = audit(run, loss_fn, init_params(dtype), MICRO_BATCHES)
    report.assert_exact()
    assert (report.verdict, report.factor) == (Verdict.EXACT, 1)
    np.testing.assert_allclose(report.weights, 1, rtol=10 * report.rtol)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(slow(x, "float32") if x in LATER else (x, "float32") for x in GALLERY),
        *(slow(x, "bfloat16") for x in ("mean of means", "not wrapped")),
    ],
)
def test_broken_loops_get_their_verdict(name: str, dtype: str):
    broken = GALLERY[name]
    params = init_params(broken.dtype or dtype)
    report = audit(broken.run, loss_fn, params, MICRO_BATCHES)
    assert report.verdict is broken.verdict, str(report)
    assert not report.passed
    with pytest.raises(AssertionError, match=broken.verdict.name):
        report.assert_exact()
    if dtype == "float32":
        assert broken.says in report.explanation


def test_the_loops_in_the_docs_are_those_with_a_verdict_of_their_own():
    page = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()
    lines = page.split("| loop |")[1].splitlines()[2:]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in itertools.takewhile(lambda line: line.startswith("|"), lines)
    ]
    assert rows == [
        [name, GALLERY[name].mistake, GALLERY[name].verdict.name]
        for name in OF_THEIR_OWN
    ]


def without_tokens(batch: Any) -> Any:
    return batch | {"mask": np.zeros_like(batch["mask"])}


def test_a_micro_batch_without_tokens_has_no_weight_and_a_mean_of_it_is_named():
    micro_batches = [*MICRO_BATCHES]
    micro_batches[2] = without_tokens(micro_batches[2])

    def nan_without_tokens(params: Any, batch: Any) -> Any:
        loss_sum, n = loss_fn(params, batch)
        return (loss_sum + 0 * jnp.sum(params["bias"])) / n * n, n

    run = with_transformation(nan_without_tokens)
    report = audit(run, nan_without_tokens, init_params(), micro_batches)
    report.assert_exact()
    assert np.isnan(report.weights).tolist() == [i == 2 for i in range(K)]
    shown = str(report).split("by micro-batch")[1].splitlines()[1:5]
    assert [line.split()[1] for line in shown] == ["1", "1", "no", "1"]
    assert "no gradient" in shown[2]

    def mean_of_none(params: Any, batch: Any) -> Any:
        grads, n = gradient_of(loss_fn)(params, batch)
        return scale(grads, 1 / n)

    naive = GALLERY["mean of means"].run
    for run, verdict in (
        (GALLERY["overwritten"].run, Verdict.LAST_MICRO_BATCH_ONLY),
        (naive, Verdict.MEAN_OF_MEANS),
        (functools.partial(naive, gradient=mean_of_none), Verdict.UNKNOWN),
    ):
        report = audit(run, loss_fn, init_params(), micro_batches)
        assert report.verdict is verdict
    assert "the mean of a micro-batch without tokens is 0/0" in report.explanation
    empty_first = [micro_batches.pop(2), *micro_batches]
    report = audit(GALLERY["not wrapped"].run, loss_fn, init_params(), empty_first)
    assert report.verdict is Verdict.STEPPED_EVERY_MICRO_BATCH


N, PADDED = tokens_of(MICRO_BATCHES), MICRO_BATCHES[0]["mask"].size
EQUAL = ragged_batch(0)
EQUAL["mask"] = np.broadcast_to(np.arange(16) < 9, EQUAL["mask"].shape)
# Weights of tokens, where 1 is exact, and what the audit says about them.
NAMED: dict[str, tuple[Any, str]] = {
    "means over padding": (N / PADDED, "divided by .* a wrong count"),
    "means given as sums": (1 / N, "a mean is given where a sum is expected"),
    "twice": (np.full(K, 2), "it is 2 times what it should be. Are two devices summed"),
    "its own": (np.linspace(2, 0.5, K), "weighted in a way of their own"),
}


@pytest.mark.parametrize("name", NAMED)
def test_weights_are_named(name: str):
    weights, says = NAMED[name]
    report = audit(of_weights(weights), loss_fn, init_params(), MICRO_BATCHES)
    assert report.verdict is Verdict.UNKNOWN
    assert re.search(says, report.explanation), str(report)
    np.testing.assert_allclose(report.weights, weights, rtol=100 * report.rtol)
    is_scaled = np.ptp(weights) == 0
    expected = pytest.approx(weights[0], rel=report.rtol) if is_scaled else None
    assert report.factor == expected


@pytest.mark.slow
def test_a_mean_that_is_divided_by_at_least_1_does_not_pass():
    """Weights of tokens may add up to less than 1."""

    def weighted(params: Any, batch: Any) -> Any:
        loss_sum, _ = loss_fn(params, batch)
        return jnp.max(batch["mask"]) * loss_sum, jnp.sum(batch["mask"])

    def mean_by_1(params: Any, batch: Any) -> Any:
        grads, n = gradient_of(weighted)(params, batch)
        return scale(grads, 1 / jnp.maximum(n, 1))

    run = with_counts(mean_by_1, lambda batch: batch["mask"].sum())
    weights = np.where(np.isin(np.arange(K), [1, 4]), 0.002, 1)
    micro_batches = [
        batch | {"mask": np.float32(batch["mask"] * weight)}
        for batch, weight in zip(MICRO_BATCHES, weights, strict=True)
    ]
    report = audit(run, weighted, init_params(), micro_batches)
    assert report.verdict is Verdict.UNKNOWN
    sums = np.array([batch["mask"].sum() for batch in micro_batches])
    np.testing.assert_allclose(report.tokens, sums, rtol=1e-6)
    np.testing.assert_allclose(report.weights, np.minimum(sums, 1), rtol=1e-2)


@pytest.mark.slow
def test_a_loop_that_plans_its_own_micro_batches_is_given_sequences():
    def of_rows(params: Any, batch: Any) -> Any:
        losses, mask = (batch["x"] @ params - 1) ** 2, batch["mask"]
        return jnp.sum(mask * losses), jnp.sum(mask)

    def of_sequence(params: Any, sequence: Any) -> Any:
        return of_rows(params, jax.tree.map(lambda x: x[None], sequence))

    random, lengths = np.random.default_rng(0), [9, 9, 3]
    sequences = [
        {"x": np.float32(random.normal(size=(n, 8))), "mask": np.ones(n, np.float32)}
        for n in lengths
    ]

    def with_pads(mask: int) -> Any:
        def run(optimizer: Any, params: Any, sequences: Any) -> Any:
            step = make_train_step(of_rows, optimizer)
            state = step.init(params)
            for plan in plan_window(lengths, max_tokens=16):
                pads = {"x": 1, "mask": mask}
                batch = pad_micro_batch(sequences, plan, pad_values=pads)
                state, _ = step.accumulate(state, batch)
            return step.close_window(state)[0].params

        return audit(run, of_sequence, jnp.linspace(-1, 2, 8), sequences)

    with_pads(0).assert_exact()
    report = with_pads(1)
    assert report.verdict is Verdict.UNKNOWN
    assert "Does padding count?" in report.explanation


@pytest.mark.slow
def test_small_gradients_of_large_parameters_are_read():
    """Gradients of 1e-4, too small for `sgd(1.0)` to move bfloat16 parameters of 1."""

    def small_loss_fn(params: Any, batch: Any) -> Any:
        x, mask = batch
        return 1e-4 * jnp.sum(mask * (params * x)), jnp.sum(mask)

    random = np.random.default_rng(0)
    micro_batches = [
        (np.float32(random.normal(size=(8, 5))), np.float32(np.tri(8, 5, i)))
        for i in range(-3, 5)
    ]
    params = jnp.ones(5, jnp.bfloat16)
    gradient = jax.grad(lambda p: small_loss_fn(p, micro_batches[0])[0])(params)
    assert (params - gradient == params).all()
    run = with_transformation(small_loss_fn)
    assert audit(run, small_loss_fn, params, micro_batches).passed


@dataclasses.dataclass
class LineLoss:
    """A loss that is an object without a hash, like a mutable dataclass."""

    def __call__(self, params: Any, batch: Any) -> Any:
        return jnp.sum(params["slope"] * batch), batch.size


def test_a_loop_may_return_python_floats_and_a_loss_have_no_hash():
    def run(optimizer: Any, params: Any, micro_batches: Any) -> Any:
        gradient = {"slope": jnp.float32(np.concatenate(micro_batches).mean())}
        return jax.tree.map(float, apply_once(optimizer, params, gradient))

    micro_batches = [np.full(1, 2.0, np.float32), np.full(9, 10.0, np.float32)]
    assert audit(run, LineLoss(), {"slope": jnp.float32(1.5)}, micro_batches).passed
    # A number that is not an array is a constant, as in Equinox.
    params = {"slope": jnp.float32(1.5), "offset": 2.0}

    def trained(optimizer: Any, params: Any, micro_batches: Any) -> Any:
        gradient = dict.fromkeys(params, jnp.float32(1.0))
        return jax.tree.map(float, apply_once(optimizer, params, gradient))

    with pytest.raises(TypeError, match="must be arrays: 2.0 was trained"):
        audit(trained, LineLoss(), params, micro_batches)


def test_a_loop_may_change_or_donate_its_micro_batches():
    def changing(optimizer: Any, params: Any, micro_batches: Any) -> Any:
        params = full_batch(optimizer, params, micro_batches)
        for batch in micro_batches:
            batch.pop("mask")[:] = 0
        return params

    def donating(optimizer: Any, params: Any, micro_batches: Any) -> Any:
        params = full_batch(optimizer, params, micro_batches)
        for leaf in jax.tree.leaves(micro_batches):
            leaf.delete()
        return params

    on_device = jax.tree.map(jnp.asarray, MICRO_BATCHES)
    for run, given in ((changing, MICRO_BATCHES), (donating, on_device)):
        assert audit(run, loss_fn, init_params(), given).passed


@pytest.mark.parametrize("k", [K, slow(1)])
def test_equal_lengths_are_never_a_pass(k: int):
    micro_batches = cut(EQUAL, k)
    report = audit(by_transformation, loss_fn, init_params(), micro_batches)
    assert report.verdict is Verdict.UNKNOWN and not report.passed
    assert report.explanation.startswith("cannot tell")
    assert "ragged" in report.explanation


def two_windows(optimizer: Any, params: Any, micro_batches: Any) -> Any:
    state = optimizer.init(params)
    for _ in range(2):
        grads = mean(params, concatenated(micro_batches))
        params, state = apply(optimizer, params, state, grads)
    return params


def with_adam(_: Any, *args: Any) -> Any:
    return by_transformation(optax.adam(0.1), *args)


def with_frozen_layer(optimizer: Any, params: Any, micro_batches: Any) -> Any:
    frozen = {name: name == "hidden" for name in params}
    optimizer = optax.chain(optimizer, optax.masked(optax.set_to_zero(), frozen))
    return by_transformation(optimizer, params, micro_batches)


@pytest.mark.parametrize(
    ("run", "given", "verdict", "says"),
    [
        (two_windows, loss_fn, Verdict.UNKNOWN, "make it one window, one step"),
        (with_adam, loss_fn, Verdict.DISCARDED, "run uses another optimizer than"),
        (
            with_frozen_layer,
            loss_fn,
            Verdict.UNKNOWN,
            "Does run freeze parameters",
        ),
        (by_transformation, loss_mean_fn, Verdict.UNKNOWN, "loss_fn returns a mean"),
    ],
    ids=["two windows", "another optimizer", "frozen parameters", "mean loss_fn"],
)
def test_other_causes_are_named(run: Any, given: Any, verdict: Verdict, says: str):
    report = audit(run, given, init_params(), MICRO_BATCHES)
    assert report.verdict is verdict
    assert says in report.explanation


def zero_loss_fn(params: Any, batch: Any) -> Any:
    loss_sum, n = loss_fn(params, batch)
    return 0 * loss_sum, n


def test_what_cannot_be_audited_says_so():
    params, full = init_params(), full_batch
    no_tokens = [without_tokens(batch) for batch in MICRO_BATCHES]

    def nothing(*_: Any) -> Any:
        return {}

    for error, message, arguments in (
        (TypeError, "run must be a func", (None, loss_fn, params, MICRO_BATCHES)),
        (TypeError, "loss_fn must be", (full, None, params, MICRO_BATCHES)),
        (ValueError, r"must have tokens.* got \[\]", (full, loss_fn, params, [])),
        (ValueError, "must have tokens", (full, loss_fn, params, no_tokens)),
        (
            ValueError,
            "gradient of norm 0",
            (full, zero_loss_fn, params, MICRO_BATCHES),
        ),
        (ValueError, "run must return", (nothing, loss_fn, params, MICRO_BATCHES)),
    ):
        with pytest.raises(error, match=message):
            audit(*arguments)


def test_the_report_says_what_a_person_needs_in_80_columns():
    run = GALLERY["mean of means"].run
    report = audit(run, loss_fn, init_params(), MICRO_BATCHES)
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert text.startswith("MEAN_OF_MEANS: the loop averages means")
    assert report.explanation in text and "num_tokens" in report.explanation
    assert f"relative error {report.relative_error:.1e}" in text
    assert f"cosine {report.cosine:.4f}" in text
    assert set(report.candidates) == set(Verdict) - {Verdict.UNKNOWN}
    for verdict, error in report.candidates.items():
        assert (verdict.value in text) == np.isfinite(error)
    assert report.tokens == tuple(N)
    for n, weight in zip(N, report.weights, strict=True):
        assert f" {n} {weight:.4g} " in text
    paths = [line.split()[-1] for line in lines[-3:]]
    assert paths == [p.path for p in sorted(report.parameters, key=lambda p: -p.error)]
    total = np.linalg.norm([p.error for p in report.parameters])
    exact = np.linalg.norm([p.exact for p in report.parameters])
    assert total / exact == pytest.approx(report.relative_error)


def test_a_wide_report_is_aligned_and_cut():
    name = "/".join(["a_module_with_a_long_name"] * 5)
    report = AuditReport(
        verdict=Verdict.UNKNOWN,
        explanation="unknown " * 40,
        relative_error=1.0,
        cosine=-1.0,
        factor=None,
        rtol=1e-4,
        candidates={Verdict.EXACT: 1.0, Verdict.NOT_DIVIDED: np.inf},
        tokens=(1.0, 12345678.0, 0.125, *[3.0] * 7),
        weights=(1.0, 1234567.0, np.nan, *[1.0] * 7),
        parameters=[ParameterRow(f"{name}/{i}", 1e100, 1.0, 1e100) for i in range(9)],
    )
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 80
    assert "inf" not in str(report) and "nan" not in str(report)
    (start,) = [i for i, line in enumerate(lines) if "by micro-batch" in line]
    column = lines[start].index("weight")
    values = [line[column:] for line in lines[start + 1 : start + 4]]
    assert values == ["1", "1.235e+06", "no gradient"]
    assert [line for line in lines if line.endswith("more")] == [
        "  and 2 more",
        "  and 1 more",
    ]
    assert lines[-2].endswith("/7")


@pytest.mark.parametrize("wrap", ["pmap", slow("shard_map")])
def test_means_over_devices_are_named(wrap: str):
    """Each device takes the mean of its own rows, and `pmean` the mean of these."""
    d = jax.local_device_count()
    micro_batches = [cut(ragged_batch(i), 1)[0] for i in range(3)]

    def naive(params: Any, batch: Any) -> Any:
        return jax.lax.pmean(
            jax.grad(lambda *x: loss_mean_fn(*x)[0])(params, batch), "data"
        )

    def right(params: Any, batch: Any) -> Any:
        grads, n = jax.grad(loss_fn, has_aux=True)(params, batch)
        return jax.tree.map(
            lambda g: g / jax.lax.psum(n, "data"), jax.lax.psum(grads, "data")
        )

    def over_devices(gradient: Any) -> Any:
        def of_devices(params: Any, batch: Any) -> Any:
            if wrap == "pmap":
                split = jax.tree.map(lambda x: x.reshape(d, -1, *x.shape[1:]), batch)
                mapped = jax.pmap(gradient, "data", in_axes=(None, 0))
                return jax.tree.map(lambda x: x[0], mapped(params, split))
            mesh = make_mesh((d,))
            specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": False}
            return jax.jit(jax.shard_map(gradient, mesh=mesh, **specs))(params, batch)

        return with_counts(of_devices, lambda batch: batch["mask"].sum())

    audit(over_devices(right), loss_fn, init_params(), micro_batches).assert_exact()
    report = audit(over_devices(naive), loss_fn, init_params(), micro_batches)
    assert report.verdict is Verdict.UNKNOWN and report.relative_error > 0.01
    assert report.explanation.startswith("devices take the mean of their own means")


def test_a_loss_without_a_count_is_part_of_the_window():
    """A micro-batch may have a loss and a count of 0: images without a box."""

    def over_boxes(params: Any, batch: Any) -> Any:
        return jnp.sum((batch["x"] @ params - 1) ** 2), jnp.sum(batch["n"])

    random = np.random.default_rng(0)
    micro_batches = [
        {"x": np.float32(random.normal(size=(4, 3))), "n": np.full(4, n)}
        for n in (0, 3, 1)
    ]

    def run(optimizer: Any, params: Any, micro_batches: Any, dropped: Any = ()) -> Any:
        kept = [b for i, b in enumerate(micro_batches) if i not in dropped]
        found = [gradient_of(over_boxes)(params, batch) for batch in kept]
        total = sum(n for _, n in found)
        return apply_once(optimizer, params, sum(g for g, _ in found) / total)

    audit(run, over_boxes, jnp.ones(3), micro_batches).assert_exact()
    dropping = functools.partial(run, dropped=[0])
    report = audit(dropping, over_boxes, jnp.ones(3), micro_batches)
    assert "1 count for nothing" in report.explanation
    np.testing.assert_allclose(report.weights, [0, 1, 1], atol=1e-3)


def test_swapped_arguments_are_named():
    with pytest.raises(TypeError, match=r"run must be .*\(optimizer, .* run first"):
        audit(loss_fn, full_batch, init_params(), MICRO_BATCHES)
    one_argument: Any = mean_of_rows
    with pytest.raises(TypeError, match=r"loss_fn must be a function of \(params, mic"):
        audit(full_batch, one_argument, init_params(), MICRO_BATCHES)


def mean_of_rows(batch: Any) -> Any:
    return jnp.mean(batch["x"]), len(batch["x"])


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
):
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", shown)
    seconds = itertools.count(step=6)
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))
    assert [*progress("abcde", "audit: gradient")] == [*"abcde"]
    lines = shown.getvalue().replace("\r", "\n").split("\n")
    if is_terminal:
        assert lines[3] == f"[{'#' * 8:20}] audit: gradient 3 of 5"
        assert len(lines) == 7 and lines[-1] == "\033[K"  # the bar is removed
    else:
        assert lines == ["audit: gradient 2 of 5", "audit: gradient 4 of 5", ""]


# Low precision, and loops that move parameters without a gradient.

ALL_ONES = np.ones(K)


@functools.cache
def rounded_to(dtype: str) -> Any:
    """Compute `loss_fn` in `dtype`, whatever the dtype of the parameters."""

    def rounded(params: Any, batch: Any) -> Any:
        return loss_fn(jax.tree.map(lambda x: x.astype(dtype), params), batch)

    return rounded


# Three of them have a token in each row, of a thousand in the window.
SHORT = [
    batch | {"mask": batch["mask"] & (np.arange(64) < 1)} if i in (1, 3, 5) else batch
    for i, batch in enumerate(helpers.cut(helpers.ragged_batch(0), K))
]
UNLIKE = np.ones(K)
UNLIKE[[1, 5]], UNLIKE[3] = 0, 2


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        (UNLIKE, "of the 8 micro-batches, 2 count for nothing and 1 twice"),
        (ALL_ONES, "the exact mean of the window, by loss_fn's count"),
    ],
    ids=["two lost, one twice", "right"],
)
def test_weights_tell_what_rounding_hides(weights: Any, says: str):
    run, params = (
        of_weights(weights, helpers.loss_sum_fn),
        helpers.init_params(0, "bfloat16"),
    )
    report = audit(run, helpers.loss_sum_fn, params, SHORT)
    # By the relative error alone, all of them would pass.
    assert report.relative_error < report.rtol or not (weights == 1).all()
    assert report.passed == (weights == 1).all(), str(report)
    assert says in report.explanation, str(report)


@pytest.mark.slow
def test_a_loop_in_lower_precision_than_loss_fn_needs_a_tolerance():
    run = of_weights(ALL_ONES, rounded_to("bfloat16"))
    report = audit(run, loss_fn, init_params(), MICRO_BATCHES)
    assert report.verdict is Verdict.UNKNOWN
    assert "lower precision than in loss_fn (give rtol)" in report.explanation
    report = audit(run, loss_fn, init_params(), MICRO_BATCHES, rtol=0.05)
    assert report.passed and report.relative_error > 1e-4
    report = audit(run, loss_fn, init_params(), MICRO_BATCHES, rtol=1e-4)
    assert report.verdict is Verdict.UNKNOWN and report.rtol == 1e-4


def test_float32_is_as_strict_as_ever():
    """An error of 1e-3 is not noise: it repeats at other parameters."""
    for run in (
        of_weights(ALL_ONES, foreign=1e-3),
        of_weights(1 + 1e-3 * np.arange(K)),
    ):
        report = audit(run, loss_fn, init_params(), MICRO_BATCHES)
        assert 1e-4 < report.relative_error < 1e-2
        assert report.verdict is Verdict.UNKNOWN, str(report)
        assert report.rtol == pytest.approx(1e-4, rel=0.1)


def test_what_moves_without_a_gradient_is_no_step():
    """Weight decay before the update."""

    def drifting(run: Any) -> Any:
        def around(optimizer: Any, params: Any, micro_batches: Any) -> Any:
            decayed = jax.tree.map(lambda p: 0.99 * p, params)
            return run(optimizer, decayed, micro_batches)

        return around

    for run, verdict in (
        (of_weights(ALL_ONES), Verdict.EXACT),
        (GALLERY["not wrapped"].run, Verdict.STEPPED_EVERY_MICRO_BATCH),
        (of_weights(np.zeros(K)), Verdict.DISCARDED),
    ):
        report = audit(drifting(run), loss_fn, init_params(), MICRO_BATCHES)
        assert report.verdict is verdict, str(report)


# Losses that couple rows: never EXACT where the audit can look.

PARAMS = {"w": jnp.float32([0.5, -1.0, 2.0])}
COUPLED, NOT_LOOKED = "loss_fn couples rows:", "Not checked: whether loss_fn couples"


def shaped_batch(seed: int, rows: int, length: int) -> Any:
    random = np.random.default_rng(seed)
    return {
        "x": np.float32(random.normal(size=(rows, length, 3))),
        "y": np.float32(random.normal(size=(rows, length))),
        "mask": np.arange(length) < random.integers(1, length + 1, (rows, 1)),
        "labels": random.integers(-1, 5, (rows, length)),
    }


def plain(params: Any, batch: Any) -> Any:
    losses = (batch["x"] @ params["w"] - batch["y"]) ** 2
    return jnp.sum(jnp.where(batch["mask"], losses, 0)), jnp.sum(batch["mask"])


def of_labels(params: Any, batch: Any) -> Any:
    return plain(params, batch | {"mask": batch["labels"] >= 0})


def contrastive(params: Any, batch: Any) -> Any:
    rows = jnp.mean(batch["x"] * params["w"], 1)
    scores = 5 * rows @ jnp.roll(rows, 1, axis=1).T
    return -jnp.sum(jnp.diag(jax.nn.log_softmax(scores))), len(rows)


def balanced_by_mask(params: Any, batch: Any) -> Any:
    """A loss that couples rows, and leaves padding out."""
    loss_sum, n = plain(params, batch)
    gates = jax.nn.softmax(batch["x"] * params["w"])
    gates = jnp.where(batch["mask"][..., None], gates, 0).sum((0, 1)) / n
    return loss_sum + n * jnp.sum(gates**2), n


def without_mask(params: Any, batch: Any) -> Any:
    return plain(params, batch | {"mask": jnp.ones(batch["y"].shape)})


def mean_of_plain(params: Any, batch: Any) -> Any:
    loss_sum, n = plain(params, batch)
    return loss_sum / n, n


def of_four_rows(params: Any, batch: Any) -> Any:
    assert batch["x"].shape[0] == 4
    return plain(params, batch)


def of_one_sequence(params: Any, batch: Any) -> Any:
    return plain(params, jax.tree.map(lambda x: x[None], batch) | {"x": jnp.ones(3)})


def attending(params: Any, batch: Any) -> Any:
    """A loss of one sequence, whose tokens see each other."""
    x = jnp.exp(batch["y"] * params["w"][0])
    losses = (x / jnp.sum(x) * batch["y"] - 1) ** 2
    return jnp.sum(jnp.where(batch["mask"], losses, 0)), jnp.sum(batch["mask"])


# No two micro-batches have the same shape.
SHAPES = [shaped_batch(i, 5 - i, 5 + i) for i in range(3)]
FOUR = [shaped_batch(i, 4, 6) for i in range(3)]
FLAT: Any = [{k: b[k][0] for k in ("y", "mask")} for b in FOUR]


@pytest.mark.parametrize(
    ("loss_fn", "batches", "says"),
    [
        slow(contrastive, FOUR, COUPLED),
        (contrastive, SHAPES, COUPLED),
        (balanced_by_mask, SHAPES, COUPLED),
        (mean_of_plain, SHAPES, "see check_loss_fn"),
        (plain, SHAPES, None),
        slow(of_labels, SHAPES, None),
        (of_four_rows, FOUR, NOT_LOOKED),
        (plain, [shaped_batch(i, 1, 4 + i) for i in range(3)], NOT_LOOKED),
        slow(attending, FLAT, NOT_LOOKED),
        slow(of_one_sequence, FLAT, None),
        slow(without_mask, SHAPES, None),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_loss_that_couples_rows_is_never_exact(loss_fn: Any, batches: Any, says: Any):
    report = audit(with_transformation(loss_fn), loss_fn, PARAMS, batches)
    assert report.relative_error < 1e-5
    is_right = says in (None, NOT_LOOKED)
    assert report.verdict is (Verdict.EXACT if is_right else Verdict.UNKNOWN)
    for text in (COUPLED, NOT_LOOKED, "see check_loss_fn"):
        assert (text in report.explanation) == (text == says), str(report)
