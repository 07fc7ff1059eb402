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

import audited_loops as loops
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import problems
import pytest
from audited_loops import GALLERY, MICRO_BATCHES, TOKENS, K, gradient_of, of_weights
from helpers import init_params, loss_sum_fn, slow
from jax.sharding import PartitionSpec as P
from meshes import make_mesh

from optax_tokenaccum.debug._audit import audit
from optax_tokenaccum.debug._report import AuditReport, ParameterRow, Verdict, progress

LATER = {"padding counted", "labels not shifted", "stale window", "float16 sums"}


def audited(run: Any, loss_fn: Any = loss_sum_fn, **options: Any) -> AuditReport:
    params = init_params(0, options.pop("dtype", "float32"))
    batches = options.pop("micro_batches", MICRO_BATCHES)
    return audit(run, loss_fn, params, batches, **options)


@pytest.mark.parametrize(
    ("run", "dtype"),
    [
        (loops.by_train_step, "float32"),
        slow(loops.by_window_step, "float32"),
        slow(loops.by_transformation, "bfloat16"),
        slow(loops.by_multi_steps, "bfloat16"),
    ],
)
def test_right_loops_pass(run: Any, dtype: str):
    report = audited(run, dtype=dtype)
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
    report = audited(broken.run, broken.loss_fn, dtype=broken.dtype or dtype)
    assert report.verdict is broken.verdict, str(report)
    assert not report.passed
    with pytest.raises(AssertionError, match=broken.verdict.name):
        report.assert_exact()
    assert broken.says in report.explanation
    if broken.fixed:
        audited(broken.fixed, broken.loss_fn).assert_exact()


def test_the_advice_for_frozen_parameters_makes_a_loop_exact():
    def stopped(params: Any, batch: Any) -> Any:
        hidden = jax.lax.stop_gradient(params["hidden"])
        return loss_sum_fn(params | {"hidden": hidden}, batch)

    audited(GALLERY["frozen parameters"].run, stopped).assert_exact()
    frozen = functools.partial(loops.frozen, wrap=optax.MultiSteps)
    report = audited(loops.loop(frozen, loops.mean))
    assert "As to the others, the loop averages means" in report.explanation


def test_the_page_shows_the_loops_with_a_verdict_of_their_own():
    page = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()
    rows = re.findall(r"^\| (.*) \| (.*) \| ([A-Z_]+) \|$", page, re.MULTILINE)
    shown = {name: x for name, x in GALLERY.items() if x.mistake}
    assert rows == [(name, x.mistake, x.verdict.name) for name, x in shown.items()]
    assert {x.verdict for x in shown.values()} == {*Verdict} - {
        Verdict.EXACT,
        Verdict.UNKNOWN,
    }


def test_a_micro_batch_without_tokens_has_no_weight_and_a_mean_of_it_is_named():
    empty = {**MICRO_BATCHES[2], "mask": np.zeros_like(MICRO_BATCHES[2]["mask"])}
    micro_batches = [*MICRO_BATCHES[:2], empty, *MICRO_BATCHES[3:]]
    given = functools.partial(audited, micro_batches=micro_batches)

    def mean_of_none(params: Any, batch: Any) -> Any:  # 0/0 in every gradient
        loss_sum, n = loss_sum_fn(params, batch)
        return (loss_sum + 0 * jnp.sum(params["out"])) / n, n

    def nan_without_tokens(params: Any, batch: Any) -> Any:
        mean, n = mean_of_none(params, batch)
        return mean * n, n

    run = loops.loop(loops.token_accumulation, gradient_of(nan_without_tokens))
    report = given(run, nan_without_tokens)
    report.assert_exact()
    assert np.isnan(report.weights).tolist() == [i == 2 for i in range(K)]
    shown = str(report).split("by micro-batch")[1].splitlines()[1:5]
    assert [line.split()[1] for line in shown] == ["1", "1", "no", "1"]
    assert "no gradient" in shown[2]
    last = given(GALLERY["overwritten"].run)
    assert last.verdict is Verdict.LAST_MICRO_BATCH_ONLY
    assert given(loops.mean_of_means).verdict is Verdict.MEAN_OF_MEANS
    report = given(loops.loop(optax.MultiSteps, gradient_of(mean_of_none)))
    assert report.verdict is Verdict.UNKNOWN
    assert "the mean of a micro-batch without tokens is 0/0" in report.explanation
    report = given(GALLERY["not wrapped"].run, micro_batches=[empty, *MICRO_BATCHES])
    assert report.verdict is Verdict.STEPPED_EVERY_MICRO_BATCH


