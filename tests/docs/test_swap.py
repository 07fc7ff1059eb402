"""docs/swap.md: what changes, what stays, checkpoints, and the way back.

The classes of others are the real ones, and exact is what plain optax does on full
batches. Errors of the table are in test_bad_input.py, `pmean` in
devices/test_data_parallel_loops.py, `TrainState` in flax/test_linen.py.
"""

import functools
import re
from pathlib import Path
from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization
from optax import contrib

from optax_tokenaccum import (
    MultiSteps,
    TokenAccumulationState,
    from_multi_steps_state,
    has_updated,
    window_gradient,
    with_num_tokens,
)

PAGE = (Path(__file__).parents[2] / "docs/swap.md").read_text("utf-8")
RTOL, RNG, K = helpers.RTOL["float32"], np.random.default_rng(0), 4
COUNTS, ONES = (1, 7, 2, 6), (1,) * K
MICRO_BATCHES = [(RNG.normal(size=(n, 3)), RNG.normal(size=n)) for n in COUNTS]
FULL_BATCH = tuple(np.concatenate(x) for x in zip(*MICRO_BATCHES, strict=True))
PARAMS = {"w": jnp.ones(3)}
INNER = optax.sgd(0.1, momentum=0.9)  # as on the page
THEIRS, OURS = optax.MultiSteps(INNER, K), MultiSteps(INNER, K)


def mean_loss(params: Any, x: Any, y: Any) -> jax.Array:
    return jnp.mean((x @ params["w"] - y) ** 2)


gradient, error = jax.jit(jax.grad(mean_loss)), helpers.relative_error


def loop(tx: Any, counts: Any, windows: int, params: Any = PARAMS, state: Any = None):
    """A loop around `tx.update`, without a count where `counts` is None."""
    state = tx.init(params) if state is None else state
    for i in range(windows * K):
        given = {} if counts is None else {"num_tokens": counts[i % K]}
        g = gradient(params, *MICRO_BATCHES[i % K])
        updates, state = tx.update(g, state, params, **given)
        params = optax.apply_updates(params, updates)
    return params, state


@functools.cache
def old_run() -> Any:
    """Parameters and state after a window of optax's."""
    return loop(THEIRS, None, 1)


def taken_over() -> Any:
    params, state = old_run()
    return from_multi_steps_state(OURS, state, params)


@functools.cache
def exactly_one_more() -> Any:
    """The parameters after a full batch more."""
    params, state = old_run()
    g = gradient(params, *FULL_BATCH)
    updates, _ = INNER.update(g, state.inner_opt_state, params)
    return optax.apply_updates(params, updates)


def test_the_inner_state_is_that_of_optax():
    rate = optax.linear_schedule(1.0, 0.0, 4)
    for inner in (
        contrib.schedule_free_sgd(0.1),
        optax.inject_hyperparams(optax.sgd)(learning_rate=rate),
    ):
        params, state = loop(MultiSteps(inner, K), ONES, 2)
        old_params, old = loop(optax.MultiSteps(inner, K), None, 2)
        assert isinstance(state, TokenAccumulationState)
        assert not isinstance(state, optax.MultiStepsState)
        assert (state.mini_step, state.gradient_step) == (0, 2)
        new = state.inner_opt_state, params
        chex.assert_trees_all_close(new, (old.inner_opt_state, old_params), rtol=1e-5)
    assert state.inner_opt_state.hyperparams["learning_rate"] == rate(1)


def test_a_rejected_micro_batch_is_no_update():
    kinds = optax.MultiSteps, MultiSteps
    theirs, ours = (kind(optax.sgd(0.1), 2, **helpers.SKIPS) for kind in kinds)
    old, new, seen = theirs.init(PARAMS), ours.init(PARAMS), []
    for scale in (1.0, 1.0, np.nan, 1.0):
        g = {"w": jnp.full(3, scale)}
        _, old = theirs.update(g, old, PARAMS)
        _, new = ours.update(g, new, PARAMS, num_tokens=1)
        found = ours.has_updated(new), has_updated({"in": [new]})
        seen.append((bool(theirs.has_updated(old)), *map(bool, found)))
    assert [x for x, *_ in seen] == [False, True, True, False]
    assert [x for _, *x in seen] == [[x] * 2 for x in (False, True, False, False)]


