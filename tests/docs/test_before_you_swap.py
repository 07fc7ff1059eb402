"""docs/before_you_swap.md: each row of its table, checkpoints, and the way back.

The classes of others are the real ones, and exact is what plain optax does on full
batches.
"""

import collections
import functools
import re
from collections.abc import Callable
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
from flax.training.train_state import TrainState
from optax import contrib

from optax_tokenaccum import (
    MultiSteps,
    TokenAccumulationState,
    close_window,
    from_multi_steps_state,
    has_updated,
    linen,
    window_gradient,
    with_num_tokens,
)

PAGE = (Path(__file__).parents[2] / "docs/before_you_swap.md").read_text("utf-8")
ROWS = re.findall(r"^\| (.*?) \| .* \| .* \|$", PAGE, re.MULTILINE)[1:]
CODE = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
ELSEWHERE = "`jax.lax.pmean` of gradients"  # tests/devices/test_data_parallel_loops.py
SHOWN: dict[str, list[Callable[[], None]]] = collections.defaultdict(list)

RTOL, RNG, K = helpers.RTOL["float32"], np.random.default_rng(0), 4
COUNTS = (1, 7, 2, 6)
MICRO_BATCHES = [(RNG.normal(size=(n, 3)), RNG.normal(size=n)) for n in COUNTS]
FULL_BATCH = tuple(np.concatenate(x) for x in zip(*MICRO_BATCHES, strict=True))
PARAMS = {"w": jnp.ones(3)}


def shows(words: str) -> Callable[[Callable[[], None]], None]:
    """Register a function that asserts what the row with these words says."""
    [row] = [row for row in ROWS if words in row]

    def register(happens: Callable[[], None]) -> None:
        SHOWN[row].append(happens)

    return register


def mean_loss(params: Any, batch: Any) -> jax.Array:
    x, y = batch
    return jnp.mean((x @ params["w"] - y) ** 2)


gradient = jax.jit(jax.grad(mean_loss))


def error(got: Any, expected: Any) -> float:
    return helpers.relative_error(got, expected)


