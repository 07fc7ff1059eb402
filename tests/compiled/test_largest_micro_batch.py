"""`memory` and `largest_micro_batch`, against compiling every size."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import helpers
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from meshes import make_mesh

import optax_tokenaccum.nnx
from benchmarks.chips import CHIPS
from optax_tokenaccum import make_train_step, make_window_step, token_accumulation
from optax_tokenaccum._steps.program import Program
from optax_tokenaccum.compiled import largest_micro_batch, memory
from optax_tokenaccum.compiled._largest_micro_batch import _free

WIDTH, LAYERS, K = 64, 4, 2
ADAMW = optax.adamw(1e-3)


def loss_fn(params: Any, x: jax.Array) -> Any:
    def layer(x: jax.Array, w: jax.Array) -> Any:
        return jnp.tanh(x @ w), None

    x, _ = jax.lax.scan(layer, x, params)
    return jnp.sum(x**2), x.size


def init_params() -> jax.Array:
    return jnp.zeros((LAYERS, WIDTH, WIDTH))


def rows_of(n: int) -> list[Any]:
    return [jax.ShapeDtypeStruct((n, 8, WIDTH), jnp.float32)]


def bytes_of(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


class Run(NamedTuple):
    """A step, its state, its batches and the programs that it runs for a batch.

    With each program, the bytes on a device that it is not given.
    """

    step: Any
    state: Any
    batch_of: Callable[[int], list[Any]]
    programs: Callable[[Any], Iterable[tuple[jax.stages.Lowered, int]]]

    def fit(self, limit: int, **kwargs: Any) -> Any:
        return largest_micro_batch(
            self.step, self.state, self.batch_of, limit_bytes=limit, **kwargs
        )

    def peak(self, n: int) -> int:
        peaks, metrics = [], []
        for batch in self.batch_of(n):
            for lowered, besides in self.programs(batch):
                held = lowered.compile().memory_analysis()
                made = held.output_size_in_bytes - held.alias_size_in_bytes
                used = held.argument_size_in_bytes + held.temp_size_in_bytes
                peaks.append(used + made + besides)
                metrics.append(bytes_of(lowered.out_info[1:]))
        return max(peaks) + max(metrics)


def run_of(step: Any, state: Any, holder: Any, devices: int = 1) -> Run:
    """A train step of two programs; `holder` has the optimizer's state."""
    parts = state if state is not holder else (state,)

    def programs(batch: Any) -> Any:
        lowered = step.accumulate.lower(*parts, batch)
        yield lowered, bytes_of(holder.opt_state.inner_opt_state)
        besides = bytes_of(batch) // devices + bytes_of(lowered.out_info[1:])
        yield step.close_window.lower(*parts), besides

    return Run(step, state, lambda n: rows_of(devices * n), programs)


def two_programs(devices: int = 1, **options: Any) -> Run:
    step = make_train_step(loss_fn, ADAMW, K, **options)
    state = step.init(init_params())
    return run_of(step, state, state, devices)


def on_a_mesh() -> Run:
    return two_programs(8, mesh=make_mesh((8,)), data_axes="data")


def abstract_nnx() -> Run:
    @nnx.eval_shape
    def state() -> Any:
        model = nnx.Module()
        model.w = nnx.Param(init_params())
        return model, nnx.Optimizer(model, token_accumulation(ADAMW, K), wrt=nnx.Param)

    make = optax_tokenaccum.nnx.make_train_step
    return run_of(make(lambda model, x: loss_fn(model.w[...], x)), state, state[1])


def window_step() -> Run:
    step = make_window_step(loss_fn, ADAMW)
    state = jax.eval_shape(step.init, init_params())

    def windows_of(n: int) -> list[Any]:
        return [jax.ShapeDtypeStruct((K, n, 8, WIDTH), jnp.float32)]

    return Run(step, state, windows_of, lambda x: [(step.lower(state, x), 0)])


@pytest.mark.parametrize(
    "make", [two_programs, *map(helpers.slow, (abstract_nnx, on_a_mesh, window_step))]
)
def test_the_largest_that_fits_with_at_most_five_trials(make: Any):
    run = make()
    peaks = {n: run.peak(n) for n in (3, 9, 10)}
    for n, limit in ((3, peaks[3]), (9, peaks[9]), (9, peaks[10] - 1)):
        with helpers.count_compilations() as compilations:
            assert run.fit(limit) == (n, peaks[n], limit)
        assert len(compilations) <= 5 + (make is not window_step)


