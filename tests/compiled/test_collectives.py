"""The report on a compiled program's collective operations."""

import dataclasses
from typing import Any

import collective_programs  # noqa: F401, registers the programs
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from model_on_8_devices import PROGRAMS, ROWS, array, mesh, rows

from optax_tokenaccum import CollectiveReport, collectives, token_accumulation
from optax_tokenaccum.nnx import make_train_step

Reports = dict[str, CollectiveReport]

K = 4
GRADIENT = 4 * (16 * 48 + 48 * 8)  # bytes
LOSS = 4  # bytes; the count is static
DATA, MODEL, BOTH = ("data",), ("model",), ("data", "model")

# Expected traffic: (bytes, times, kind, axes, path). See below where XLA may choose.
EXPECTED: dict[str, list[tuple[Any, ...]]] = {
    "gradient_of_rows": [(GRADIENT, 1, "all-reduce", DATA, "always")],
    "window_of_k": [(GRADIENT + LOSS, K, "all-reduce", DATA, "always")],
    "window_that_splits_its_batch": [
        (GRADIENT + LOSS, K, "all-reduce", DATA, "always")
    ],
    "window_of_as_many_as_given": [
        (GRADIENT + LOSS, None, "all-reduce", DATA, "always")
    ],
    "accumulate": [(GRADIENT + LOSS, 1, "all-reduce", DATA, "always")],
    "close": [],
    "token_budget": [(GRADIENT + LOSS, 1, "all-reduce", DATA, "always")],
    "deferred_accumulate": [],
    "deferred_close": [(GRADIENT, 1, "all-reduce", DATA, "always")],
    "deferred_token_budget": [(GRADIENT, 1, "all-reduce", DATA, "conditional")],
    "deferred_no_more": [(GRADIENT, 1, "all-reduce", DATA, "always")],
    "rows_by_split_batch": [],
    "rows_by_split_batch_over_two_axes": [],
    # Half of each parameter's gradient, and 16 x 8 outputs, summed over the halves.
    "tensor_parallel": [
        (GRADIENT // 2, 1, "all-reduce", DATA, "always"),
        (512, 1, "all-reduce", MODEL, "always"),
    ],
    "tensor_parallel_on_devices_in_another_order": [
        (GRADIENT // 2, 1, "all-reduce", DATA, "always"),
        (512, 1, "all-reduce", MODEL, "always"),
    ],
    "sharded_parameters_by_hand": [
        (GRADIENT, 1, "all-gather", DATA, "always"),
        (GRADIENT, 1, "reduce-scatter", DATA, "always"),
    ],
    "explicit_mesh": [(GRADIENT, 1, "all-reduce", DATA, "always")],
    "no_inputs": [(4, 1, "all-reduce", DATA, "always")],
    "psum": [(64, 1, "all-reduce", DATA, "always")],
    "psum_over_both_axes": [(64, 1, "all-reduce", BOTH, "always")],
    "psum_of_a_part_of_an_axis": [(64, 1, "all-reduce", DATA, "always")],
    "ppermute": [(64, 1, "collective-permute", DATA, "always")],
    "all_to_all": [(64, 1, "all-to-all", DATA, "always")],
    "psum_in_nested_loops": [(64, 15, "all-reduce", DATA, "always")],
    "psum_until_small": [(64, None, "all-reduce", DATA, "always")],
    "psum_in_a_branch": [
        (64, 1, "all-reduce", DATA, "conditional"),
        (4, 1, "all-reduce", DATA, "always"),
    ],
    # Query, key, value and output of width 32, with their biases.
    "flax_attention": [(4 * 4 * (32 * 32 + 32), 1, "all-reduce", DATA, "always")],
    "optax_multi_steps": [(GRADIENT, 1, "all-reduce", DATA, "always")],
}


@pytest.fixture(scope="module")
def reports() -> Reports:
    """The report of every program in collective_programs.py, by name."""
    return {name: collectives(make()) for name, make in PROGRAMS.items()}


@pytest.mark.parametrize(("name", "expected"), EXPECTED.items(), ids=EXPECTED)
def test_what_a_program_sends(
    reports: Reports, name: str, expected: list[tuple[Any, ...]]
):
    entries = reports[name].entries
    assert [(e.bytes, e.times, e.kind, e.axes, e.path) for e in entries] == expected


def test_every_program_is_tested(reports: Reports):
    others = {
        "fourier_transform",
        "fsdp_of_counted_tokens",
        "fsdp_of_counted_tokens_with_aux",
        "pmap",
        "rows_in_order",
        "sharded_parameters",
        "sort",
        "token_budget_of_sharded_parameters",
        "two_meshes",
    }
    assert {*reports} == {*EXPECTED} | others


def test_losing_a_deferral_shows(reports: Reports):
    def gradients(name: str, **only: str) -> float:
        return reports[name].bytes(axes="data", **only) / GRADIENT

    assert gradients("deferred_accumulate") == 0
    assert gradients("deferred_close") == 1
    assert gradients("deferred_token_budget", path="always") == 0
    assert gradients("deferred_token_budget", path="conditional") == 1
    # Without deferral: a gradient for every micro-batch, which the report must show.
    assert gradients("deferred_no_more") == 1
    assert round(gradients("accumulate"), 2) == 1
    assert round(gradients("window_of_k"), 2) == K
    assert round(gradients("token_budget", path="always"), 2) == 1


def test_rows_stay_where_they_are(reports: Reports):
    for name in ("rows_by_split_batch", "rows_by_split_batch_over_two_axes"):
        assert reports[name].bytes() == 0
    assert reports["window_that_splits_its_batch"].bytes(kind="all-to-all") == 0
    # Split in order, the first micro-batch is the rows of two devices, sent to all 8.
    rows_of_a_device = 4 * 8 * (16 + 8)
    assert reports["rows_in_order"].bytes(axes="data") >= rows_of_a_device


def test_close_of_sharded_parameters_adds_up_norms_in_its_branch(reports: Reports):
    report = reports["token_budget_of_sharded_parameters"]
    on_close = report.bytes(axes="data", path="conditional")
    assert 0 < on_close < 100  # from clipping and from the metrics
    assert report.bytes(path="always") >= 2 * GRADIENT
    assert report.bytes() == on_close + report.bytes(path="always")
    assert reports["token_budget"].bytes(path="conditional") == 0


def test_sharded_parameters_are_gathered_and_their_gradients_reduced(reports: Reports):
    report = reports["sharded_parameters"]
    assert report.bytes("all-gather", "data") == GRADIENT
    reduced = report.bytes("all-reduce") + report.bytes("reduce-scatter")
    assert reduced == GRADIENT == report.bytes() - GRADIENT


def test_only_one_branch_of_a_conditional_counts(reports: Reports):
    """One branch runs forward and backward, the other, without tokens, forward."""
    without_aux = reports["fsdp_of_counted_tokens"]
    report = reports["fsdp_of_counted_tokens_with_aux"]
    assert report.bytes("all-gather") == GRADIENT
    [gathers] = [entry for entry in report.entries if entry.kind == "all-gather"]
    assert (gathers.bytes, gathers.times, gathers.instructions) == (GRADIENT, 1, 2)
    assert f"{GRADIENT:,}      1             2  all-gather" in str(report)
    assert 0 <= report.bytes() - without_aux.bytes() < 100


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="no conditional there")
def test_the_branches_of_an_nnx_step_with_dropout_and_statistics():
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.first = nnx.Linear(16, 48, use_bias=False, rngs=rngs)
            self.norm = nnx.BatchNorm(48, use_scale=False, use_bias=False, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)
            self.last = nnx.Linear(48, 8, use_bias=False, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.last(self.dropout(self.norm(jnp.tanh(self.first(x)))))

    def loss_fn(model: Model, batch: Any) -> Any:
        mask = batch["y"] != 0
        return jnp.sum(jnp.where(mask, model(batch["x"]), 0)), jnp.sum(mask)

    model = Model(nnx.Rngs(0))
    nnx.update(model, jax.device_put(nnx.state(model), array(()).sharding))
    weights = nnx.state(model, nnx.Param)
    nnx.update(model, jax.device_put(weights, array((8,), "data").sharding))
    optimizer = nnx.Optimizer(
        model, token_accumulation(optax.sgd(1.0), K), wrt=nnx.Param
    )
    step = make_train_step(loss_fn)
    step.init(model, optimizer)
    compiled = step.accumulate.lower(model, optimizer, rows("data")).compile()
    assert compiled.as_text().count(" conditional(") > 0
    sent = collectives(compiled).bytes("all-gather")
    assert GRADIENT <= sent < 1.5 * GRADIENT  # and what BatchNorm needs


@pytest.mark.parametrize(
    ("name", "whole"), [("fourier_transform", 8 * 64 * 64), ("sort", 4 * 4096)]
)
def test_what_xla_does_with_other_peoples_programs(
    reports: Reports, name: str, whole: int
):
    report = reports[name]
    assert {entry.axes for entry in report.entries} == {DATA}
    assert whole / 8 <= report.bytes() <= 4 * whole


def test_axes_are_those_of_the_finest_mesh(reports: Reports):
    assert reports["psum"].mesh == {"data": 8}
    report = reports["two_meshes"]
    assert report.mesh == {"data": 4, "model": 2}
    assert report.bytes(axes="model") > report.bytes(axes="data") > 0


def test_an_axis_counts_whether_or_not_there_are_others(reports: Reports):
    report = reports["psum_over_both_axes"]
    for axes in ("data", "model", DATA, BOTH):
        assert report.bytes(axes=axes) == report.bytes() == 64
    report = reports["tensor_parallel"]
    assert report.bytes(axes="model") == 512
    assert report.bytes(axes=BOTH) == report.bytes() == 512 + GRADIENT // 2
    assert report.bytes("all-gather", "model") == 0


@pytest.mark.parametrize(
    ("only", "message"),
    [
        ({"axes": "dat"}, r"axes must be among data, model: got dat\."),
        ({"axes": ["data", "expert"]}, "axes must be among data, model: got expert"),
        (
            {"kind": "all_reduce"},
            "kind must be among all-gather, all-reduce, .*got all",
        ),
        ({"path": "close"}, "path must be among always, conditional: got close"),
    ],
    ids=["axis", "one of the axes", "kind", "path"],
)
def test_what_would_find_nothing_for_ever(
    reports: Reports, only: dict[str, Any], message: str
):
    with pytest.raises(ValueError, match=message):
        reports["tensor_parallel"].bytes(**only)


def test_loop_of_unknown_length_is_not_taken_for_one_trip(reports: Reports):
    report = reports["window_of_as_many_as_given"]
    with pytest.raises(
        ValueError, match="got 4,612 bytes of all-reduce in one of unkn"
    ):
        report.bytes(axes="data")
    assert report.bytes(kind="all-gather") == 0
    [entry] = report.entries
    assert entry.bytes * K == reports["window_of_k"].bytes()
    assert "4,612      ?  " in str(report)


def test_without_a_mesh_groups_have_no_names(reports: Reports):
    named = reports["psum_of_a_part_of_an_axis"]
    entries = tuple(entry._replace(axes=None) for entry in named.entries)
    report = dataclasses.replace(named, entries=entries, mesh=None)
    assert report.bytes() == 64
    with pytest.raises(
        ValueError, match="none has a NamedSharding. Look at report.ent"
    ):
        report.bytes(axes="data")
    assert "2 x 4 devices" in str(report)
    assert reports["pmap"].bytes(kind="all-reduce") == 64


def test_groups_are_places_in_the_mesh(reports: Reports):
    [entry] = reports["ppermute"].entries
    around = [(2 * i + j, (2 * i + 2) % 8 + j) for i in range(4) for j in (0, 1)]
    assert entry.groups == tuple(around)
    of_data, of_model = reports["tensor_parallel_on_devices_in_another_order"].entries
    assert of_data.groups == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert of_model.groups == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_table(reports: Reports):
    assert str(reports["tensor_parallel"]) == (
        "Collective operations on 8 devices (data=4, model=2), bytes on each:\n"
        "bytes  times  instructions  kind        over   path\n"
        "2,304      1             1  all-reduce  data   always\n"
        "  512      1             1  all-reduce  model  always"
    )
    assert "all-reduce  data (4 of 8)" in str(reports["psum_of_a_part_of_an_axis"])
    assert str(reports["close"]) == "No collective operations on 8 devices (data=8)."


def double(x: Any) -> Any:
    return 2 * x


JITTED = jax.jit(double)
NOT_COMPILED = {
    "function": (double, "function"),
    "jitted": (JITTED, "PjitFunction"),
    "lowered": (JITTED.lower(jnp.ones(2)), "Lowered"),
    "text": (JITTED.lower(jnp.ones(2)).compile().as_text(), "str"),
}


@pytest.mark.parametrize(
    ("given", "kind"), NOT_COMPILED.values(), ids=NOT_COMPILED.keys()
)
def test_program_that_is_not_compiled(given: Any, kind: str):
    with pytest.raises(TypeError, match=rf"got {kind}\. Write jax.jit\(f\)\.lower"):
        collectives(given)


def test_program_that_nnx_compiled():
    """Flax wraps the program in a class with the same name as jax's."""

    def gradient(model: nnx.Linear, x: Any) -> Any:
        return nnx.grad(lambda model: jnp.sum(model(x)))(model)

    model = nnx.Linear(16, 48, use_bias=False, rngs=nnx.Rngs(0))
    nnx.update(model, jax.device_put(nnx.state(model), array((), on=mesh()).sharding))
    x = jax.device_put(jnp.ones((ROWS, 16)), array((ROWS, 16), "data").sharding)
    report = collectives(nnx.jit(gradient).lower(model, x).compile())
    assert report.bytes(kind="all-reduce", axes="data") == 4 * 16 * 48
    with pytest.raises(TypeError, match="got Lowered"):
        collectives(nnx.jit(gradient).lower(model, x))


def test_backend_without_text(monkeypatch: pytest.MonkeyPatch):
    compiled = JITTED.lower(jnp.ones(2)).compile()
    assert collectives(compiled).entries == ()
    monkeypatch.setattr(jax.stages.Compiled, "as_text", lambda _: None)
    with pytest.raises(ValueError, match="must give the text of a compiled program"):
        collectives(compiled)
