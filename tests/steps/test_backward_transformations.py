"""Windows under JAX's transformations, next to the same around plain gradients."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import window_gradients
from helpers import stack
from window_gradients import BATCHES, params_of, window_of

from optax_tokenaccum import make_train_step, make_window_step, window_value_and_grad
from optax_tokenaccum._core.backward import BackwardPass

loss_fn = window_gradients.loss_fn
WINDOW = stack(BATCHES)
PARAMS = params_of()
SCALES = jnp.arange(1.0, 4.0)


def many(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.stack([x, 2 * x, x / 3]), tree)


def ours(params: Any, window: Any, loss_fn: Any = loss_fn, **kwargs: Any) -> Any:
    (loss, _), gradient = window_value_and_grad(loss_fn)(params, window, **kwargs)
    return loss, gradient


def plainly(params: Any, window: Any, loss_fn: Any = loss_fn, **kwargs: Any) -> Any:
    """The same in a loop of Python."""
    loss, tokens, sums = 0.0, 0.0, jax.tree.map(jnp.zeros_like, params)
    for i in range(len(BATCHES)):
        batch = jax.tree.map(lambda x: x[i], window)  # noqa: B023
        value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
        (loss_sum, n), new = value_and_grad(params, batch, **kwargs)
        loss, tokens = loss + loss_sum, tokens + n
        sums = jax.tree.map(jnp.add, sums, new)
    return loss / tokens, jax.tree.map(lambda x: x / tokens, sums)


def closing_over(f: Any, scale: Any) -> Any:
    return f(PARAMS, WINDOW, lambda params, batch: loss_fn(params, batch, scale))


def jvp(f: Any, x: Any, tangent: Any = None) -> Any:
    ones = jax.tree.map(jnp.ones_like, x)
    return jax.jvp(f, (x,), (ones if tangent is None else tangent,))


OF_PARAMS = {"params": (lambda f, p: f(p, WINDOW), PARAMS)}
OF_OTHERS = {
    "a keyword": (lambda f, s: f(PARAMS, WINDOW, scale=s), SCALES[1]),
    "closed over": (closing_over, SCALES[1]),
}
OTHER_WINDOWS = stack([stack(window_of(*n)) for n in ((8, 0, 3), (0, 8, 1), (1, 2, 3))])
MAPPED = {
    "params": (lambda f, p: f(p, WINDOW), many(PARAMS)),
    "batch": (
        lambda f, w: f(PARAMS, w),
        OTHER_WINDOWS,
    ),
    "both": (lambda f, x: f(*x), (many(PARAMS), stack([WINDOW] * 3))),
    "a keyword": (lambda f, s: f(PARAMS, WINDOW, scale=s), SCALES),
    "closed over": (closing_over, SCALES),
}
slow = pytest.mark.slow
vmap_of_jvp_fails = pytest.mark.xfail(
    BackwardPass.is_supported, reason="jax: vmap of jvp of custom_vmap", strict=True
)


def mapped(of: Any, f: Any, x: Any) -> Any:
    return jax.vmap(functools.partial(of, f))(x)


def forward(of: Any, f: Any, x: Any) -> Any:
    return jvp(functools.partial(of, f), x)


def forward_twice(of: Any, f: Any, x: Any) -> Any:
    return jvp(functools.partial(forward, of, f), x)


def mapped_forward(of: Any, f: Any, x: Any) -> Any:
    return jax.vmap(functools.partial(forward, of, f))(many(x))


def jacobian(of: Any, f: Any, x: Any) -> Any:
    return jax.jacfwd(functools.partial(of, f))(x)


def forward_mapped(of: Any, f: Any, x: Any) -> Any:
    return jvp(functools.partial(mapped, of, f), many(x))


def scanned(of: Any, f: Any, x: Any) -> Any:
    return jax.lax.scan(lambda _, x: (None, of(f, x)), None, many(x))[1]


MARKS: dict[Any, Any] = {
    mapped_forward: (vmap_of_jvp_fails, slow),
    jacobian: (slow,),
    forward_twice: slow,
    forward_mapped: slow,
    scanned: slow,
}
FAST = ("params", "closed over")
CASES = [
    pytest.param(transformed, of, x, id=f"{transformed.__name__}: {name}", marks=marks)
    for transformed, of_what in (
        (mapped, MAPPED),
        *[(f, OF_PARAMS | OF_OTHERS) for f in (forward, *MARKS)],
    )
    for name, (of, x) in of_what.items()
    for marks in [MARKS.get(transformed, () if name in FAST else slow)]
]


@pytest.mark.parametrize(("transformed", "of", "x"), CASES)
def test_transformed(transformed: Any, of: Any, x: Any):
    got, expected = (
        jax.jit(functools.partial(transformed, of, f))(x) for f in (ours, plainly)
    )
    chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-5)


@slow
def test_derivative_with_regard_to_bfloat16_parameters():
    """They are differentiated through twins in float32, which have no tangents."""
    params = params_of(jnp.bfloat16)
    got, expected = (
        jax.jit(lambda p, f=f: jvp(lambda p: f(p, WINDOW), p))(params)
        for f in (ours, plainly)
    )
    assert float(expected[1][0]) != 0
    chex.assert_trees_all_close(got, expected, rtol=0.05, atol=0.05)


REVERSE = {
    "params": lambda: jax.grad(lambda p: ours(p, WINDOW)[0])(PARAMS),
    "gradient": lambda: jax.grad(lambda p: optax.tree.norm(ours(p, WINDOW)[1]))(PARAMS),
    "keyword": lambda: jax.grad(lambda s: ours(PARAMS, WINDOW, scale=s)[0])(2.0),
    "twice": lambda: jax.grad(jax.grad(lambda s: ours(PARAMS, WINDOW, scale=s**3)[0]))(
        2.0
    ),
}
EXPECTED = {
    "params": lambda: plainly(PARAMS, WINDOW)[1],
    "gradient": lambda: jax.grad(lambda p: optax.tree.norm(plainly(p, WINDOW)[1]))(
        PARAMS
    ),
    "keyword": lambda: plainly(PARAMS, WINDOW)[0],
    "twice": lambda: 12 * plainly(PARAMS, WINDOW)[0],
}


@pytest.mark.parametrize("name", REVERSE)
def test_reverse_mode_is_right_or_an_error(name: str):
    if BackwardPass.is_supported:
        with pytest.raises(ValueError, match="Linearization failed"):
            REVERSE[name]()
        return
    got = REVERSE[name]()
    chex.assert_trees_all_close(got, EXPECTED[name](), rtol=1e-4, atol=1e-5)


def steps() -> Any:
    train = make_train_step(loss_fn, optax.sgd(1.0), lambda _: len(BATCHES))
    window = make_window_step(loss_fn, optax.sgd(1.0))

    def train_step(params: Any, batches: Any, scale: Any) -> Any:
        state = train.init(params)
        for i in range(len(BATCHES)):
            batch = jax.tree.map(lambda x: x[i], batches)  # noqa: B023
            state, _ = train(state, batch, scale=scale)
        return state.params

    def window_step(params: Any, batches: Any, scale: Any) -> Any:
        return window(window.init(params), batches, scale=scale)[0].params

    return {"train step": train_step, "window step": window_step}


STEPS = steps()


@pytest.mark.parametrize(
    "over", ["params", *[pytest.param(x, marks=slow) for x in ("batch", "keyword")]]
)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_step_is_mapped(step: Any, over: str):
    values = {"params": PARAMS, "batch": WINDOW, "keyword": SCALES[1]}
    batched = {
        "params": many(PARAMS),
        "batch": stack(
            [stack(window_of(*n)) for n in ((8, 0, 3), (0, 8, 1), (1, 2, 3))]
        ),
        "keyword": SCALES,
    }
    given = [batched[x] if x == over else values[x] for x in values]
    axes = [0 if x == over else None for x in values]

    def alone(params: Any, batch: Any, scale: Any) -> Any:
        _, gradient = plainly(params, batch, scale=scale)
        return jax.tree.map(lambda p, g: p - g, params, gradient)

    got, expected = (jax.jit(jax.vmap(f, axes))(*given) for f in (step, alone))
    chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-5)
    assert not np.allclose(*jax.tree.leaves(got["out"])[0][:2])