def test_clipping_around_the_accumulation_can_be_worse_than_before():
    """Two tokens with steep gradients, of opposite signs, and many flat ones."""
    sizes, slopes = np.array([1, 1, 8]), jnp.array([6.0, 6.0, -0.2])
    exact = jnp.clip((sizes * slopes).sum() / sum(sizes), -1, 1)

    def applied(tx: Any) -> jax.Array:
        state = tx.init(exact)
        for n, slope in zip(sizes, slopes, strict=True):
            update, state = tx.update(slope, state, exact, num_tokens=n)
        return -update

    clip, sgd = optax.clip_by_global_norm(1.0), optax.sgd(1.0)
    assert error(applied(MultiSteps(optax.chain(clip, sgd), 3)), exact) < RTOL
    before, swapped = (
        error(applied(optax.chain(clip, kind(sgd, 3).gradient_transformation())), exact)
        for kind in (optax.MultiSteps, MultiSteps)
    )
    assert 0.1 < before < swapped


def test_the_norm_of_a_window_is_read_from_the_chain():
    norm = optax.snapshot("grad_norm", optax.tree.norm)
    chain = optax.chain(norm, optax.clip_by_global_norm(0.5), optax.sgd(0.1))
    tx, norms = MultiSteps(chain, 2), []
    state = tx.init(PARAMS)
    for value, n in ((1.0, 1), (2.0, 3)):
        _, state = tx.update({"w": jnp.full(3, value)}, state, PARAMS, num_tokens=n)
        norms.append(float(optax.tree.norm(window_gradient(state))))
    expected = 3**0.5 * (1 * 1 + 2 * 3) / 4
    np.testing.assert_allclose(optax.tree.get(state, "grad_norm"), expected, rtol=1e-6)
    np.testing.assert_allclose(norms, [3**0.5, 0], rtol=1e-6)


@pytest.mark.filterwarnings("ignore:Casting from complex to real")  # of optax
def test_optax_drops_a_count_in_silence_and_the_imaginary_parts_of_gradients():
    theirs, ours = (kind(optax.sgd(1.0), 2) for kind in (optax.MultiSteps, MultiSteps))
    w, moved = jnp.zeros((), jnp.complex64), []
    for tx in (theirs, ours):
        state = tx.init(w)
        for g, n in ((1 + 2j, 1), (2 + 4j, 3)):
            update, state = tx.update(jnp.complex64(g), state, w, num_tokens=n)
        moved.append(complex(-update))
    assert moved == [1.5 + 2j, (7 + 14j) / 4]


def test_hyperparameters_are_injected_inside():
    with pytest.raises(TypeError, match="needs num_tokens"):
        tx = optax.inject_hyperparams(lambda rate: MultiSteps(optax.sgd(rate), 2))(0.1)
        tx.update(PARAMS, tx.init(PARAMS), PARAMS, num_tokens=1)
    state = MultiSteps(optax.inject_hyperparams(optax.sgd)(0.1), 2).init(PARAMS)
    assert state.inner_opt_state.hyperparams["learning_rate"] == jnp.float32(0.1)


def test_lookahead_is_given_the_count_in_the_traced_step():
    """Its period counts calls: here, two windows."""

    def trained(calls: Any, wrapped: Any) -> Any:
        params = optax.LookaheadParams.init_synced(PARAMS)
        state = wrapped(1).init(params)

        @jax.jit
        def step(params: Any, state: Any, batch: Any, n: Any) -> Any:
            g = gradient(params.fast, *batch)
            updates, state = wrapped(n).update(g, state, params)
            return optax.apply_updates(params, updates), state

        for batch, n in calls * 4:
            params, state = step(params, state, batch, n)
        return params

    def around(kind: Any) -> Any:
        tx = kind(optax.sgd(0.1), K).gradient_transformation()
        return lambda n: optax.lookahead(
            with_num_tokens(tx, n) if kind is MultiSteps else tx, 2 * K, 0.5
        )

    calls = [*zip(MICRO_BATCHES, COUNTS, strict=True)]
    full = [(FULL_BATCH, None)]
    expected = trained(full, lambda n: optax.lookahead(optax.sgd(0.1), 2, 0.5))
    assert error(trained(calls, around(MultiSteps)), expected) < RTOL
    assert error(trained(calls, around(optax.MultiSteps)), expected) > 0.01