# Weights of tokens, where 1 is exact, and what the audit says about them.
SIZE = MICRO_BATCHES[0]["mask"].size
WEIGHTS: dict[str, tuple[Any, str]] = {
    "means over padding": (TOKENS / SIZE, "is each clipped, or its count wrong?"),
    "twice": (np.full(K, 2), "is 2 times the exact one. Is it clipped, or summed"),
    "negated": (np.full(K, -1), "the direction is opposite: it is -1 times"),
}


@pytest.mark.parametrize(("weights", "says"), WEIGHTS.values(), ids=WEIGHTS)
def test_weights_are_named(weights: Any, says: str):
    report = audited(of_weights(weights))
    assert report.verdict is Verdict.UNKNOWN
    assert re.search(says, report.explanation), str(report)
    np.testing.assert_allclose(report.weights, weights, rtol=100 * report.rtol)
    is_scaled = np.ptp(weights) == 0
    expected = pytest.approx(weights[0], rel=report.rtol) if is_scaled else None
    assert report.factor == expected


@pytest.mark.slow
def test_a_mean_that_is_divided_by_at_least_1_does_not_pass():
    """Weights of tokens may add up to less than 1."""
    tokens = [(8, 3), (0.25, 0), (2, 1), (0.125, 0.25)]
    micro_batches = [problems.batch_of(i, x) for i, x in enumerate(tokens)]

    def mean_by_1(params: Any, batch: Any) -> Any:
        grads, n = gradient_of(problems.linear_loss)(params, batch)
        return loops.scale(grads, 1 / jnp.maximum(n, 1)), n

    run = loops.loop(loops.MultiSteps, mean_by_1)
    report = audit(run, problems.linear_loss, problems.PARAMS, micro_batches)
    assert report.verdict is Verdict.UNKNOWN
    assert report.tokens == (11, 0.25, 3, 0.375)
    np.testing.assert_allclose(report.weights, [1, 0.25, 1, 0.375], rtol=1e-2)


@pytest.mark.slow
def test_small_gradients_of_large_parameters_are_read():
    """Gradients of 1e-4, too small for `sgd(1.0)` to move bfloat16 parameters of 1."""

    def small_loss_fn(params: Any, batch: Any) -> Any:
        x, mask = batch
        return 1e-4 * jnp.sum(mask * (params * x)), jnp.sum(mask)

    micro_batches = [
        (problems.normal(i, 8, 5), np.float32(np.tri(8, 5, i - 3))) for i in range(8)
    ]
    params, gradient = jnp.ones(5, jnp.bfloat16), gradient_of(small_loss_fn)
    assert (params - gradient(params, micro_batches[0])[0] == params).all()
    run = loops.loop(loops.token_accumulation, gradient)
    assert audit(run, small_loss_fn, params, micro_batches).passed


@dataclasses.dataclass
class LineLoss:
    """A loss that is an object without a hash, like a mutable dataclass."""

    def __call__(self, params: Any, batch: Any) -> Any:
        return jnp.sum(params["slope"] * batch), batch.size


def test_a_loop_may_return_python_floats_and_a_loss_have_no_hash():
    def run(optimizer: Any, params: Any, micro_batches: Any) -> Any:
        mean = jnp.float32(np.concatenate(micro_batches).mean())
        moved = loops.once(lambda *_: dict.fromkeys(params, mean))
        return jax.tree.map(float, moved(optimizer, params, micro_batches))

    micro_batches = [np.full(1, 2.0, np.float32), np.full(9, 10.0, np.float32)]
    params = {"slope": jnp.float32(1.5)}
    assert audit(run, LineLoss(), params, micro_batches).passed
    # A number that is not an array is a constant, as in Equinox.
    with pytest.raises(TypeError, match="must be arrays: 2.0 was trained"):
        audit(run, LineLoss(), params | {"offset": 2.0}, micro_batches)


def test_a_loop_may_change_or_donate_its_micro_batches():
    def changing(batch: Any) -> None:
        batch.pop("mask")[:] = 0

    def donating(batch: Any) -> None:
        for leaf in jax.tree.leaves(batch):
            leaf.delete()

    on_device = jax.tree.map(jnp.asarray, MICRO_BATCHES)
    for change, given in ((changing, MICRO_BATCHES), (donating, on_device)):

        def run(*arguments: Any, change: Any = change) -> Any:
            params = loops.full_batch(*arguments)
            for batch in arguments[-1]:
                change(batch)
            return params

        assert audited(run, micro_batches=given).passed


@pytest.mark.parametrize("k", [K, slow(1)])
def test_equal_lengths_are_never_a_pass(k: int):
    batch = helpers.ragged_batch(0)
    batch["mask"] = np.broadcast_to(np.arange(64) < 9, batch["mask"].shape)
    report = audited(loops.by_transformation, micro_batches=helpers.cut(batch, k))
    assert report.verdict is Verdict.UNKNOWN
    assert report.explanation.startswith("cannot tell")
    assert "ragged" in report.explanation