def plain(inner: Any, windows: int) -> Any:
    """Full batches, in plain optax."""
    params, state = PARAMS, inner.init(PARAMS)
    for _ in range(windows):
        updates, state = inner.update(gradient(params, FULL_BATCH), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def loop(tx: Any, counts: Any, windows: int, params: Any = PARAMS, state: Any = None):
    """A loop around `tx.update`, without a count where `counts` is None."""
    state = tx.init(params) if state is None else state
    for i in range(windows * K):
        given = {} if counts is None else {"num_tokens": counts[i % K]}
        g = gradient(params, MICRO_BATCHES[i % K])
        updates, state = tx.update(g, state, params, **given)
        params = optax.apply_updates(params, updates)
    return params, state


@shows("acc_grads")
def _() -> None:
    g = [gradient(PARAMS, batch)["w"] for batch in MICRO_BATCHES]
    theirs, ours = (kind(optax.sgd(0.1), K) for kind in (optax.MultiSteps, MultiSteps))
    old, new = theirs.init(PARAMS), ours.init(PARAMS)
    for i in range(2):
        _, old = theirs.update({"w": g[i]}, old, PARAMS)
        _, new = ours.update({"w": g[i]}, new, PARAMS, num_tokens=COUNTS[i])
    exact = (g[0] * COUNTS[0] + g[1] * COUNTS[1]) / (COUNTS[0] + COUNTS[1])
    assert error(window_gradient(new)["w"], exact) < RTOL
    with pytest.raises(AttributeError, match="window_gradient"):
        _ = new.acc_grads
    assert error(old.acc_grads["w"], (g[0] + g[1]) / 2) < RTOL
    assert error(old.acc_grads["w"], exact) > 0.1


@shows("isinstance")
def _() -> None:
    params, state = loop(MultiSteps(SCHEDULE_FREE, K), COUNTS, 2)

    def evaluated(kind: type) -> Any:
        if isinstance(state, kind):
            inner_state = state.inner_opt_state
            return contrib.schedule_free_eval_params(inner_state, params)
        return params

    expected, inner_state = plain(SCHEDULE_FREE, 2)
    expected = contrib.schedule_free_eval_params(inner_state, expected)
    assert error(evaluated(TokenAccumulationState), expected) < RTOL
    chex.assert_trees_all_equal(evaluated(optax.MultiStepsState), params)
    assert error(params, expected) > 0.01


SCHEDULE_FREE = contrib.schedule_free_sgd(0.1)


@shows("schedule_free_eval_params")
def _() -> None:
    params, state = loop(MultiSteps(SCHEDULE_FREE, K), (1,) * K, 2)
    old_params, old = loop(optax.MultiSteps(SCHEDULE_FREE, K), None, 2)
    got, expected = (
        contrib.schedule_free_eval_params(x.inner_opt_state, p)
        for x, p in [(state, params), (old, old_params)]
    )
    assert error(got, expected) < RTOL


@shows("_every_k_schedule")
def _() -> None:
    assert optax.MultiSteps(optax.sgd(0.1), K)._every_k_schedule(0) == K
    with pytest.raises(AttributeError, match="keep every_k_schedule in a variable"):
        _ = MultiSteps(optax.sgd(0.1), K)._every_k_schedule


@shows("has_updated")
def _() -> None:
    kinds = optax.MultiSteps, MultiSteps
    theirs, ours = (kind(optax.sgd(0.1), 2, **helpers.SKIPS) for kind in kinds)
    old, new = theirs.init(PARAMS), ours.init(PARAMS)
    for scale, seen in [
        (1.0, (False, False)),
        (1.0, (True, True)),
        (np.nan, (True, False)),
        (1.0, (False, False)),
    ]:
        g = {"w": jnp.full(3, scale)}
        _, old = theirs.update(g, old, PARAMS)
        _, new = ours.update(g, new, PARAMS, num_tokens=1)
        assert (theirs.has_updated(old), ours.has_updated(new)) == seen
        assert has_updated({"in": [new]}) == seen[1]


@shows("mini_step")
def _() -> None:
    inner = optax.adam(0.1)
    theirs, ours = optax.MultiSteps(inner, K), MultiSteps(inner, K)
    old, new = theirs.init(PARAMS), ours.init(PARAMS)
    for batch in MICRO_BATCHES * 2:
        g = gradient(PARAMS, batch)
        _, old = theirs.update(g, old, PARAMS)
        _, new = ours.update(g, new, PARAMS, num_tokens=1)
        for name in ("mini_step", "gradient_step"):
            assert getattr(old, name) == getattr(new, name)
        found, expected = new.inner_opt_state, old.inner_opt_state
        chex.assert_trees_all_close(found, expected, rtol=1e-5)


@shows("step % k")
def _() -> None:
    tx = MultiSteps(optax.sgd(0.1), K)
    state, g = tx.init(PARAMS), gradient(PARAMS, MICRO_BATCHES[0])
    for step in range(1, K + 1):
        _, state = tx.update(g, state, PARAMS, num_tokens=1)
        if step == 2:
            _, state = close_window(tx, state, PARAMS)
            assert (state.mini_step, state.gradient_step) == (0, 1) != (step % K, 0)
    assert (state.mini_step, step % K) == (2, 0)


@shows("hyperparams")
def _() -> None:
    rate = optax.linear_schedule(1.0, 0.0, 4)
    inner = optax.inject_hyperparams(optax.sgd)(learning_rate=rate)
    for windows in (1, 2):
        _, new = loop(MultiSteps(inner, K), COUNTS, windows)
        _, old = loop(optax.MultiSteps(inner, K), None, windows)
        got, expected = (x.inner_opt_state.hyperparams for x in (new, old))
        assert got["learning_rate"] == expected["learning_rate"] == rate(windows - 1)


@shows("`TrainState`")
def _() -> None:
    options = {"apply_fn": None, "params": PARAMS, "tx": MultiSteps(optax.sgd(0.1), K)}
    flax, ours = TrainState.create(**options), linen.TrainState.create(**options)
    g = gradient(PARAMS, MICRO_BATCHES[0])
    with pytest.raises(TypeError, match=r"linen\.TrainState"):
        flax.apply_gradients(grads=g, num_tokens=1)
    options["tx"] = optax.MultiSteps(optax.sgd(0.1), K)
    flax = TrainState.create(**options)
    for i in range(2 * K):
        g = gradient(ours.params, MICRO_BATCHES[i % K])
        ours = ours.apply_gradients(grads=g, num_tokens=COUNTS[i % K])
        flax = flax.apply_gradients(grads=gradient(flax.params, MICRO_BATCHES[i % K]))
    assert (ours.step, ours.step // K) == (2, 0)
    assert (flax.step, flax.step // K) == (2 * K, 2)
    expected, _ = plain(optax.sgd(0.1), 2)
    assert error(ours.params, expected) < RTOL
    assert error(flax.params, expected) > 0.01


@shows("clip_by_global_norm")
def _() -> None:
    """Two tokens with steep gradients, of opposite signs, and many flat ones."""
    sizes, slopes = np.array([1, 1, 8]), jnp.array([6.0, 6.0, -0.2])
    exact = jnp.clip((sizes * slopes).sum() / sum(sizes), -1, 1)

    def applied(tx: Any) -> jax.Array:
        state = tx.init(exact)
        for n, slope in zip(sizes, slopes, strict=True):
            update, state = tx.update(slope, state, exact, num_tokens=n)
        return -update

    clip, sgd = optax.clip_by_global_norm(1.0), optax.sgd(1.0)
    inside = MultiSteps(optax.chain(clip, sgd), 3)
    assert error(applied(inside), exact) < RTOL
    before, swapped = (
        error(applied(optax.chain(clip, kind(sgd, 3).gradient_transformation())), exact)
        for kind in (optax.MultiSteps, MultiSteps)
    )
    assert 0.1 < before < swapped


@shows("optax.lookahead")
def _() -> None:
    """Its period counts calls: here, two windows."""

    def trained(calls: Any, wrapped: Any) -> Any:
        params = optax.LookaheadParams.init_synced(PARAMS)
        state = wrapped(1).init(params)

        @jax.jit
        def step(params: Any, state: Any, batch: Any, n: Any) -> Any:
            g = jax.grad(mean_loss)(params.fast, batch)
            updates, state = wrapped(n).update(g, state, params)
            return optax.apply_updates(params, updates), state

        for batch, n in calls * 4:
            params, state = step(params, state, batch, n)
        return params

    def ours(n: Any) -> Any:
        tx = MultiSteps(optax.sgd(0.1), K).gradient_transformation()
        return optax.lookahead(with_num_tokens(tx, n), 2 * K, 0.5)

    theirs = optax.MultiSteps(optax.sgd(0.1), K).gradient_transformation()
    calls = [*zip(MICRO_BATCHES, COUNTS, strict=True)]
    got = trained(calls, ours)
    full = [(FULL_BATCH, None)]
    expected = trained(full, lambda n: optax.lookahead(optax.sgd(0.1), 2, 0.5))
    assert error(got, expected) < RTOL
    naive = trained(calls, lambda n: optax.lookahead(theirs, 2 * K, 0.5))
    assert error(naive, expected) > 0.01


@shows("losses.append")
def _() -> None:
    losses = [mean_loss(PARAMS, batch) for batch in MICRO_BATCHES]
    expected = np.mean((FULL_BATCH[0] @ np.ones(3) - FULL_BATCH[1]) ** 2)
    log = sum(x * n for x, n in zip(losses, COUNTS, strict=True)) / sum(COUNTS)
    assert error(log, expected) < RTOL
    assert error(np.mean(losses), expected) > 0.1


@shows("without `jax.jit`")
def _() -> None:
    calls: list[None] = []

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        jax.debug.callback(lambda: calls.append(None))
        return updates, state

    inner = optax.GradientTransformation(optax.identity().init, update)
    for tx, counts, expected in [
        (optax.MultiSteps(inner, K), None, 2 * K),
        (MultiSteps(inner, K), COUNTS, 2),
    ]:
        calls.clear()
        loop(tx, counts, 2)
        jax.effects_barrier()
        assert len(calls) == expected


@pytest.mark.parametrize("row", ROWS)
def test_each_row_is_so(row: str):
    assert {*ROWS} - {*SHOWN} == {x for x in ROWS if ELSEWHERE in x} != set()
    for happens in SHOWN.get(row, ()):
        happens()


@functools.cache
def page() -> Any:
    """The names of the page's code, which another test compares with its comments."""
    names: dict[str, Any] = {}
    exec(CODE, names)
    return names


INNER = optax.sgd(0.1, momentum=0.9)  # as on the page
THEIRS, OURS = optax.MultiSteps(INNER, K), MultiSteps(INNER, K)


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
    g = gradient(params, FULL_BATCH)
    updates, _ = INNER.update(g, state.inner_opt_state, params)
    return optax.apply_updates(params, updates)


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
    naive, _ = loop(THEIRS, None, 1, *old_run())
    assert error(naive, exactly_one_more()) > 0.01
    assert state.gradient_step == 2


def test_flax_train_state_goes_on_with_the_number_of_updates():
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=THEIRS)
    for batch in MICRO_BATCHES:
        state = state.apply_gradients(grads=gradient(state.params, batch))
    names = page() | {"before": state, "optimizer": OURS}
    [line] = re.findall(r"^state = linen.*?\)$", CODE, re.MULTILINE | re.DOTALL)
    exec(line, names)
    state = names["state"]
    assert state.step == 1
    for batch, n in zip(MICRO_BATCHES, COUNTS, strict=True):
        grads = gradient(state.params, batch)
        state = state.apply_gradients(grads=grads, num_tokens=n)
    assert state.step == 2
    assert error(state.params, exactly_one_more()) < RTOL


def test_with_nnx_the_optimizer_goes_on_and_back_again():
    assign, arrays, to_optax = map(page().get, ("assign", "arrays", "to_optax"))

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones(3))

    def moved(model: Any, optimizer: Any, counts: Any = None) -> Any:
        for i, batch in enumerate(MICRO_BATCHES):
            g = nnx.grad(lambda model, x, y: jnp.mean((x @ model.w[...] - y) ** 2))(
                model, *batch
            )
            given = {} if counts is None else {"num_tokens": counts[i]}
            optimizer.update(model, g, **given)
        return {"w": model.w[...]}

    model = Model()
    before = nnx.Optimizer(model, THEIRS, wrt=nnx.Param)
    assert error(moved(model, before), old_run()[0]) < RTOL
    after = nnx.Optimizer(model, OURS, wrt=nnx.Param)
    params = arrays(nnx.state(model, nnx.Param))
    old = arrays(before.opt_state)
    assign(after.opt_state, from_multi_steps_state(OURS, old, params))
    assert error(moved(model, after, COUNTS), exactly_one_more()) < RTOL
    back = nnx.Optimizer(model, THEIRS, wrt=nnx.Param)
    params = arrays(nnx.state(model, nnx.Param))
    assign(back.opt_state, to_optax(arrays(after.opt_state), params))
    expected, state = loop(OURS, COUNTS, 1, old_run()[0], taken_over())
    expected, _ = loop(THEIRS, None, 1, expected, to_optax(state, expected))
    assert error(moved(model, back), expected) < RTOL


def test_leaving_between_windows_goes_on_as_if_optax_had_done_it_all():
    to_optax = page()["to_optax"]
    expected, _ = loop(THEIRS, None, 3)
    params, state = loop(OURS, (1,) * K, 1, old_run()[0], taken_over())
    state = to_optax(state, params)
    assert helpers.signatures(state) == helpers.signatures(old_run()[1])
    got, state = loop(THEIRS, None, 1, params, state)
    assert error(got, expected) < RTOL
    assert state.gradient_step == 3
    # Without the moments it would be another run.
    fresh, _ = loop(THEIRS, None, 1, params)
    assert error(fresh, expected) > 0.01
