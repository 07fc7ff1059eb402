"""Rows of docs/bad_input.md: arguments of constructors and of `update`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from helpers import stack
from mistakes import (
    BATCH,
    GRADS,
    OURS,
    PARAMS,
    SGD,
    SKIPS,
    STATE,
    N,
    Row,
    applied_by_linen,
    constructed,
    counted_badly_in_jit,
    eager,
    in_a_plain_transformation,
    in_a_wrapper_of_optax,
    loss_fn,
    returned,
    schedule_of_0_in_jit,
    train_step,
    updated,
    window_step,
    wrapped_by_optax,
)

from optax_tokenaccum import (
    MultiSteps,
    accumulate_over_window,
    make_train_step,
    make_window_step,
    token_accumulation,
    window_value_and_grad,
)

POLYAK = optax.polyak_sgd()
OF_NNX = nnx.Optimizer(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), SGD, wrt=nnx.Param)
WITHOUT_CLASS = token_accumulation, train_step
OURS_AS_CLASS, HALVES = MultiSteps(SGD, 1), train_step(SGD)
INNER_THAT_ACCUMULATES = (
    token_accumulation(SGD, 2),
    optax.chain(optax.clip(1.0), MultiSteps(SGD, 2).gradient_transformation()),
    optax.MultiSteps(SGD, 2).gradient_transformation(),
    optax.MultiSteps(SGD, 2),
    MultiSteps(SGD, 2),
)


def two_bools(*_: Any) -> Any:
    return jnp.zeros(2, bool), ()


BUILDING: list[Row] = [
    (
        "`every_k_schedule` below 1",
        ValueError,
        [m for k in (0, -1, np.int64(0)) for m in constructed(SGD, k)],
    ),
    (
        "`every_k_schedule` that is not an integer",
        TypeError,
        [m for k in (2.0, "4", True, np.array([2])) for m in constructed(SGD, k)],
    ),
    (
        "a schedule function that returns less than 1",
        ValueError,
        updated(token_accumulation(SGD, lambda _: 0), **N),
    ),
    (
        "a schedule function that returns less than 1, traced",
        None,
        [schedule_of_0_in_jit],
    ),
    (
        "both schedules",
        ValueError,
        constructed(SGD, 2, every_n_tokens=100, by=WITHOUT_CLASS),
    ),
    (
        "`every_n_tokens` below 1",
        ValueError,
        constructed(SGD, every_n_tokens=0, by=WITHOUT_CLASS),
    ),
    (
        "`MultiSteps` without a schedule",
        TypeError,
        constructed(SGD, None, by=[MultiSteps]),
    ),
    (
        "neither a schedule nor `close_window`",
        ValueError,
        updated(token_accumulation(SGD), **N),
    ),
    (
        "`step(state, batch)` of a train step without a schedule",
        ValueError,
        [lambda keep: HALVES(keep(HALVES.init(PARAMS)), BATCH)],
    ),
    (
        "an optimizer that was not called",
        TypeError,
        [m for f in (optax.adam, optax.adamw) for m in constructed(f, 2)],
    ),
    ("something that is not an optimizer", TypeError, constructed(0.1, 2)),
    (
        "an `nnx.Optimizer` in a step of the core",
        TypeError,
        constructed(OF_NNX, 2) + [lambda _: window_step(OF_NNX)],
    ),
    (
        "an inner optimizer that accumulates already",
        ValueError,
        [
            lambda _, make=make, inner=inner: make(inner, 2).init(PARAMS)
            for make in (token_accumulation, MultiSteps, train_step)
            for inner in INNER_THAT_ACCUMULATES
        ],
    ),
    ("`optax.MultiSteps` around one of ours", None, [wrapped_by_optax]),
    (
        "`should_skip_update_fn` that is not a function",
        TypeError,
        constructed(SGD, 2, should_skip_update_fn=True),
    ),
    (
        "a skip function that returns something else",
        ValueError,
        updated(token_accumulation(SGD, 2, should_skip_update_fn=two_bools), **N),
    ),
    (
        "`accumulator_dtype` that is not a floating dtype",
        ValueError,
        constructed(SGD, 2, accumulator_dtype=jnp.int32),
    ),
    (
        "`gradients` that is neither sum nor mean",
        ValueError,
        constructed(SGD, 2, gradients="total", by=(token_accumulation, MultiSteps))
        + [lambda _: accumulate_over_window(loss_fn, gradients="total")],
    ),
    (
        "`loss_fn` that is not a function",
        TypeError,
        [
            lambda _: make_train_step(SGD, loss_fn, 2),
            lambda _: make_window_step(PARAMS, SGD),
            lambda _: window_value_and_grad(PARAMS),
        ],
    ),
    (
        "`value_and_grad_fn` of `accumulate_over_window` that is not a function",
        TypeError,
        [lambda _: accumulate_over_window(PARAMS)],
    ),
    (
        "a gradient function that returns something else",
        TypeError,
        [
            lambda _, f=f: accumulate_over_window(f)(PARAMS, stack([BATCH]))
            for f in (
                jax.grad(lambda p, b: loss_fn(p, b)[0]),
                jax.value_and_grad(lambda p, b: loss_fn(p, b)[0]),
                jax.grad(loss_fn, has_aux=True),
            )
        ],
    ),
    (
        "`count_fn` with `should_skip_update_fn`",
        ValueError,
        [lambda _: window_step(SGD, count_fn=len, **SKIPS)],
    ),
    (
        "`count_fn` with `gradient_noise`",
        ValueError,
        [lambda _: window_step(SGD, count_fn=len, gradient_noise=True)],
    ),
]

UPDATING: list[Row] = [
    ("no `num_tokens`", TypeError, updated()),
    (
        "`num_tokens` lost in a plain `optax.GradientTransformation`",
        TypeError,
        updated(*map(in_a_plain_transformation, (OURS, OURS_AS_CLASS)), **N),
    ),
    (
        "`num_tokens` lost by optax's wrappers around a `MultiSteps`",
        TypeError,
        updated(*in_a_wrapper_of_optax(OURS_AS_CLASS), **N),
    ),
    (
        "`num_tokens` lost in flax's linen `TrainState`",
        TypeError,
        [
            functools.partial(applied_by_linen, tx=tx)
            for tx in (OURS, OURS_AS_CLASS, optax.chain(OURS))
        ],
    ),
    (
        "`num_tokens` given by position",
        TypeError,
        [
            lambda keep, f=f: f(GRADS, keep(STATE), PARAMS, 3)
            for f in (OURS.update, jax.jit(OURS.update), OURS_AS_CLASS.update)
        ],
    ),
    (
        "one count per row",
        ValueError,
        updated(num_tokens=jnp.ones(8)) + returned(lambda w: (w, jnp.ones(8))),
    ),
    (
        "a count that is not a real number",
        TypeError,
        [m for x in (True, jnp.asarray(True), 1j, [3]) for m in updated(num_tokens=x)]
        + updated(num_tokens="12", modes=[eager])
        + returned(lambda w: (w, w > 0)),
    ),
    (
        "a count that is negative or not finite",
        ValueError,
        [
            m
            for x in (-1, np.nan, np.inf, -np.inf, np.float32(-0.5))
            for m in updated(num_tokens=x, modes=[eager])
        ]
        + returned(lambda w: (w, -1)),
    ),
    (
        "a count that is negative or not finite, traced",
        None,
        [
            functools.partial(counted_badly_in_jit, count=x)
            for x in (-1.0, np.nan, np.inf, -np.inf)
        ],
    ),
    ("`value` that is not a scalar", ValueError, updated(value=jnp.ones(2), **N)),
    (
        "an optimizer that needs the loss, and no `value`",
        TypeError,
        updated(token_accumulation(POLYAK, 1), MultiSteps(POLYAK, 1), **N),
    ),
    (
        "`close_window` that is not a bool",
        TypeError,
        [m for x in (1, jnp.ones(2, bool)) for m in updated(close_window=x, **N)]
        + updated(close_window="yes", modes=[eager], **N),
    ),
    (
        "gradients of another shape",
        ValueError,
        updated(grads=GRADS | {"w": jnp.zeros(4)}, **N),
    ),
    (
        "gradients without a leaf",
        ValueError,
        [
            m
            for grads in ({"w": jnp.zeros(3)}, tuple(GRADS.values()))
            for m in updated(grads=grads, **N)
        ],
    ),
    (
        "gradients with an extra leaf",
        ValueError,
        updated(grads=GRADS | {"new": jnp.zeros(2)}, **N),
    ),
    (
        "gradients in other containers",
        ValueError,
        [lambda _: OURS.update((BATCH,), OURS.init([BATCH]), [BATCH], **N)],
    ),
]
