"""Errors: what must hold, what was got, what to do; raised before anything is lost."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_tokenaccum import MultiSteps, make_train_step, token_accumulation

PARAMS = {"w": jnp.zeros(3), "deep": {"b": jnp.zeros(())}}
SGD = optax.sgd(1.0)


def loss_fn(params: Any, batch: Any) -> Any:
    return jnp.sum(params["w"]) * batch, 1


CONSTRUCTORS: dict[str, Any] = {
    "token_accumulation": token_accumulation,
    "MultiSteps": MultiSteps,
    "make_train_step": lambda *args, **kwargs: make_train_step(
        loss_fn, *args, **kwargs
    ),
}


@pytest.fixture(params=CONSTRUCTORS.values(), ids=CONSTRUCTORS.keys())
def construct(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize("k", [0, -1, np.int64(0)], ids=repr)
def test_k_below_1(construct: Any, k: Any):
    with pytest.raises(ValueError, match="at least 1 .* got (0|-1)"):
        construct(SGD, k)


@pytest.mark.parametrize("k", [2.0, "4", True, np.array([2])], ids=repr)
def test_k_that_is_no_integer(construct: Any, k: Any):
    with pytest.raises(TypeError, match="every_k_schedule must be an integer"):
        construct(SGD, k)


@pytest.mark.parametrize(
    "k",
    [3, np.int64(3), np.int32(3), np.uint8(3), np.array(3), jnp.asarray(3)],
    ids=type,
)
def test_k_of_any_integer_type(construct: Any, k: Any):
    assert construct(SGD, k) is not None


def test_k_function_that_returns_too_little():
    optimizer = token_accumulation(SGD, lambda step: 0)
    state = optimizer.init(PARAMS)
    with pytest.raises(ValueError, match="every_k_schedule must return at least 1"):
        optimizer.update(PARAMS, state, PARAMS, num_tokens=1)


@pytest.mark.parametrize(
    "construct", [token_accumulation, CONSTRUCTORS["make_train_step"]]
)
def test_two_schedules_and_bad_budgets(construct: Any):
    with pytest.raises(ValueError, match="At most one schedule.*Drop one"):
        construct(SGD, 2, every_n_tokens=100)
    with pytest.raises(ValueError, match="every_n_tokens must be .* at least 1.*got 0"):
        construct(SGD, every_n_tokens=0)


def test_multi_steps_needs_its_schedule():
    with pytest.raises(TypeError, match="needs every_k_schedule"):
        MultiSteps(SGD, None)


def test_optimizer_that_was_not_called(construct: Any):
    with pytest.raises(TypeError, match=r"Call it: optax\.adamw"):
        construct(optax.adam, 2)
    with pytest.raises(TypeError, match="must be an optax optimizer"):
        construct(0.1, 2)


@pytest.mark.parametrize(
    "inner",
    [
        token_accumulation(SGD, 2),
        optax.chain(optax.clip(1.0), MultiSteps(SGD, 2).gradient_transformation()),
        optax.MultiSteps(SGD, 2).gradient_transformation(),
    ],
    ids=["ours", "ours in a chain", "optax.MultiSteps"],
)
def test_optimizer_that_already_accumulates(construct: Any, inner: Any):
    with pytest.raises(
        ValueError, match="already accumulates.*Pass the plain optimizer"
    ):
        construct(inner, 2).init(PARAMS)


def test_other_arguments(construct: Any):
    with pytest.raises(TypeError, match="should_skip_update_fn must be a function"):
        construct(SGD, 2, should_skip_update_fn=True)
    with pytest.raises(ValueError, match="accumulator_dtype must be a floating dtype"):
        construct(SGD, 2, accumulator_dtype=jnp.int32)
    with pytest.raises(ValueError, match="gradients must be 'sum' or 'mean'"):
        token_accumulation(SGD, 2, gradients="total")


@pytest.fixture(params=[token_accumulation(SGD, 2), MultiSteps(SGD, 2)], ids=["f", "c"])
def optimizer(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_missing_count(optimizer: Any):
    state = optimizer.init(PARAMS)
    for update in (optimizer.update, jax.jit(optimizer.update)):
        with pytest.raises(TypeError, match=r"num_tokens=n.*linen TrainState"):
            update(PARAMS, state, PARAMS)


def test_count_lost_in_a_plain_gradient_transformation(optimizer: Any):
    plain = optax.GradientTransformation(optimizer.init, optimizer.update)
    chained = optax.chain(plain)
    state = chained.init(PARAMS)
    with pytest.raises(TypeError, match="GradientTransformationExtraArgs"):
        chained.update(PARAMS, state, PARAMS, num_tokens=3)


def test_count_that_is_no_scalar_or_no_number(optimizer: Any):
    state = optimizer.init(PARAMS)
    for update in (optimizer.update, jax.jit(optimizer.update)):
        with pytest.raises(ValueError, match=r"num_tokens must be a scalar.*\(8,\)"):
            update(PARAMS, state, PARAMS, num_tokens=jnp.ones(8))
        with pytest.raises(TypeError, match="num_tokens must be a real number.*bool"):
            update(PARAMS, state, PARAMS, num_tokens=jnp.asarray(True))
    with pytest.raises(TypeError, match="num_tokens must be a real number: got str"):
        optimizer.update(PARAMS, state, PARAMS, num_tokens="12")
    with pytest.raises(ValueError, match="value must be a scalar"):
        optimizer.update(PARAMS, state, PARAMS, num_tokens=1, value=jnp.ones(2))


@pytest.mark.parametrize("flag", [1, jnp.ones(2, bool), "yes"], ids=repr)
def test_close_window_that_is_no_flag(optimizer: Any, flag: Any):
    state = optimizer.init(PARAMS)
    with pytest.raises(TypeError, match="close_window must be a Python bool"):
        optimizer.update(PARAMS, state, PARAMS, num_tokens=1, close_window=flag)


@pytest.mark.parametrize(
    ("gradients", "message"),
    [
        ({"w": jnp.zeros(4), "deep": {"b": jnp.zeros(())}}, r"\['w'\].*\(3,\).*\(4,\)"),
        ({"w": jnp.zeros(3)}, r"\['deep'\]\['b'\] expected shape \(\), got no leaf"),
        ({**PARAMS, "new": jnp.zeros(2)}, r"\['new'\] expected no leaf, got .*\(2,\)"),
        ((PARAMS["w"], PARAMS["deep"]), r"expected .*, got "),
    ],
    ids=["shape", "missing", "extra", "containers"],
)
def test_gradients_that_do_not_match_name_the_leaf(
    optimizer: Any, gradients: Any, message: str
):
    state = optimizer.init(PARAMS)
    for update in (optimizer.update, jax.jit(optimizer.update)):
        with pytest.raises(ValueError, match="Gradients must have.*" + message):
            update(gradients, state, PARAMS, num_tokens=1)


def test_skip_function_that_returns_something_else():
    optimizer = token_accumulation(
        SGD, 2, should_skip_update_fn=lambda *_: (jnp.zeros(2, bool), ())
    )
    state = optimizer.init(PARAMS)
    with pytest.raises(ValueError, match="should_skip_update_fn must return"):
        optimizer.update(PARAMS, state, PARAMS, num_tokens=1)


@pytest.mark.parametrize(
    ("returned", "has_aux", "message"),
    [
        (lambda w: w, False, r"\(loss_sum, num_tokens\).*got float32\[\]"),
        (lambda w: (w, 1, {}), False, r"got \(float32\[\], int, dict\)"),
        (lambda w: (w, (1, {})), False, "Is has_aux=True missing"),
        (lambda w: (w, 1), True, r"\(loss_sum, \(num_tokens, aux\)\)"),
        (lambda w: (w, None), False, "got None for num_tokens"),
        (lambda w: (w * jnp.ones(2), 1), False, r"shape \(2,\), not a floating scalar"),
        (lambda w: (jnp.asarray(1), 1), False, "dtype int32"),
        (lambda w: (w, jnp.ones(4)), False, r"num_tokens must be a scalar.*\(4,\)"),
    ],
    ids=["scalar", "three", "aux", "no aux", "None", "vector", "integer", "counts"],
)
def test_loss_fn_that_returns_something_else(
    returned: Any, has_aux: bool, message: str
):
    step = make_train_step(
        lambda params, batch: returned(jnp.sum(params["w"])), SGD, 2, has_aux=has_aux
    )
    state = step.init(PARAMS)
    with pytest.raises((TypeError, ValueError), match=message):
        step(state, 1.0)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


def test_state_that_is_no_step_state():
    step = make_train_step(loss_fn, SGD, 2)
    for call in (step, step.accumulate, lambda s, _: step.close_window(s)):
        with pytest.raises(TypeError, match="StepState that step.init.*got dict"):
            call(PARAMS, 1.0)


def test_parameters_that_are_no_arrays():
    step = make_train_step(loss_fn, SGD, 2)
    with pytest.raises(TypeError, match=r"at \['act'\] got .*equinox\.partition"):
        step.init({"w": jnp.zeros(3), "act": jnp.tanh})


def test_loss_fn_that_is_no_function():
    with pytest.raises(TypeError, match="loss_fn must be a function"):
        make_train_step(SGD, SGD, 2)
