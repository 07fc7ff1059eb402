"""The report on the collective operations of compiled programs on 8 devices."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.chips import CHIPS
from optax_tokenaccum import make_train_step, make_window_step, split_batch
from optax_tokenaccum.compiled import CollectiveReport, collectives

K, ROWS = 4, 64
SHAPES = {"in": (16, 48), "out": (48, 8)}
GRADIENT = 4 * (16 * 48 + 48 * 8)  # bytes
LOSS = 4  # bytes; the count is static
DATA, MODEL, BOTH = ("data",), ("model",), ("data", "model")

Program = Callable[[], Any]
# Expected traffic: (bytes, times, kind, axes), where XLA has no choice.
EXPECTED: dict[Program, list[tuple[Any, ...]]] = {}


def sends(*entries: tuple[Any, ...]) -> Callable[[Program], Program]:
    """Enter a program with its expected traffic."""

    def enter(f: Program) -> Program:
        EXPECTED[f] = [*entries]
        return f

    return enter


@functools.cache
def report_of(f: Program) -> CollectiveReport:
    return collectives(f())


@functools.cache
def mesh(model: int = 1) -> Mesh:
    devices = np.array(jax.devices())
    if model == 1:
        return Mesh(devices, "data")
    return Mesh(devices.reshape(-1, model), BOTH)


def array(shape: Any, *spec: Any, on: Any = None, dtype: Any = jnp.float32) -> Any:
    sharding = NamedSharding(on or mesh(), P(*spec))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def placed(tree: Any, *spec: Any) -> Any:
    """Return shapes of the tree's arrays on the mesh; scalars are replicated."""
    return jax.tree.map(
        lambda x: array(x.shape, *(spec if x.ndim else ()), dtype=x.dtype), tree
    )


def parameters(*, on: Any = None, **specs: Any) -> Any:
    return {
        name: array(shape, *specs.get(name, ()), on=on)
        for name, shape in SHAPES.items()
    }


def rows(*spec: Any, on: Any = None) -> Any:
    micro = (K,) if spec[0] is None else ()
    return {
        "x": array((*micro, ROWS, 16), *spec, on=on),
        "y": array((*micro, ROWS, 8), *spec, on=on),
    }


def loss_fn(params: Any, batch: Any) -> Any:
    predicted = jnp.tanh(batch["x"] @ params["in"]) @ params["out"]
    return jnp.sum((predicted - batch["y"]) ** 2), batch["y"].size


def gradient(params: Any, batch: Any) -> Any:
    return jax.grad(loss_fn, has_aux=True)(params, batch)[0]


def compiled(f: Any, *args: Any, out: Any = None) -> Any:
    """Compile `f`; `out` is an array, or a tree, with the output shardings."""
    out = jax.tree.map(lambda x: x.sharding, out)
    return jax.jit(f, out_shardings=out).lower(*args).compile()


def mapped(f: Any, *args: Any, out: Any) -> Any:
    """Map `f` over each device's part of the arguments, with no implicit reduction."""
    specs = jax.tree.map(lambda x: x.sharding.spec, args)
    on = jax.tree.leaves(args)[0].sharding.mesh
    return jax.shard_map(f, mesh=on, in_specs=specs, out_specs=out, check_vma=False)


@sends((GRADIENT + LOSS, None, "all-reduce", DATA))
def window_of_as_many_as_given() -> Any:
    step = make_window_step(loss_fn, optax.adamw(1e-3))
    state = placed(jax.eval_shape(step.init, parameters()))
    return compiled(
        lambda state, micro_batches, n: step(state, micro_batches, num_micro_batches=n),
        state,
        rows(None, "data"),
        array((), dtype=jnp.int32),
    )


def train_step(*spec: Any, loss_fn: Any = loss_fn, **options: Any) -> Any:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    step = make_train_step(loss_fn, optimizer, **options)
    return step, placed(jax.eval_shape(step.init, parameters()), *spec)


@sends((GRADIENT + LOSS, 1, "all-reduce", DATA))
def accumulate() -> Any:
    step, state = train_step()
    return step.accumulate.lower(state, rows("data")).compile()


@sends()
def rows_by_split_batch() -> Any:
    out = rows(None, BOTH, on=mesh(2))
    return compiled(lambda x: split_batch(x, K), rows(BOTH, on=mesh(2)), out=out)


OVER_MODEL: Any = {"in": (None, "model"), "out": ("model",)}


