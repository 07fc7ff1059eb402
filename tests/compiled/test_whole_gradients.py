"""`whole_gradients` names the gradients that need memory, and no others."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_tokenaccum import make_train_step, make_window_step, window_value_and_grad
from optax_tokenaccum._core.backward import BackwardPass
from optax_tokenaccum.compiled import whole_gradients

LAYERS, WIDTH = 16, 64
PARAMS = {"layers": jnp.ones((LAYERS, WIDTH, WIDTH)), "scale": jnp.ones(WIDTH)}
X = jnp.ones((2, WIDTH))
IS_OLD = not BackwardPass.is_supported


def loss_with(change: Any) -> Any:
    """A loss whose layers are scanned over after `change`."""

    def loss_fn(params: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return jnp.tanh(x @ w.astype(x.dtype)), None

        y, _ = jax.lax.scan(layer, x * params["scale"], change(params["layers"]))
        return jnp.sum(y), x.size

    return loss_fn


def turned(w: Any) -> Any:
    return jnp.swapaxes(jnp.swapaxes(w, 0, 1), 0, 1)


def test_bfloat16_layers_with_float32_sums_are_named():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    step = make_train_step(loss_with(lambda w: w), optax.sgd(0.1), 2)
    state = step.init(params)
    found = whole_gradients(step, state, X.astype(jnp.bfloat16))
    assert IS_OLD or [*found] == ["['layers']"] and "float32" in found["['layers']"]


CHANGES: dict[str, tuple[Any, str | None]] = {
    "as they are": (lambda w: w, None),
    "cast before": (lambda w: w.astype(jnp.bfloat16), "convert_element_type"),
    "cast in a call": (jax.jit(lambda w: w.astype(jnp.float16)), "convert_element"),
    "transposed before": (turned, "transpose"),
}


@pytest.mark.parametrize(("change", "reason"), CHANGES.values(), ids=CHANGES)
def test_a_reason_is_given_exactly_where_memory_is_needed(
    change: Any, reason: str | None
):
    step = make_train_step(loss_with(change), optax.sgd(0.1), 2)
    state = step.init(PARAMS)
    found = whole_gradients(step, state, X)
    if IS_OLD:
        assert [*found] == ["['layers']", "['scale']"]
        return
    assert [*found] == (["['layers']"] if reason else [])
    assert reason is None or reason in found["['layers']"]
    program = step.accumulate.lower(state, X).compile()
    of_layers = PARAMS["layers"].nbytes
    needs_it = program.memory_analysis().temp_size_in_bytes > 0.9 * of_layers / 2
    assert needs_it == (reason is not None)


def twice(params: Any, x: Any) -> Any:
    layers = params["layers"], params["layers"]
    y, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w[0] @ w[1]), None), x, layers)
    return jnp.sum(y) * jnp.sum(params["scale"]), x.size


def of_params(params: Any, x: Any) -> Any:
    return jnp.sum(params["layers"]), jnp.sum(params["scale"])


def printing(params: Any, x: Any) -> Any:
    jax.debug.print("{}", x[0, 0])
    return jnp.sum(params["layers"]) * jnp.sum(params["scale"]), x.size


@pytest.mark.skipif(IS_OLD, reason="everything is whole below jax 0.11")
@pytest.mark.parametrize(
    ("loss_fn", "options", "paths", "reason"),
    [
        (twice, {}, ["['layers']"], "reads it twice"),
        (of_params, {}, ["['layers']", "['scale']"], "depends on the parameters"),
        (printing, {}, ["['layers']", "['scale']"], "side effects"),
        (
            loss_with(lambda w: w),
            {"should_skip_update_fn": optax.skip_not_finite},
            ["['layers']", "['scale']"],
            "should_skip_update_fn",
        ),
        (
            loss_with(lambda w: w),
            {"accumulator_dtype": jnp.bfloat16},
            ["['layers']", "['scale']"],
            "bfloat16 sum",
        ),
    ],
    ids=["twice", "count", "effects", "skips", "narrow sums"],
)
def test_the_reason_is_named(loss_fn: Any, options: Any, paths: Any, reason: str):
    step = make_train_step(loss_fn, optax.sgd(0.1), 2, **options)
    found = whole_gradients(step, step.init(PARAMS), X)
    assert [*found] == paths
    assert all(reason in text for text in found.values())


def test_every_way_in_after_it_was_traced_and_from_shapes():
    loss_fn = loss_with(lambda w: w.astype(jnp.bfloat16))
    train = make_train_step(loss_fn, optax.sgd(0.1))
    window = make_window_step(loss_fn, optax.sgd(0.1))
    own, xs = jax.jit(window_value_and_grad(loss_fn)), jnp.stack([X, X])
    state = train.init(PARAMS)
    shapes = jax.eval_shape(lambda: (PARAMS, xs))
    own(PARAMS, xs)
    for _ in range(2):
        found = [
            whole_gradients(own, PARAMS, xs),
            whole_gradients(own, *shapes),
            whole_gradients(train.accumulate, state, X),
            whole_gradients(window, window.init(PARAMS), xs),
        ]
        assert all("['layers']" in reasons for reasons in found)
        assert all(reasons == found[0] for reasons in found)
    # Asking leaves nothing behind: the next call runs the program that is there.
    np.testing.assert_array_equal(own(PARAMS, xs)[0][0], own(PARAMS, xs)[0][0])
    assert whole_gradients(lambda x: x, X) == {}
    mapped = whole_gradients(jax.vmap(own, (None, 0)), PARAMS, jnp.stack([xs, xs]))
    assert [*mapped] == ["['layers']", "['scale']"]