@pytest.mark.parametrize("donate", [True, False], ids=["donated", "not donated"])
def test_what_is_alive_when_the_update_starts(
    donate: bool, monkeypatch: pytest.MonkeyPatch
):
    """Two calls' `aux`, keywords, and the sums before the last micro-batch if kept."""

    def with_aux(params: Any, x: jax.Array, frozen: Any) -> Any:
        loss_sum, n = loss_fn(params, x)
        return loss_sum + jnp.sum(frozen), (n, jnp.zeros(50_000))

    def arrays_alive() -> list[jax.Array]:
        return [x for x in jax.live_arrays() if not x.is_deleted()]

    alive: list[int] = []
    call = Program.__call__

    def spy(self: Program, *args: Any, **kwargs: Any) -> Any:
        if self is step.close_window:
            alive.append(bytes_of(arrays_alive()) - bytes_of(before))
        return call(self, *args, **kwargs)

    def sort(updates: Any, params: Any) -> Any:  # the update needs most
        return jnp.sort(jnp.tile(updates, 4))[..., ::4]

    monkeypatch.setattr(Program, "__call__", spy)
    before = arrays_alive()
    optimizer = optax.chain(optax.stateless(sort), ADAMW)
    step = make_train_step(with_aux, optimizer, K, has_aux=True, donate=donate)
    state, frozen = step.init(init_params()), jnp.ones(10_000)
    for _ in range(K):
        batch = jnp.ones((1, 8, WIDTH))
        state, metrics = step(state, batch, frozen=frozen)
    close = memory(step.close_window.lower(state).compile())
    needed = alive[0] - close.arguments + close.peak
    assert alive[0] - bytes_of(state) - bytes_of(metrics) > 50_000 * 4
    fit_to = functools.partial(largest_micro_batch, step, state, rows_of, frozen=frozen)
    fit = fit_to(limit_bytes=needed + 200)
    assert needed - 200 < fit.peak_bytes
    with pytest.raises(ValueError, match="must fit"):
        fit_to(limit_bytes=needed - 200)


def test_every_shape_of_the_list_must_fit():
    run = two_programs()

    def buckets_of(max_tokens: int) -> list[Any]:
        lengths = 4, 16, 32
        return [
            jax.ShapeDtypeStruct((max_tokens // length, length, WIDTH), jnp.float32)
            for length in lengths
        ]

    limit = 8 * bytes_of(init_params())
    run = run._replace(batch_of=buckets_of)
    fit = run.fit(limit, multiple_of=32)
    assert fit.size % 32 == 0
    assert fit.peak_bytes == run.peak(fit.size) <= limit < run.peak(fit.size + 32)


@pytest.mark.slow
@pytest.mark.skipif(bool(CHIPS["v5e"].missing()), reason="needs libtpu, to compile")
def test_what_a_tpu_cannot_compile_does_not_fit():
    """A v5e has 16 GB; the compiler raises an error for programs that need more."""
    chip = jax.sharding.SingleDeviceSharding(CHIPS["v5e"].devices()[0])
    step = make_train_step(loss_fn, ADAMW, K)

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=chip)

    def batch_of(n: int) -> list[Any]:
        return [shape(256 * n, 4096)]

    state = step.init(shape(24, 4096, 4096))
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        step.accumulate.lower(state, *batch_of(2**10)).compile()
    fit = largest_micro_batch(step, state, batch_of, limit_bytes=10**12)
    assert fit.size > 1
    step.accumulate.lower(state, *batch_of(fit.size)).compile()
    with pytest.raises(ValueError, match="one of size 1024 needs more"):
        largest_micro_batch(
            step, state, batch_of, limit_bytes=10**12, multiple_of=2**10
        )


def test_what_a_device_says():
    stats = {"bytes_limit": 1000, "bytes_in_use": 300}
    assert _free(stats, own=100) == 950 - 200
    assert _free(stats, own=400) == 950  # the state is spread, or not there yet


def test_memory_of_a_program():
    double = jax.jit(lambda x: (2 * x, jnp.sum(jnp.sort(x))), donate_argnums=0)
    report = memory(double.lower(jnp.ones(1000)).compile())
    assert (report.arguments, report.aliased) == (4000, 4000)
    assert report.outputs >= 4004
    assert report.temporaries >= 4000
    assert report.peak >= 8004
    assert "temporaries" in str(report)
    assert memory(nnx.jit(lambda x: 2 * x).lower(jnp.ones(9)).compile()).arguments == 36
