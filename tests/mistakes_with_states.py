"""Rows of docs/bad_input.md: states, `loss_fn` and batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from mistakes import (
    ADAM,
    BATCH,
    OURS,
    PARAMS,
    SGD,
    SKIPS,
    STATE,
    WINDOW,
    N,
    Row,
    bound_too_large_in_jit,
    copied,
    failed_while_it_ran,
    returned,
    returned_a_mean,
    reused,
    state_of_multi_steps,
    stepped,
    taken_over,
    train_step,
    updated,
    window_loss_fn,
    window_step,
)

from optax_tokenaccum import (
    MultiSteps,
    StepState,
    close_window,
    has_updated,
    make_train_step,
    make_window_step,
    regroup_sums,
    split_batch,
    token_accumulation,
    window_value_and_grad,
)

HALVES, WINDOWS = train_step(SGD), window_step(SGD)
STEPS = train_step(SGD, 1), train_step(SGD, lambda _: 1)
STEP_STATE = STEPS[0].init(PARAMS)
ADAM_STEPS = train_step(ADAM, 2), train_step(ADAM, lambda _: 2)
ADAM_STEP_STATE = ADAM_STEPS[0].init(PARAMS)
UNSPLIT, KEY = WINDOW | {"x": jnp.ones((3, 1))}, jax.random.key(0)
VALUE_AND_GRAD = window_value_and_grad(window_loss_fn)
NAMED = SGD._replace(init=lambda params: {"name": "sgd"})


def dot(w: jax.Array, rows: jax.Array) -> tuple[jax.Array, int]:
    return jnp.sum(rows @ w), len(rows)


CARRYING: list[Row] = [
    (
        "the state of something that does not accumulate",
        TypeError,
        [
            m
            for state in (
                ADAM.init(PARAMS),
                state_of_multi_steps(),
                optax.chain(OURS).init(PARAMS),
                STATE._asdict(),
                PARAMS,
            )
            for m in updated(OURS, state=state, **N)
        ],
    ),
    (
        "the state of another inner optimizer",
        ValueError,
        updated(OURS, state=token_accumulation(ADAM, 1).init(PARAMS), **N)
        + updated(token_accumulation(ADAM, 1), state=STATE, **N)
        + stepped(ADAM_STEP_STATE, *STEPS, halves=False)
        + stepped(STEP_STATE, *ADAM_STEPS, halves=False)
        + [lambda keep: HALVES.close_window(keep(copied(ADAM_STEP_STATE)))]
        + stepped(window_step(ADAM).init(PARAMS), WINDOWS, batch=WINDOW),
    ),
    (
        "the state of a run without `gradient_noise`",
        ValueError,
        stepped(STEP_STATE, train_step(SGD, 2, gradient_noise=True), halves=False),
    ),
    (
        "the state of a run without a skip function",
        ValueError,
        updated(token_accumulation(SGD, 2, **SKIPS), state=STATE, **N)
        + stepped(STEP_STATE, train_step(SGD, 2, **SKIPS), halves=False),
    ),
    (
        "a checkpoint of a step that was restored as a dict",
        TypeError,
        stepped(STEP_STATE._asdict(), *STEPS, HALVES)
        + stepped(STEP_STATE._asdict(), WINDOWS, batch=WINDOW),
    ),
    (
        "the state of a window step in a train step",
        ValueError,
        stepped(WINDOWS.init(PARAMS), *STEPS, HALVES)
        + [
            lambda keep: regroup_sums(keep(WINDOWS.init(PARAMS)), HALVES.init(PARAMS)),
        ],
    ),
    (
        "the state of a train step in a window step",
        ValueError,
        stepped(STEP_STATE, WINDOWS, window_step(ADAM), batch=WINDOW)
        + [lambda keep: regroup_sums(keep(STEP_STATE), WINDOWS.init(PARAMS))],
    ),
    (
        "the state of a window step of version 0.2.0",
        TypeError,
        stepped(StepState(PARAMS, SGD.init(PARAMS)), WINDOWS, batch=WINDOW),
    ),
    (
        "the state of a window step of version 0.2.0, in a train step",
        TypeError,
        stepped(StepState(PARAMS, SGD.init(PARAMS)), *STEPS, HALVES),
    ),
    (
        "a state that was donated",
        ValueError,
        reused(lambda step, state, batch: step(state, batch)),
    ),
    (
        "a state that was given to a call that failed while it ran",
        ValueError,
        failed_while_it_ran(
            functools.partial(make_train_step, every_k_schedule=2), WINDOW
        )
        + failed_while_it_ran(make_window_step, WINDOW),
    ),
    (
        "reading arrays of a state that was donated",
        RuntimeError,
        reused(lambda step, state, batch: np.asarray(state.params["w"]), k=1),
    ),
    (
        "`has_updated` of a state with no accumulation, or with several",
        ValueError,
        [
            lambda keep, state=state: has_updated(keep(state))
            for state in (ADAM.init(PARAMS), state_of_multi_steps(), (STATE, STATE))
        ],
    ),
    (
        "`close_window` of an optimizer that does not accumulate",
        ValueError,
        [
            lambda keep, tx=tx: close_window(tx, keep(tx.init(PARAMS)), PARAMS)
            for tx in (ADAM, optax.chain(ADAM), optax.MultiSteps(SGD, 2))
        ],
    ),
    (
        "`from_multi_steps_state` in the middle of a window",
        ValueError,
        taken_over(state_of_multi_steps(calls=1)),
    ),
    (
        "`from_multi_steps_state` of something else",
        ValueError,
        [
            m
            for state in (state_of_multi_steps()._asdict(), ADAM.init(PARAMS))
            for m in taken_over(state)
        ],
    ),
    (
        "`from_multi_steps_state` around another inner optimizer",
        ValueError,
        taken_over(state_of_multi_steps(ADAM)),
    ),
    (
        "`from_multi_steps_state` with a `tx` that is still optax's",
        ValueError,
        taken_over(state_of_multi_steps(), optax.MultiSteps(SGD, 2), SGD),
    ),
]

STEPPING: list[Row] = [
    ("`loss_fn` that returns a scalar", TypeError, returned(lambda w: w)),
    ("`loss_fn` that returns a mean", None, [returned_a_mean]),
    (
        "`loss_fn` that returns three values",
        TypeError,
        returned(lambda w: (w, 1, {})),
    ),
    (
        "auxiliary values and no `has_aux`",
        TypeError,
        returned(lambda w: (w, (1, {}))),
    ),
    (
        "`has_aux` and no auxiliary values",
        TypeError,
        returned(lambda w: (w, 1), has_aux=True),
    ),
    ("no count from `loss_fn`", TypeError, returned(lambda w: (w, None))),
    (
        "a loss per token, or one of integers",
        ValueError,
        returned(lambda w: (w * jnp.ones(2), 1))
        + returned(lambda w: (w.astype(int), 1)),
    ),
    (
        "an optimizer that needs more than `value` in a step",
        TypeError,
        [
            lambda keep, s=s, batch=batch: s(keep(s.init(PARAMS)), batch)
            for s, batch in (
                (train_step(optax.lbfgs(), 2), BATCH),
                (train_step(optax.lbfgs(), lambda _: 2), BATCH),
                (window_step(optax.lbfgs()), WINDOW),
            )
        ],
    ),
    (
        "`rng` for a `loss_fn` without one",
        TypeError,
        [lambda keep, s=s: s(keep(s.init(PARAMS)), BATCH, rng=KEY) for s in STEPS],
    ),
    (
        "scales of 8-bit floats in a transformation",
        ValueError,
        [
            lambda _, make=make: make(SGD, 2).init(
                {"_overwrite_with_gradient": {"scale": jnp.ones(1)}, **PARAMS}
            )
            for make in (token_accumulation, MultiSteps)
        ],
    ),
    (
        "parameters that are not arrays",
        TypeError,
        [
            lambda _, step=step: step.init({**PARAMS, "act": jnp.tanh})
            for step in (*STEPS, WINDOWS)
        ],
    ),
    (
        "an optimizer's state that is not arrays",
        TypeError,
        [
            lambda _, make=make: make(NAMED).init(PARAMS)
            for make in (train_step, window_step)
        ],
    ),
    (
        "a batch that k does not divide",
        ValueError,
        [lambda _: split_batch({"x": jnp.ones(6)}, 4)],
    ),
    (
        "micro-batches that were not split",
        ValueError,
        [
            lambda keep: WINDOWS(keep(WINDOWS.init(PARAMS)), UNSPLIT),
            lambda _: VALUE_AND_GRAD(PARAMS, UNSPLIT),
        ],
    ),
    (
        "a batch that was not split, and has one leading axis",
        TypeError,
        [
            lambda keep: (step := make_window_step(dot, SGD))(
                keep(step.init(jnp.ones(2))), jnp.ones((4, 1))
            ),
            lambda _: window_value_and_grad(dot)(jnp.ones(2), jnp.ones((4, 1))),
        ],
    ),
    (
        "`num_micro_batches` too large",
        ValueError,
        [
            lambda keep: WINDOWS(
                keep(WINDOWS.init(PARAMS)), WINDOW, num_micro_batches=5
            ),
            lambda _: VALUE_AND_GRAD(PARAMS, WINDOW, num_micro_batches=5),
        ],
    ),
    ("`num_micro_batches` too large, traced", None, [bound_too_large_in_jit]),
]
