"""What a backward pass adds: nothing without tokens, and leaves of every kind."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import pytest
import window_gradients
from helpers import run_step, stack
from window_gradients import every_way, params_of, through_layers, window_of

from optax_tokenaccum import make_train_step, make_window_step


def divides_by_tokens(params: Any, batch: Any) -> Any:
    """A loss whose value and gradients are NaN without tokens."""
    y = through_layers(params, batch["x"]) + params["out"]
    n = jnp.sum(batch["mask"])
    mean = jnp.sum(jnp.sum(y.astype(jnp.float32) ** 2, -1) * batch["mask"]) / n
    return mean * n, n


def finite_reference(params: Any, batches: Any) -> Any:
    expected = window_gradients.by_hand(divides_by_tokens, params, batches)[1]
    chex.assert_tree_all_finite(expected)
    return expected


@pytest.mark.parametrize(
    ("tokens", "dtype"),
    [
        ((0, 8, 3), jnp.float32),
        ((8, 0, 3), jnp.bfloat16),
        pytest.param((8, 3, 0), jnp.float32, marks=pytest.mark.slow),
        pytest.param((0,), jnp.float32, marks=pytest.mark.slow),
    ],
    ids=["first", "middle", "last", "only"],
)
@every_way
def test_nan_gradients_of_no_tokens_add_nothing(way: Any, tokens: Any, dtype: Any):
    params, batches = params_of(dtype), window_of(*tokens)
    empty = next(batch for batch, n in zip(batches, tokens, strict=True) if not n)
    alone = jax.grad(lambda *args: divides_by_tokens(*args)[0])(params, empty)
    assert all(jnp.all(jnp.isnan(x)) for x in jax.tree.leaves(alone))
    got = way(divides_by_tokens, params, batches)
    expected = finite_reference(params, batches)
    tolerance = {"rtol": 1e-2} if dtype == jnp.bfloat16 else {"rtol": 1e-5}
    chex.assert_trees_all_close(got, expected, atol=1e-6, **tolerance)


FP8 = "_overwrite_with_gradient"


@jax.custom_vjp
def remembered(x: jax.Array, largest: jax.Array) -> jax.Array:
    return x


# The "gradient" is the next value: the largest value here.
remembered.defvjp(
    lambda x, largest: (x, x),
    lambda x, g: (g, jnp.max(jnp.abs(x))),
)


def with_largest(params: Any, batch: Any) -> Any:
    x = remembered(batch["x"], params[FP8]["largest"])
    return divides_by_tokens(params["params"], batch | {"x": x})


OVER: dict[str, Any] = {"mesh": meshes.make_mesh((8,)), "data_axes": "data"}
EACH = OVER | {"reduce_every": "micro_batch"}


@pytest.mark.parametrize("options", [{}, OVER, EACH], ids=["1", "8", "8, each"])
@pytest.mark.parametrize(
    "make", [make_train_step, pytest.param(make_window_step, marks=pytest.mark.slow)]
)
def test_rows_of_a_device_without_tokens_count_for_a_maximum(make: Any, options: Any):
    """The last devices have no tokens in the first micro-batch, none in the second."""
    batches = window_of(5, 0, 3)
    batches[0]["x"][7] = 50.0  # of a device that has no tokens
    batches[1]["x"][:] = 100.0  # nobody has tokens
    params = {"params": params_of(), FP8: {"largest": jnp.float32(7)}}
    schedule = (3,) if make is make_train_step else ()
    # The mean over a device's tokens is NaN on those without.
    step = make(with_largest, optax.sgd(1.0), *schedule, **options)
    given = batches if make is make_train_step else [stack(batches)]
    state, _ = run_step(step, step.init(params), given)
    assert float(state.params[FP8]["largest"]) == 50
    expected = finite_reference(params["params"], batches)
    moved = jax.tree.map(lambda p, g: p - g, params["params"], expected)
    chex.assert_trees_all_close(state.params["params"], moved, rtol=1e-5, atol=1e-6)


# Known while the loss is traced.
KNOWN = {"int": 5, "int 0": 0, "numpy": np.float32(3), "numpy int": np.int32(0)}


def with_count(count: Any) -> Any:
    def loss_fn(params: Any, batch: Any) -> Any:
        loss_sum, n = window_gradients.loss_fn(params, batch)
        return loss_sum, count(n) if callable(count) else count

    return loss_fn


def conditionals_of(count: Any) -> int:
    step = make_train_step(with_count(count), optax.sgd(1.0), 2)
    state = jax.eval_shape(step.init, params_of())
    text = step.accumulate.lower(state, window_gradients.batch_of(0, 8)).as_text()
    return text.count("stablehlo.case")


def test_tokens_that_are_known_need_no_conditional():
    for known in (0, 5):
        conditionals = conditionals_of(lambda n: n)
        assert conditionals_of(known) < conditionals or not within_backward()


def within_backward() -> bool:
    return jax.__version_info__ >= (0, 11)


UNUSABLE = {
    "negative": lambda n: n - 20,
    "infinite": lambda n: n / 0,
    "NaN": lambda n: jnp.nan * n,
    "one is": lambda n: jnp.where(n == 8, n, -n),
    "one is infinite": lambda n: jnp.where(n == 8, n, jnp.inf),
}


@pytest.mark.parametrize("count", (KNOWN | UNUSABLE).values(), ids=[*KNOWN, *UNUSABLE])
@every_way
def test_counts_that_are_known_or_not_usable(way: Any, count: Any):
    params, batches, loss_fn = params_of(), window_of(8, 4), with_count(count)
    expected = window_gradients.by_hand(loss_fn, params, batches)[1]
    chex.assert_trees_all_close(way(loss_fn, params, batches), expected, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, OVER, EACH], ids=["1", "8", "8, each"])
@pytest.mark.parametrize(
    "k",
    [2, pytest.param(lambda _: 2, marks=pytest.mark.slow)],
    ids=["two programs", "one program"],
)
def test_sums_of_a_restored_state_are_overwritten(k: Any, options: Any):
    loss_fn = window_gradients.loss_fn
    step = make_train_step(loss_fn, window_gradients.KEEPS, k, **options)
    state, batches = step.init(params_of()), window_of(0, 8)
    opt_state = state.opt_state
    stale = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), opt_state.acc_grads)
    state = state._replace(opt_state=opt_state._replace(acc_grads=stale))
    got = run_step(step, state, batches)[0].opt_state.inner_opt_state
    expected = window_gradients.by_hand(loss_fn, params_of(), batches)[1]
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-6)


def leaves_loss(params: Any, batch: Any) -> Any:
    """A sum over all leaves but "untouched", each to a power of the tokens."""
    total = 0.0
    for name, x in params.items():
        if name != "untouched":
            # Not the square: the gradient of a complex number is not its conjugate.
            value = jnp.sum(
                jnp.asarray(x) ** 2 * (1 + 2j if jnp.iscomplexobj(x) else 1)
            )
            total = total + jnp.real(value).astype(jnp.float32)
    losses = total * jnp.mean(batch["x"] ** 2, -1) * batch["mask"]
    return jnp.sum(losses), jnp.sum(batch["mask"])


RNG = np.random.default_rng(3)
VECTOR = np.float32(RNG.normal(size=3))
LEAVES = {
    "untouched": ({"untouched": VECTOR, "w": VECTOR}, {}),
    "only untouched": ({"untouched": VECTOR}, {}),
    "integer": ({"i": np.arange(3), "w": VECTOR}, {}),
    "complex": ({"c": VECTOR + 1j * VECTOR[::-1], "w": VECTOR}, {}),
    "empty": ({"e": np.zeros((0, 3), np.float32), "w": VECTOR}, {}),
    "scalar": ({"s": np.float32(2), "w": VECTOR}, {}),
    "float16": ({"h": VECTOR.astype(np.float16), "w": VECTOR}, {}),
    "sums in bfloat16": ({"w": VECTOR}, {"accumulator_dtype": jnp.bfloat16}),
}


@pytest.mark.parametrize(("params", "options"), LEAVES.values(), ids=LEAVES)
@every_way
def test_leaves_of_every_kind(way: Any, params: Any, options: Any):
    params = jax.tree.map(jnp.asarray, params)
    batches = window_of(8, 0, 3)
    expected = window_gradients.by_hand(leaves_loss, params, batches)[1]
    got = way(leaves_loss, params, batches, **options)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, expected)
    rtol = 1e-2 if "accumulator_dtype" in options else 1e-3 if "h" in params else 1e-5
    chex.assert_trees_all_close(got, expected, rtol=rtol)


@pytest.mark.parametrize("options", [{}, {"accumulator_dtype": "float64"}])
@every_way
def test_leaves_in_64_bits(way: Any, options: Any):
    with jax.enable_x64(True):
        wide = RNG.normal(size=3)
        params = {"w": wide, "narrow": VECTOR, "c": wide + 1j * wide[::-1]}
        params = jax.tree.map(jnp.asarray, params)
        expected = window_gradients.by_hand(leaves_loss, params, window_of(8, 0, 3))[1]
        got = way(leaves_loss, params, window_of(8, 0, 3), **options)
        chex.assert_trees_all_equal_shapes_and_dtypes(got, expected)
        chex.assert_trees_all_close(got, expected, rtol=1e-6)


def test_small_trained_parameters_next_to_frozen_ones():
    """As with LoRA: the layers are a keyword, their changes are trained."""
    frozen, rng = params_of(), np.random.default_rng(4)
    adapters = {
        "a": np.float32(rng.normal(size=(window_gradients.LAYERS, 4, 1))),
        "b": np.float32(rng.normal(size=(window_gradients.LAYERS, 1, 4))),
    }

    def loss_fn(adapters: Any, batch: Any, frozen: Any) -> Any:
        layers = frozen["layers"] + adapters["a"] @ adapters["b"]
        return window_gradients.loss_fn(frozen | {"layers": layers}, batch)

    step = make_train_step(loss_fn, window_gradients.KEEPS, 3)
    batches = window_of(8, 0, 3)
    state, _ = run_step(step, step.init(adapters), batches, frozen=frozen)
    expected = window_gradients.by_hand(loss_fn, adapters, batches, frozen=frozen)[1]
    got = state.opt_state.inner_opt_state
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-6)


def test_sums_of_bfloat16_gradients_are_float32():
    """A sum of ones in bfloat16 would stop at 256."""

    def loss_fn(params: Any, batch: Any) -> Any:
        return jnp.sum(params.astype(jnp.float32) * batch), batch

    step = make_train_step(loss_fn, optax.sgd(1.0), 600)
    state = step.init(jnp.zeros((), jnp.bfloat16))
    for _ in range(512):
        state, _ = step(state, np.float32(1))
    assert float(state.opt_state.acc_grads) == 512