def test_the_report_says_what_a_person_needs_in_80_columns():
    report = audited(loops.mean_of_means)
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert text.startswith("MEAN_OF_MEANS: the loop averages means")
    assert report.explanation in text and "num_tokens" in report.explanation
    assert f"relative error {report.relative_error:.1e}" in text
    assert f"cosine {report.cosine:.4f}" in text
    assert {*report.candidates} == {*Verdict} - {Verdict.UNKNOWN}
    for verdict, error in report.candidates.items():
        assert (verdict.value in text) == np.isfinite(error)
    assert report.tokens == tuple(TOKENS)
    for n, weight in zip(TOKENS, report.weights, strict=True):
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
    more = [line.strip() for line in lines if line.endswith("more")]
    assert more == ["and 2 more", "and 1 more"]
    assert lines[-2].endswith("/7")


@pytest.mark.parametrize("wrap", ["pmap", slow("shard_map")])
def test_means_over_devices_are_named(wrap: str):
    """Each device takes the mean of its own rows, and `pmean` the mean of these."""
    d = jax.local_device_count()
    micro_batches = [helpers.ragged_batch(i) for i in range(3)]

    def naive(params: Any, batch: Any) -> Any:
        return jax.lax.pmean(loops.mean(params, batch)[0], "data")

    def right(params: Any, batch: Any) -> Any:
        grads, n = jax.lax.psum(loops.summed(params, batch), "data")
        return loops.scale(grads, 1 / n)

    def over_devices(gradient: Any) -> Any:
        def of_devices(params: Any, batch: Any) -> Any:
            n = batch["mask"].sum()
            if wrap == "pmap":
                split = jax.tree.map(lambda x: x.reshape(d, -1, *x.shape[1:]), batch)
                mapped = jax.pmap(gradient, "data", in_axes=(None, 0))
                return jax.tree.map(lambda x: x[0], mapped(params, split)), n
            mesh = make_mesh((d,))
            specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": False}
            mapped = jax.jit(jax.shard_map(gradient, mesh=mesh, **specs))
            return mapped(params, batch), n

        return loops.loop(loops.MultiSteps, of_devices)

    audited(over_devices(right), micro_batches=micro_batches).assert_exact()
    report = audited(over_devices(naive), micro_batches=micro_batches)
    assert report.verdict is Verdict.UNKNOWN and report.relative_error > 0.01
    assert report.explanation.startswith("devices take the mean of their own means")


def test_a_loss_without_a_count_is_part_of_the_window():
    """A micro-batch may have a loss and a count of 0: images without a box."""

    def over_boxes(params: Any, batch: Any) -> Any:
        return jnp.sum((batch["x"] @ params["w"] - 1) ** 2), jnp.sum(batch["weights"])

    micro_batches = [problems.batch_of(i, [n] * 4) for i, n in enumerate((0, 3, 1))]
    for weights, says in (([1, 1, 1], "exact mean"), ([0, 1, 1], "are lost")):

        def weighted(params: Any, window: Any, weights: Any = weights) -> Any:
            shares, gradient = np.array(weights) / 16, gradient_of(over_boxes)
            return loops.weighted_sum(params, window, shares, gradient)

        run = loops.once(weighted)
        report = audit(run, over_boxes, problems.PARAMS, micro_batches)
        assert report.passed == all(weights)
        assert says in report.explanation
        np.testing.assert_allclose(report.weights, weights, atol=1e-3)


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

ONES = np.ones(K)
# Three of them have a token in each row, of a thousand in the window.
SHORT = [
    batch | {"mask": batch["mask"] & (np.arange(64) < 1)} if i in (1, 3, 5) else batch
    for i, batch in enumerate(MICRO_BATCHES)
]


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ([1, 0, 1, 2, 1, 0, 1, 1], "micro-batches are lost (weight 0) or repeated (2)"),
        (ONES, "the exact mean of the window, by loss_fn's count"),
    ],
    ids=["two lost, one twice", "right"],
)
def test_weights_tell_what_rounding_hides(weights: Any, says: str):
    run = of_weights(np.array(weights))
    report = audited(run, micro_batches=SHORT, dtype="bfloat16")
    assert report.passed == all(weights), str(report)
    assert says in report.explanation, str(report)


