"""Mistakes of other projects in a program; `test_scenarios.py` has the index."""

from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ways_in import PARAMS, SGD, loss_fn

from optax_tokenaccum import (
    MultiSteps,
    has_updated,
    make_train_step,
    make_window_step,
    token_accumulation,
)

GRADS = {"w": jnp.ones(4)}


POLYAK = optax.polyak_sgd(max_learning_rate=10.0)


@pytest.mark.parametrize(
    "ours",
    [
        token_accumulation(POLYAK, 2, gradients="mean"),
        MultiSteps(POLYAK, 2).gradient_transformation(),
    ],
    ids=["transformation", "MultiSteps"],
)
def test_count_lost_in_a_chain_of_plain_transformations(ours: Any):
    """optax: `MultiSteps.gradient_transformation()` takes no extra arguments."""
    theirs = optax.chain(optax.MultiSteps(POLYAK, 2).gradient_transformation())
    with pytest.raises(TypeError, match="missing .* 'value'"):
        theirs.update(GRADS, theirs.init(PARAMS), PARAMS, value=1.0)
    assert isinstance(ours, optax.GradientTransformationExtraArgs)
    tx = optax.chain(optax.clip(100.0), ours, optax.identity())
    update, state = jax.jit(tx.update), tx.init(PARAMS)
    for mean, n, value in [(2.0, 1, 3.0), (10.0, 9, 1.0)]:
        gradient = jax.tree.map(lambda g, mean=mean: mean * g, GRADS)
        updates, state = update(gradient, state, PARAMS, num_tokens=n, value=value)
    assert has_updated(state)
    gradient = jax.tree.map(lambda g: 9.2 * g, GRADS)  # with means: 6, and 2
    expected, _ = POLYAK.update(gradient, POLYAK.init(PARAMS), PARAMS, value=1.2)
    assert helpers.relative_error(updates, expected) < helpers.RTOL["float32"]


INTEGERS = [3, np.int64(3), np.int32(3), np.uint8(3), np.array(3), jnp.asarray(3)]


@pytest.mark.parametrize(
    "k", INTEGERS, ids=["int", "int64", "int32", "uint8", "numpy array", "jax array"]
)
def test_numpy_integer_k_was_not_callable(k: Any):
    """optax 0.2.8 calls every k that is not an `int`."""
    theirs = optax.MultiSteps(SGD, k)
    if not isinstance(k, int):
        with pytest.raises(TypeError, match="not callable"):
            theirs.update(GRADS, theirs.init(PARAMS), PARAMS)
    for ours in (token_accumulation(SGD, k), MultiSteps(SGD, k)):
        state, updated = ours.init(PARAMS), []
        for _ in range(4):
            _, state = ours.update(GRADS, state, PARAMS, num_tokens=1)
            updated.append(bool(has_updated(state)))
        assert updated == [False, False, True, False]
    step = make_train_step(loss_fn, SGD, k)
    assert step.init(PARAMS) is not None


@pytest.mark.parametrize("k", [0, -1])
def test_k_of_0_and_below_never_updated(k: int):
    """optax 0.2.8 accepts such a k, and no window ever closes."""
    theirs = optax.MultiSteps(SGD, k)
    state = theirs.init(PARAMS)
    for _ in range(3):
        updates, state = theirs.update(GRADS, state, PARAMS)
        chex.assert_trees_all_equal(updates, jax.tree.map(jnp.zeros_like, PARAMS))
    with pytest.raises(ValueError, match="at least 1"):
        token_accumulation(SGD, k)


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("grad_dtype", ["float32", "bfloat16", "float16"])
def test_dtypes_did_not_fit_in_a_cond(param_dtype: Any, grad_dtype: Any):
    """optax 377, 1038, 1039, 1122: the branches return different dtypes."""
    seen: set[Any] = set()

    def watch(updates: Any, state: Any, params: Any = None) -> Any:
        seen.update(x.dtype for x in jax.tree.leaves(updates))
        return updates, state

    inner = optax.chain(
        optax.GradientTransformation(lambda _: (), watch), optax.adamw(0.1)
    )
    params = jax.tree.map(lambda p: p.astype(param_dtype), PARAMS)
    gradient = jax.tree.map(lambda p: jnp.ones_like(p, grad_dtype), PARAMS)

    def theirs(closes: Any) -> Any:
        total = jax.tree.map(jnp.zeros_like, params)
        return jax.lax.cond(
            closes, lambda: total, lambda: jax.tree.map(jnp.add, total, gradient)
        )

    if jnp.promote_types(param_dtype, grad_dtype) != jnp.dtype(param_dtype):
        with pytest.raises(TypeError):
            jax.eval_shape(theirs, True)
    optimizer = token_accumulation(inner, 2)
    state = optimizer.init(params)
    expected, _ = inner.update(gradient, inner.init(params), params)
    before, update = helpers.signatures(state), jax.jit(optimizer.update)
    for _ in range(3):
        updates, state = update(gradient, state, params, num_tokens=1)
        assert helpers.signatures(updates) == helpers.signatures(expected)
        assert helpers.signatures(state) == before
    assert seen == {jnp.dtype(grad_dtype)}
    sums = {x.dtype for x in jax.tree.leaves(state.acc_grads)}
    assert sums == {jnp.dtype(jnp.float32)}