# Half of each parameter's gradient, and 16 x 8 outputs, summed over the halves.
@sends((GRADIENT // 2, 1, "all-reduce", DATA), (512, 1, "all-reduce", MODEL))
def tensor_parallel() -> Any:
    params = parameters(on=mesh(2), **OVER_MODEL)
    return compiled(gradient, params, rows("data", on=mesh(2)), out=params)


@sends((GRADIENT, 1, "all-gather", DATA), (GRADIENT, 1, "reduce-scatter", DATA))
def sharded_parameters_by_hand() -> Any:
    def f(params: Any, batch: Any) -> Any:
        gather = functools.partial(jax.lax.all_gather, axis_name="data", tiled=True)
        scatter = functools.partial(jax.lax.psum_scatter, axis_name="data", tiled=True)
        return jax.tree.map(scatter, gradient(jax.tree.map(gather, params), batch))

    arguments = placed(parameters(), "data"), rows("data")
    return compiled(mapped(f, *arguments, out=P("data")), *arguments)


def of_16(f: Any, *spec: Any, on: Any = None, out: Any = None) -> Any:
    x = array((8, 16), *(spec or DATA), on=on)
    f = mapped(f, x, out=x.sharding.spec if out is None else out)
    return compiled(f, x)


@sends((64, 1, "all-reduce", BOTH))
def psum_over_both_axes() -> Any:
    return of_16(lambda x: jax.lax.psum(x, BOTH), BOTH, on=mesh(2), out=P())


@sends((64, 1, "all-reduce", DATA))
def psum_of_a_part_of_an_axis() -> Any:
    groups = [[0, 1, 4, 5], [2, 3, 6, 7]]
    return of_16(lambda x: jax.lax.psum(x, "data", axis_index_groups=groups))


@sends((64, 1, "collective-permute", DATA))
def ppermute() -> Any:
    pairs = [(i, (i + 1) % 4) for i in range(4)]
    return of_16(lambda x: jax.lax.ppermute(x, "data", pairs), BOTH, on=mesh(2))


@sends((64, 15, "all-reduce", DATA))
def psum_in_nested_loops(on: Any = None) -> Any:
    def repeat(f: Any, times: int) -> Any:
        return lambda x: jax.lax.scan(lambda x, _: (f(x), None), x, length=times)[0]

    reduce = repeat(lambda x: jax.lax.psum(x, "data") / 8, 5)
    return of_16(repeat(lambda x: reduce(x + 1), 3), on=on)


@pytest.mark.parametrize("program", EXPECTED, ids=lambda f: f.__name__)
def test_what_a_program_sends_in_every_run(program: Program):
    report = report_of(program)
    found = [(e.bytes, e.times, e.kind, e.axes) for e in report.entries]
    assert found == EXPECTED[program]
    assert all(entry.path == "always" for entry in report.entries)
    assert ("No collective operations" in str(report)) == (not found)


@pytest.mark.slow
@pytest.mark.skipif(bool(CHIPS["v5e"].missing()), reason="needs libtpu, to compile")
def test_loops_of_a_tpu_are_counted():
    chips = Mesh(CHIPS["v5e"].devices(), "data")
    assert collectives(psum_in_nested_loops(chips)).bytes(axes="data") == 64 * 15


def test_close_of_sharded_parameters_adds_up_norms_in_its_branch():
    step, state = train_step("data", every_n_tokens=1000)
    args = state, rows("data")
    report = collectives(compiled(lambda *args: step(*args)[0], *args, out=state))
    on_close = report.bytes(axes="data", path="conditional")
    assert 0 < on_close < 100  # from clipping and from the metrics
    assert report.bytes(path="always") >= 2 * GRADIENT
    assert report.bytes() == on_close + report.bytes(path="always")


def test_only_one_branch_of_a_conditional_counts():
    """One branch runs forward and backward, the other, without tokens, forward."""

    def masked_loss_fn(params: Any, batch: Any) -> Any:
        mask = batch["y"] != 0
        predicted = jnp.tanh(batch["x"] @ params["in"]) @ params["out"]
        losses = jnp.where(mask, (predicted - batch["y"]) ** 2, 0)
        return jnp.sum(losses), (jnp.sum(mask), jnp.max(predicted))

    step, state = train_step("data", loss_fn=masked_loss_fn, has_aux=True)
    report = collectives(step.accumulate.lower(state, rows("data")).compile())
    [gathers] = [entry for entry in report.entries if entry.kind == "all-gather"]
    assert (gathers.bytes, gathers.times, gathers.instructions) == (GRADIENT, 1, 2)
    assert f"{GRADIENT:,}      1             2  all-gather" in str(report)


def test_axes_are_those_of_the_finest_mesh_and_count_alone_or_with_others():
    params = parameters(on=mesh(2), **OVER_MODEL)
    program = compiled(lambda b, p: gradient(p, b), rows("data"), params, out=params)
    report = collectives(program)
    assert report.mesh == {"data": 4, "model": 2}
    assert report.bytes(axes="model") > report.bytes(axes="data") > 0
    report = report_of(psum_over_both_axes)
    for axes in ("data", "model", DATA, BOTH):
        assert report.bytes(axes=axes) == report.bytes() == 64
    report = report_of(tensor_parallel)
    assert report.bytes(axes="model") == 512
    assert report.bytes(axes=BOTH) == report.bytes() == 512 + GRADIENT // 2
    assert report.bytes("all-gather", "model") == 0


def test_what_would_find_nothing_for_ever():
    report = report_of(tensor_parallel)
    with pytest.raises(ValueError, match="kind must be among all-gather, .*got all_r"):
        report.bytes(kind="all_reduce")
    with pytest.raises(ValueError, match="path must be among always, cond.*got close"):
        report.bytes(path="close")


def test_loop_of_unknown_length_is_not_taken_for_one_trip():
    report = report_of(window_of_as_many_as_given)
    with pytest.raises(ValueError, match="got 4,612 bytes of all-reduce in one of unk"):
        report.bytes(axes="data")
    assert report.bytes(kind="all-gather") == 0
    assert "4,612      ?  " in str(report)


def test_a_loop_of_zero_or_one_trips_is_conditional():
    def at_most_once(x: Any) -> Any:
        return jax.lax.while_loop(
            lambda carry: carry[0],
            lambda carry: (carry[0] & False, jax.lax.psum(carry[1], "data")),
            (jax.lax.psum(x[0, 0], "data") > 0, x),
        )[1]

    report = collectives(of_16(at_most_once))
    assert report.bytes(path="conditional") == 64
    assert report.bytes(path="always") == 4


def test_without_a_mesh_groups_have_no_names():
    named = report_of(psum_of_a_part_of_an_axis)
    entries = tuple(entry._replace(axes=None) for entry in named.entries)
    report = dataclasses.replace(named, entries=entries, mesh=None)
    assert report.bytes() == 64
    with pytest.raises(ValueError, match="none has a NamedSharding. Look at report.en"):
        report.bytes(axes="data")
    assert "all-reduce  2 x 4 devices" in str(report)
    assert "all-reduce  data (4 of 8)" in str(named)
    # A pmap runs over replicas in the oldest supported jax.
    f = jax.pmap(lambda x: jax.lax.psum(x, "data"), "data")
    program = f.lower(jax.ShapeDtypeStruct((8, 16), jnp.float32)).compile()
    assert collectives(program).bytes(kind="all-reduce") == 64


def test_groups_are_places_in_the_mesh():
    [entry] = report_of(ppermute).entries
    around = [(2 * i + j, (2 * i + 2) % 8 + j) for i in range(4) for j in (0, 1)]
    assert entry.groups == tuple(around)

    # On devices in another order, groups are places all the same.
    on = Mesh(np.array(jax.devices()).reshape(2, 4).T[::-1], BOTH)
    params = parameters(on=on, **OVER_MODEL)
    report = collectives(compiled(gradient, params, rows("data", on=on), out=params))
    of_data, of_model = report.entries
    assert (of_data.axes, of_data.groups) == (DATA, ((0, 2, 4, 6), (1, 3, 5, 7)))
    assert of_model.groups == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_a_program_that_nnx_compiled():
    """Flax wraps the program in a class with the same name as jax's."""

    def nnx_gradient(model: nnx.Linear, x: Any) -> Any:
        return nnx.grad(lambda model: jnp.sum(model(x)))(model)

    model = nnx.Linear(16, 48, use_bias=False, rngs=nnx.Rngs(0))
    nnx.update(model, jax.device_put(nnx.state(model), array((), on=mesh()).sharding))
    x = jax.device_put(jnp.ones((ROWS, 16)), array((ROWS, 16), "data").sharding)
    lowered = nnx.jit(nnx_gradient).lower(model, x)
    report = collectives(lowered.compile())
    assert report.bytes(kind="all-reduce", axes="data") == 4 * 16 * 48