@pytest.mark.slow
def test_a_loop_in_lower_precision_than_loss_fn_needs_a_tolerance():
    def rounded(params: Any, batch: Any) -> Any:
        return loss_sum_fn(jax.tree.map(jnp.bfloat16, params), batch)

    run = of_weights(ONES, gradient_of(rounded))
    report = audited(run)
    assert report.verdict is Verdict.UNKNOWN
    assert "lower precision (give rtol)" in report.explanation
    report = audited(run, rtol=0.05)
    assert report.passed and report.relative_error > 1e-4
    report = audited(run, rtol=1e-4)
    assert report.verdict is Verdict.UNKNOWN and report.rtol == 1e-4


def test_float32_is_as_strict_as_ever():
    """An error of 1e-3 is not noise: it repeats at other parameters."""
    for run in (of_weights(ONES, foreign=1e-5), of_weights(1 + 1e-3 * np.arange(K))):
        report = audited(run)
        assert 1e-4 < report.relative_error < 1e-2
        assert report.verdict is Verdict.UNKNOWN, str(report)
        assert report.rtol == pytest.approx(1e-4, rel=0.1)


@pytest.mark.parametrize(
    ("run", "verdict"),
    [
        (of_weights(ONES), Verdict.EXACT),
        (GALLERY["not wrapped"].run, Verdict.STEPPED_EVERY_MICRO_BATCH),
        (of_weights(0 * ONES), Verdict.DISCARDED),
    ],
    ids=["exact", "not wrapped", "discarded"],
)
def test_what_moves_without_a_gradient_is_no_step(run: Any, verdict: Verdict):
    """Weight decay before the update."""

    def drifting(optimizer: Any, params: Any, micro_batches: Any) -> Any:
        decayed = jax.tree.map(lambda p: 0.99 * p, params)
        return run(optimizer, decayed, micro_batches)

    report = audited(drifting)
    assert report.verdict is verdict, str(report)


# Losses that couple rows: never EXACT where the audit can look.

COUPLED, NOT_LOOKED = "couples rows, or is not a sum", "Not checked: whether loss_fn"
plain = problems.linear_loss


def contrastive(params: Any, batch: Any) -> Any:
    rows = batch["x"] * params["w"]
    return -jnp.sum(jnp.diag(jax.nn.log_softmax(5 * rows @ batch["x"].T))), len(rows)


def balanced(params: Any, batch: Any) -> Any:
    """A loss that couples rows, and leaves padding out."""
    loss_sum, n = plain(params, batch)
    gates = jax.nn.softmax(batch["x"] * params["w"])
    return loss_sum + n * jnp.sum((batch["weights"] @ gates / n) ** 2), n


def mean_of_plain(params: Any, batch: Any) -> Any:
    loss_sum, n = plain(params, batch)
    return loss_sum / n, n


def of_four_rows(params: Any, batch: Any) -> Any:
    assert len(batch["x"]) == 4
    return plain(params, batch)


def attending(params: Any, y: Any) -> Any:
    """A loss of one sequence, whose tokens see each other."""
    x = jnp.exp(y * params["w"][0])
    return jnp.sum((x / jnp.sum(x) * y - 1) ** 2), len(y)


def of_one_sequence(params: Any, y: Any) -> Any:
    return jnp.sum((y * params["w"][0] - 1) ** 2), len(y)


def rows_of(*weights: Any) -> Any:
    return [problems.batch_of(i, x) for i, x in enumerate(weights)]


SHAPES = rows_of([1, 2, 3, 1, 1, 1], [2, 1, 3], [2, 1, 1, 1])
FOUR = rows_of([1, 2, 3, 1], [2, 1, 3, 0], [1, 1, 1, 0])
FLAT = [problems.normal(i, 6 + i) for i in range(3)]


@pytest.mark.parametrize(
    ("loss_fn", "batches", "says"),
    [
        (contrastive, SHAPES, COUPLED),
        (balanced, SHAPES, COUPLED),
        (mean_of_plain, SHAPES, COUPLED),
        (plain, SHAPES, None),
        (of_four_rows, FOUR, NOT_LOOKED),
        (plain, rows_of([1], [2], [4]), NOT_LOOKED),
        slow(attending, FLAT, NOT_LOOKED),
        slow(of_one_sequence, FLAT, None),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_loss_that_couples_rows_is_never_exact(loss_fn: Any, batches: Any, says: Any):
    run = loops.loop(loops.token_accumulation, gradient_of(loss_fn))
    report = audit(run, loss_fn, problems.PARAMS, batches)
    assert report.relative_error < 1e-5
    is_right = says in (None, NOT_LOOKED)
    assert report.verdict is (Verdict.EXACT if is_right else Verdict.UNKNOWN)
    for text in (COUPLED, NOT_LOOKED):
        assert (text in report.explanation) == (text == says), str(report)