def test_k_of_1_took_the_memory_of_accumulation():
    """optax 472 and 320, EasyLM 36, t5x 1253: needless sums and two inner states."""
    width, inner = 128, optax.adamw(1e-3)
    params = [jnp.full((width, width), 0.01) for _ in range(4)]
    batch, gradient_bytes = np.ones((2, width), np.float32), 4 * 4 * width**2

    def loss_fn(params: Any, x: Any) -> Any:
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.sum(x**2), x.shape[0]

    def peak(compiled: Any) -> float:
        """Return peak memory with arguments, in units of the gradients' size."""
        m = compiled.memory_analysis()
        size = m.argument_size_in_bytes + m.temp_size_in_bytes
        size += m.output_size_in_bytes - m.alias_size_in_bytes
        return size / gradient_bytes

    def loop(optimizer: Any, **count: Any) -> float:
        def step(params: Any, state: Any, batch: Any) -> Any:
            grads, _ = jax.grad(loss_fn, has_aux=True)(params, batch)
            updates, state = optimizer.update(grads, state, params, **count)
            return optax.apply_updates(params, updates), state

        state = optimizer.init(params)
        donating = jax.jit(step, donate_argnums=(0, 1))
        return peak(donating.lower(params, state, batch).compile())

    bare, theirs = loop(inner), loop(optax.MultiSteps(inner, 1))
    assert theirs > bare + 1.9
    window = make_window_step(loss_fn, inner)
    compiled = window.lower(window.init(params), batch[None]).compile()
    assert peak(compiled) < bare + 0.3
    step = make_train_step(loss_fn, inner, 1)
    compiled = step.accumulate.lower(step.init(params), batch).compile()
    assert peak(compiled) < bare


def test_python_int_count_retraced():
    """Tunix: the first state holds a Python 0, the second an array."""
    counting = optax.GradientTransformation(
        lambda _: {"count": 0},
        lambda grads, state, params=None: (
            grads,
            {"count": state["count"] + jnp.ones((), jnp.int32)},
        ),
    )

    def traces_of(optimizer: Any) -> int:
        traces: list[int] = []

        @jax.jit
        def update(state: Any, n: Any) -> Any:
            traces.append(1)
            return optimizer.update(GRADS, state, PARAMS, num_tokens=n)[1]

        state = optimizer.init(PARAMS)
        for n in (3, 1, 4):
            state = update(state, n)
        return len(traces)

    assert traces_of(optax.with_extra_args_support(counting)) == 2
    assert traces_of(token_accumulation(counting, 1)) == 1


@pytest.mark.parametrize("ours", [token_accumulation, MultiSteps])
def test_first_call_with_unplaced_state_compiled_twice(ours: Any):
    """Tunix: the parameters are placed on a device, but the counters are not."""
    params = jax.device_put(PARAMS, jax.devices()[0])

    def compilations(optimizer: Any, **count: Any) -> int:
        @jax.jit
        def step(params: Any, state: Any) -> Any:
            updates, state = optimizer.update(params, state, params, **count)
            return optax.apply_updates(params, updates), state

        run = (params, optimizer.init(params))
        with helpers.count_compilations() as seen:
            for _ in range(5):
                run = step(*run)
        return len(seen)

    assert compilations(optax.MultiSteps(SGD, 2)) == 2
    assert compilations(ours(SGD, 2), num_tokens=3) == 1
