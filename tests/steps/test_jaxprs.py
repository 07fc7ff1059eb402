"""What JAX may call its operations tomorrow, and an operation that nobody knows."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import RTOL, relative_error
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from meshes import over

from optax_tokenaccum import make_train_step
from optax_tokenaccum._core import backward, jaxprs
from optax_tokenaccum.debug._whole_gradients import whole_gradients

# JAX's next defaults. With jax_scan3, JAX 0.12 differentiates no scan.
FLAGS = ["", "jax_custom_jvp3", "jax_custom_vjp3", "jax_remat3"]


@pytest.fixture(params=FLAGS, ids=lambda flag: flag or "defaults")
def flag(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a flag that is set, or nothing."""
    if not request.param:
        yield ""
        return
    if not hasattr(jax.config, request.param):
        pytest.skip("a flag of newer versions of jax")
    before = getattr(jax.config, request.param)
    jax.config.update(request.param, True)
    yield request.param
    jax.config.update(request.param, before)


# An operation with a function of its own, which it does not call: it negates. With
# `over`, its derivative adds up tangents over devices.
negated_p = Primitive("negated")
negated_p.def_impl(lambda x, jaxpr, over: jnp.negative(x))
negated_p.def_abstract_eval(lambda x, jaxpr, over: x)
ad.primitive_jvps[negated_p] = lambda primals, tangents, jaxpr, over: (
    negated_p.bind(*primals, jaxpr=jaxpr, over=over),
    -(jax.lax.psum(tangents[0], over) if over else tangents[0]),
)
mlir.register_lowering(negated_p, mlir.lower_fun(lambda x, jaxpr, over: -x, False))


def negated(x: Any, over: str | None = None) -> Any:
    return negated_p.bind(x, jaxpr=jax.make_jaxpr(lambda x: x)(x), over=over)


def reduced_in_vjp(w: Any) -> Any:
    f = jax.custom_vjp(lambda w: w)
    f.defvjp(lambda w: (w, None), lambda _, g: (jax.lax.psum(g, "data"),))
    return f(w)


def reduced_in_jvp(w: Any) -> Any:
    f = jax.custom_jvp(lambda w: w)
    f.defjvp(lambda w, t: (w[0], jax.lax.psum(t[0], "data")))
    return f(w)


@pytest.mark.parametrize(
    "reduced", [reduced_in_vjp, reduced_in_jvp, lambda w: negated(w, "data")]
)
def test_a_reduction_in_a_derivative_rule_raises(flag: str, reduced: Any):
    """In silence, the update would be 8 times as large."""

    def loss_fn(w: Any, x: Any) -> Any:
        layer = jax.checkpoint(lambda w: jax.jit(reduced)(w))
        return jnp.sum(x @ layer(w)), len(x)

    step = make_train_step(loss_fn, optax.sgd(1.0), 1, **over("8"))
    with pytest.raises(ValueError, match="psum.* in its backward pass"):
        step(step.init(jnp.ones(3)), jnp.ones((16, 3)))


@jax.custom_vjp
def tripled(x: Any) -> Any:
    return 3 * x


tripled.defvjp(lambda x: (3 * x, None), lambda _, g: (3 * g,))


@jax.custom_jvp
def halved(x: Any) -> Any:
    return x / 2


halved.defjvp(lambda x, t: (x[0] / 2, t[0] / 2))
W = np.random.default_rng(0).normal(size=(4, 8, 8)).astype(np.float32) / 3
X = np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32)


def through_layers(change: Callable[[Any], Any]) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(halved(tripled(x @ w))), None

    @jax.checkpoint
    def layers(x: Any, w: Any) -> Any:
        return jax.lax.scan(jax.checkpoint(layer), x, change(w))[0]

    def loss_fn(w: Any, x: Any) -> Any:
        count = tripled(jnp.sum(x[:, 0] < 1))
        return jnp.sum(layers(x, checkpoint_name(w, "layers")) ** 2), count

    return loss_fn


@pytest.mark.parametrize(
    ("change", "reason"), [(lambda w: w, None), (negated, "negated")]
)
def test_layers_behind_what_is_known_and_what_is_not(
    flag: str, change: Any, reason: str | None
):
    loss_fn = through_layers(change)
    step = make_train_step(loss_fn, optax.sgd(1.0), 1)
    state = step.init(jnp.asarray(W))
    (found,) = [*whole_gradients(step, state, X).values()] or [None]
    if backward.CAN_ADD_IN_PLACE:
        assert found is None if reason is None else found.endswith(reason)
    got = W - step(state, X)[0].params
    with jax.enable_x64(True):
        gradient, n = jax.grad(loss_fn, has_aux=True)(np.float64(W), np.float64(X))
        assert relative_error(-gradient / n, got) > 1  # were the sign lost
        assert relative_error(got, gradient / n) < 2 * RTOL["float32"]


def test_what_an_unknown_operation_returns_has_changed():
    given = {"kept": jnp.ones(2), "set": jnp.ones(2)}

    def f(x: Any) -> Any:
        return {"kept": jax.checkpoint(jax.jit(tripled.fun))(x["kept"]), **x}

    def g(x: Any) -> Any:
        return f(x) | {"set": negated(x["set"])}

    assert jaxprs.changed_paths(jax.jit(f), given, jax.jit(f)(given)) == []
    assert jaxprs.changed_paths(jax.jit(g), given, jax.jit(g)(given)) == ["set"]
