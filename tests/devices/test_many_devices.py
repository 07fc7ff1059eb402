"""Train step and window step over 8 devices, on meshes of both axis types."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import pytest
from helpers import slow
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import GRADIENT, K

from optax_tokenaccum import make_train_step
from optax_tokenaccum._core.backward import BackwardPass

# The state of this optimizer is not shaped like its parameters, so the compiler would
# place it differently from `init`.
FACTORED = optax.adafactor(1e-3, min_dim_size_to_factor=4)


def update(gradient: Any, state: Any, params: Any = None) -> Any:
    _, state = FACTORED.update(gradient, state, params)
    return jax.tree.map(lambda g: -meshes.SCALE * g, gradient), state


SGD_BESIDE_A_FACTORED_STATE = optax.GradientTransformation(FACTORED.init, update)
# (layout, kinds of axes, way, `reduce_every`); in place of the last one, "no mesh": the
# step is not told of the devices.
CASES: list[Any] = [
    ("data parallel", "auto", "two programs", "window"),
    ("data parallel", "explicit", "one program", "window"),
    ("tensor parallel", "auto explicit", "window", "window"),
    ("fsdp", "explicit", "two programs", "micro_batch"),
    ("data parallel", "auto", "nnx two programs", "window"),
    ("fsdp", "auto", "nnx window", "window"),
    slow("fsdp and tensor parallel", "explicit auto", "one program", "window"),
    slow("tensor parallel", "auto", "one program", "micro_batch"),
    slow("tensor parallel", "auto", "two programs", "no mesh"),
    slow("fsdp and tensor parallel", "auto", "two programs", "window"),
]


@pytest.mark.parametrize(("layout", "kind", "way", "reduce_every"), CASES)
def test_windows_are_exact_and_their_arrays_stay_where_they_are(
    layout: str, kind: str, way: str, reduce_every: str
):
    shape, specs = meshes.LAYOUTS[layout]
    mesh, batch = meshes.make_mesh(shape, kind), meshes.make_batch(shape[0])
    given = [meshes.stacked(batch)] if "window" in way else helpers.cut(batch, K)
    options: dict[str, Any] = {"mesh": mesh, "reduce_every": reduce_every}
    if reduce_every == "no mesh":
        options = {"mesh": None, "data_axes": None}
        rows = NamedSharding(mesh, P(None, "data") if "window" in way else P("data"))
        given = jax.device_put(given, rows)
    step = meshes.make_step(way, SGD_BESIDE_A_FACTORED_STATE, **options)
    state = step.init(meshes.placed(mesh, specs))
    where = jax.tree.map(lambda x: x.sharding, state)
    with helpers.count_compilations() as compilations:
        state, metrics = helpers.run_step(step, state, given)
        gradient = meshes.applied(state.params)
        state, _ = helpers.run_step(step, state, given * 2)
    assert len(compilations) == (2 if "two programs" in way else 1)
    assert helpers.relative_error(gradient, meshes.exact(shape[0])) < 2e-6
    assert metrics.updated and metrics.num_tokens == batch["mask"].sum()
    norm = optax.tree.norm(jax.tree.map(np.float64, meshes.exact(shape[0])))
    np.testing.assert_allclose(metrics.grad_norm, norm, rtol=1e-5)
    jax.tree.map(
        lambda x, s: x.sharding.is_equivalent_to(s, x.ndim) or pytest.fail(f"{s}"),
        state,
        where,
    )
    keeps = reduce_every == "no mesh" and "window" not in way
    sums = state.opt_state.acc_grads if keeps else {}
    for arrays in (state.params, sums):
        for name, x in arrays.items():
            assert x.sharding.is_equivalent_to(NamedSharding(mesh, specs[name]), x.ndim)


def test_mean_over_devices_of_means_is_another_gradient():
    batch = meshes.make_batch(8)
    grad = jax.jit(jax.grad(helpers.loss_mean_fn, has_aux=True))
    parts = [part for part in helpers.cut(batch, K * 8) if part["mask"].any()]
    means = [grad(helpers.init_params(0), part)[0] for part in parts]
    naive = jax.tree.map(lambda *gs: np.mean(gs, 0), *means)
    assert helpers.relative_error(naive, meshes.exact(8)) > 1e-2


def test_by_default_gradients_are_reduced_once_a_window():
    mesh, batch = meshes.make_mesh((8,)), meshes.make_batch(8)
    for options, every in (({}, "window"), (meshes.EACH, "micro-batch")):
        step = meshes.make_step("two programs", optax.sgd(1.0), mesh, **options)
        state = step.init(meshes.placed(mesh, meshes.WHOLE))
        accumulate = step.accumulate.lower(state, helpers.cut(batch, K)[0]).compile()
        sent = helpers.bytes_sent(accumulate)
        assert sent < 100 if every == "window" else sent >= GRADIENT
        assert helpers.bytes_sent(step.close_window.lower(state).compile()) >= GRADIENT


@pytest.mark.parametrize(
    ("layout", "kind", "reduce_every"),
    [
        ("data parallel", "auto", "window"),
        slow("fsdp", "auto", "window"),
        ("data parallel", "auto", "micro_batch"),
    ],
)
def test_what_is_sent_and_what_a_device_holds(
    layout: str, kind: str, reduce_every: str
):
    shape, specs = meshes.LAYOUTS[layout]
    mesh, batch = meshes.make_mesh(shape, kind), meshes.make_batch(shape[0])
    steps = [
        meshes.make_step(
            way,
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
            mesh,
            reduce_every=reduce_every,
        )
        for way in ("two programs", "window")
    ]
    state, state_of_windows = (step.init(meshes.placed(mesh, specs)) for step in steps)
    programs = [
        steps[0].accumulate.lower(state, helpers.cut(batch, K)[0]).compile(),
        steps[0].close_window.lower(state).compile(),
        steps[1].lower(state_of_windows, meshes.stacked(batch)).compile(),
    ]
    own = sum(4 * x.size for x in jax.tree.leaves(state.params))
    accumulate, close, window = (
        helpers.bytes_sent(program) / own for program in programs
    )
    if reduce_every == "window":
        # Parameters are gathered for a micro-batch, and once for a window. Of the sums
        # that are scattered, a device gets its part.
        gathered, reduced = (1, 1 / 8) if layout == "fsdp" else (0, 1)
        assert gathered <= accumulate < gathered + 0.01
        assert reduced <= close < reduced + 0.01
        # Including K losses and counts.
        assert gathered + reduced <= window < gathered + reduced + 0.02
    else:  # and the updated parameters are gathered
        assert 1 <= accumulate < 1.01
        assert 1 <= close < 1.01
        assert 2 <= window < 2.02  # the loop over its micro-batches counts once
    if layout == "data parallel":  # a device adds to its sum, or to its part, in place
        memory = programs[0].memory_analysis()
        held = GRADIENT if reduce_every == "window" else GRADIENT // 8
        assert held <= memory.alias_size_in_bytes < held + 64  # and scalars
        outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
        assert outputs < GRADIENT / 8


@pytest.mark.skipif(not BackwardPass.is_supported, reason="never in a loop")
@pytest.mark.parametrize(
    ("reduce_every", "loops"), [("window", False), ("micro_batch", True)]
)
def test_a_gpu_updates_in_a_loop_if_parameters_are_gathered(
    reduce_every: str, loops: bool
):
    mesh = meshes.make_mesh((8,), "auto")
    options = {"data_axes": "data", "reduce_every": reduce_every}
    step = make_train_step(helpers.loss_sum_fn, optax.adamw(1e-3), mesh=mesh, **options)
    state = step.init(np.ones((128, 128), np.float32))
    traced = jax.jit(lambda state: step.close_window(state)).trace(state)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("stablehlo.while" in text) == loops


@pytest.mark.skipif(not BackwardPass.is_supported, reason="never in a loop")
@pytest.mark.parametrize("spec", [P("data"), P()], ids=["FSDP", "ZeRO-2"])
def test_a_tpu_updates_in_a_loop_unless_parameters_are_gathered(
    spec: P, monkeypatch: pytest.MonkeyPatch
):
    helpers.run_as_if_on("tpu", monkeypatch)
    mesh = meshes.make_mesh((8,), "auto")
    options = {"data_axes": "data", "reduce_every": "micro_batch"}
    step = make_train_step(helpers.loss_sum_fn, optax.adamw(1e-3), mesh=mesh, **options)
    large = jnp.ones((128, 128), jnp.bfloat16, device=NamedSharding(mesh, spec))
    small = jnp.ones(8, jnp.bfloat16, device=NamedSharding(mesh, P()))
    state = step.init((large, small))
    text = step.close_window.lower(state).as_text()
    assert ("stablehlo.while" in text) == (spec == P("data"))


@pytest.mark.skipif(not BackwardPass.is_supported, reason="never emptied ahead")
@pytest.mark.parametrize(
    ("reduce_every", "empties_ahead"), [("window", True), ("micro_batch", False)]
)
def test_gpus_over_which_xla_may_spread_parameters_add_whole_gradients(
    reduce_every: str, empties_ahead: bool
):
    def loss_fn(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ w)), jnp.sum(x > 0)

    mesh = meshes.make_mesh((8,), "auto")
    options = {"data_axes": "data", "reduce_every": reduce_every}
    step = make_train_step(loss_fn, optax.sgd(1e-3), mesh=mesh, **options)
    state = step.init(np.ones((128, 128), np.float32))
    x = np.ones((8, 128), np.float32)
    traced = jax.jit(lambda state: step.accumulate(state, x)).trace(state)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("stablehlo.while" in text) == empties_ahead