@functools.cache
def page() -> Any:
    """The names of the page's code, which another test compares with its comments."""
    names: dict[str, Any] = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)), names)
    return names


def test_checkpoints_raise_the_errors_of_the_page_and_are_taken_over(tmp_path: Path):
    [texts] = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    orbax, flax = texts.split("ValueError: ")[1:]
    params, old = old_run()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "old", old)
        checkpointer.wait_until_finished()
        with pytest.raises(ValueError, match=re.escape(orbax.strip())):
            checkpointer.restore(tmp_path / "old", OURS.init(params))
        restored = checkpointer.restore(tmp_path / "old", THEIRS.init(params))
    with pytest.raises(ValueError, match=flax.split("{")[0]):
        serialization.from_bytes(OURS.init(params), serialization.to_bytes(old))
    state = from_multi_steps_state(OURS, restored, params)
    found, state = loop(OURS, COUNTS, 1, params, state)
    assert error(found, exactly_one_more()) < RTOL
    naive, _ = loop(THEIRS, None, 1, params, old)
    assert error(naive, exactly_one_more()) > 0.01
    assert state.gradient_step == 2


def arrays(tree: Any) -> Any:
    """Return the arrays of a tree of NNX variables."""
    return jax.tree.map(
        lambda x: x[...], tree, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )


def assign(variables: Any, tree: Any) -> None:
    """Write a tree of arrays into NNX variables."""
    jax.tree.map(
        lambda x, value: x.set_value(value),
        variables,
        tree,
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )


def test_with_nnx_the_optimizer_goes_on_and_back_again():
    to_optax = page()["to_optax"]

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones(3))

    model = Model()

    def new(tx: Any) -> Any:
        return nnx.Optimizer(model, tx, wrt=nnx.Param)

    def moved(optimizer: Any, counts: Any = None) -> Any:
        for i, batch in enumerate(MICRO_BATCHES):
            given = {} if counts is None else {"num_tokens": counts[i]}
            g = nnx.grad(lambda model, x, y: mean_loss({"w": model.w[...]}, x, y))
            optimizer.update(model, g(model, *batch), **given)
        return {"w": model.w[...]}

    before = new(THEIRS)
    assert error(moved(before), old_run()[0]) < RTOL
    after, params = new(OURS), arrays(nnx.state(model, nnx.Param))
    old = from_multi_steps_state(OURS, arrays(before.opt_state), params)
    assign(after.opt_state, old)
    assert error(moved(after, COUNTS), exactly_one_more()) < RTOL
    back, params = new(THEIRS), arrays(nnx.state(model, nnx.Param))
    assign(back.opt_state, to_optax(arrays(after.opt_state), params))
    expected, state = loop(OURS, COUNTS, 1, old_run()[0], taken_over())
    expected, _ = loop(THEIRS, None, 1, expected, to_optax(state, expected))
    assert error(moved(back), expected) < RTOL


def test_leaving_between_windows_goes_on_as_if_optax_had_done_it_all():
    params, old = old_run()
    params, state = loop(OURS, ONES, 1, params, taken_over())
    state = page()["to_optax"](state, params)
    assert helpers.signatures(state) == helpers.signatures(old)
    got, state = loop(THEIRS, None, 1, params, state)
    expected, _ = loop(THEIRS, None, 3)
    assert error(got, expected) < RTOL
    assert state.gradient_step == 3
    # Without the moments it would be another run.
    fresh, _ = loop(THEIRS, None, 1, params)
    assert error(fresh, expected) > 0.01
