"""What recipes of `docs` say and do not run, mostly on ragged text, against float64."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from meshes import make_mesh

from optax_tokenaccum import (
    accumulate_over_window,
    make_train_step,
    token_accumulation,
)

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"

K, RATE = 8, 4.0
RTOL = helpers.RTOL["float32"]
PARAMS = helpers.init_params(0)
BATCHES = [helpers.ragged_batch(seed) for seed in range(4)]
MICRO_BATCHES = [micro for batch in BATCHES for micro in helpers.cut(batch, K)]
SGD, MOMENTUM = optax.sgd(RATE), optax.sgd(RATE, momentum=0.9)


def exactly(inner: Any) -> Any:
    return token_accumulation(inner, K)


def naively(inner: Any) -> Any:
    theirs = optax.MultiSteps(inner, K)
    return optax.GradientTransformationExtraArgs(theirs.init, theirs.update)


def run(optimizer: Any, batches: Any = MICRO_BATCHES, naive: bool = False) -> Any:
    """Return parameters and state after a hand-written loop over micro-batches."""
    loss_fn = helpers.loss_mean_fn if naive else helpers.loss_sum_fn

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        (value, n), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        extra = {} if naive else {"num_tokens": n}
        updates, state = optimizer.update(grads, state, params, value=value, **extra)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, optimizer.init(PARAMS)
    for batch in batches:
        params, state = step(params, state, batch)
    return params, state


def on_full_batches(inner: Any) -> Any:
    """Return the parameters of a run of the inner optimizer in float64."""
    inner, loss_fn = optax.with_extra_args_support(inner), helpers.loss_mean_fn
    with jax.enable_x64(True):
        params = jax.tree.map(lambda p: jnp.asarray(p, float), PARAMS)
        state, update = inner.init(params), jax.jit(inner.update)
        for batch in BATCHES:
            value, _ = helpers.in_float64(loss_fn)(params, batch)
            gradient = helpers.float64_gradient(params, batch)
            updates, state = update(gradient, state, params, value=value)
            params = optax.apply_updates(params, updates)
        return jax.tree.map(np.asarray, params)


DECAY = optax.add_decayed_weights(-0.05)
SCHEDULE = optax.linear_schedule(RATE, 0.5, 3)


def injected(tx: Any, rate: Any) -> Any:
    return optax.inject_hyperparams(lambda rate: tx(optax.sgd(rate)))(rate)


# An optimizer around an accumulation `tx`, or around nothing (on full batches), and
# whether both agree.
AROUND: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "scale before": (lambda tx: optax.chain(optax.scale(0.5), tx(MOMENTUM)), True),
    "clip behind": (
        lambda tx: optax.chain(tx(MOMENTUM), optax.clip_by_global_norm(0.25)),
        True,
    ),
    "decay behind": (lambda tx: optax.chain(tx(SGD), DECAY), False),
    "inject_hyperparams": (lambda tx: injected(tx, RATE), True),
    "inject a schedule": (lambda tx: injected(tx, SCHEDULE), False),
    "apply_if_finite": (lambda tx: optax.apply_if_finite(tx(MOMENTUM), 3), True),
}


@pytest.mark.parametrize(("around", "same"), AROUND.values(), ids=AROUND)
def test_around_an_accumulation(around: Any, same: bool):
    expected = on_full_batches(around(lambda inner: inner))
    error = helpers.relative_error(run(around(exactly))[0], expected)
    assert error < RTOL if same else error > 0.01, error
    params, _ = run(around(naively), naive=True)
    assert helpers.relative_error(params, expected) > 0.01


def code_of(page: str, words: str) -> str:
    """Return the first block of a page that has these words."""
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return next(x for x in blocks if words in x)


def test_several_losses_on_a_mesh():
    """With the share of a device's tokens, next to the sum that the page writes."""
    code = code_of("losses.md", "def totals_of")
    per_micro_batch, per_token = (
        '1 / totals["micro_batches"]',
        'jnp.sum(batch["mask"]) / totals["tokens"]',
    )
    assert per_micro_batch in code
    assert per_token in (DOCS / "losses.md").read_text(encoding="utf-8")
    rng, mesh = np.random.default_rng(0), make_mesh((4,))
    params = {"embedding": jnp.asarray(rng.normal(size=(8, 4)), jnp.float32)}
    params["head"] = jnp.asarray(rng.normal(size=(4, 8)), jnp.float32)
    lengths = rng.integers(0, 6, (4, 8))  # of micro-batches, and their rows
    lengths[1], lengths[2, :2] = 0, 0  # a micro-batch and a device without tokens
    window = {
        "inputs": rng.integers(0, 8, (4, 8, 5)),
        "labels": rng.integers(0, 8, (4, 8, 5)),
        "mask": np.arange(5) < lengths[..., None],
        "reward": rng.normal(size=(4, 8)).astype(np.float32),
    }
    batch = jax.tree.map(np.concatenate, window)
    names: dict[str, Any] = {"jax": jax, "jnp": jnp, "optax": optax}
    for share in (per_micro_batch, per_token):
        exec(code.replace(per_micro_batch, share), names)
        totals = names["totals_of"](window["mask"])
        step = make_train_step(
            names["loss_fn"], optax.sgd(1.0), 4, mesh=mesh, data_axes="data"
        )
        state = step.init(params)
        micro_batches = [jax.tree.map(lambda x, i=i: x[i], window) for i in range(4)]
        if share == per_micro_batch:
            with pytest.raises(ValueError, match="num_tokens"):
                step(state, micro_batches[0], totals=totals)
            continue
        for micro_batch in micro_batches:
            state, metrics = step(state, micro_batch, totals=totals)
        assert metrics.updated
        np.testing.assert_allclose(metrics.num_tokens, 1, rtol=1e-6)
    whole = names["totals_of"]([batch["mask"]])
    gradient, _ = jax.grad(names["loss_fn"], has_aux=True)(params, batch, totals=whole)
    moved = optax.tree.sub(params, state.params)
    assert helpers.relative_error(moved, gradient) < RTOL
    of_each = [  # the totals of each micro-batch: a mean of means
        jax.grad(names["loss_fn"], has_aux=True)(
            params, x, totals=names["totals_of"]([np.maximum(x["mask"], i == 1)])
        )[0]
        for i, x in enumerate(micro_batches)
    ]
    naive = jax.tree.map(lambda *x: sum(x) / 4, *of_each)
    assert helpers.relative_error(naive, gradient) > 0.01


def test_multi_steps_of_optax_differs_with_the_optimizers_of_the_page():
    names: dict[str, Any] = {}
    exec(code_of("optimizers.md", "def is_exact"), names)
    exec(code_of("optimizers.md", "clip, momentum, sgd =").split("print(")[0], names)
    exec(code_of("optimizers.md", "def scale_by_tokens_seen").split("print(")[0], names)
    clipped = optax.chain(names["clip"], names["momentum"], names["sgd"])
    for inner in (clipped, names["by_tokens"]):
        assert names["is_exact"](inner)
        expected = names["train"](inner, [names["full_batch"]] * 3, k=1).params
        theirs, params = optax.MultiSteps(inner, 4), names["start"]
        state = theirs.init(params)
        for batch in names["micro_batches"] * 3:
            g, n = jax.grad(names["loss_fn"], has_aux=True)(params, batch)
            g = jax.tree.map(lambda x, n=n: x / n, g)
            updates, state = theirs.update(g, state, params, num_tokens=n)
            params = optax.apply_updates(params, updates)
        assert helpers.relative_error(params, expected) > 0.01


def test_an_average_of_the_parameters_advances_once_per_window():
    names: dict[str, Any] = {"jax": jax, "jnp": jnp, "optax": optax}
    code = code_of("optimizers.md", "def average_of_parameters")
    exec(code.split("\naveraged")[0], names)
    averaging = names["average_of_parameters"](0.9)
    sgd = optax.chain(optax.sgd(1.0), averaging)
    step = make_train_step(lambda p, x: (jnp.sum(p * x), len(x)), sgd, 2)
    state = step.init(jnp.zeros(()))
    for _ in range(4):
        state, _ = step(state, jnp.ones(3))
    _, average = state.opt_state.inner_opt_state
    assert float(state.params) == -2
    np.testing.assert_allclose(average, 0.9 * -0.1 + 0.1 * -2, rtol=1e-6)


def test_a_discarded_window_leaves_no_trace():
    names: dict[str, Any] = {}
    exec(code_of("recipes.md", "def train("), names)
    code = code_of("recipes.md", "def without_window")
    exec(code, names)
    state, step = names["state"], names["step"]
    assert state.opt_state.mini_step == 0
    for batch in names["micro_batches"]:
        state, _ = step(state, batch)
    args = names["loss_fn"], optax.adam(0.1), names["params"], names["micro_batches"]
    expected, _ = names["train"](*args)
    assert helpers.relative_error(state.params, expected) < RTOL
    state, _ = step(step.init(names["params"]), names["micro_batches"][0])
    for batch in names["micro_batches"]:  # not discarded
        state, _ = step(state, batch)
    assert state.opt_state.mini_step == 1


def test_a_window_is_differentiated_with_respect_to_a_learning_rate():
    names: dict[str, Any] = {}
    exec(code_of("recipes.md", "def train("), names)
    loss_fn, params, batch = (names[x] for x in ("loss_fn", "params", "batch"))
    gradient = accumulate_over_window(jax.value_and_grad(loss_fn, has_aux=True))

    def loss_after_update(rate: Any, of_window: bool) -> Any:
        if of_window:
            _, grads = gradient(params, names["window"])
        else:
            grads = jax.grad(lambda p: jnp.divide(*loss_fn(p, batch)))(params)
        moved = jax.tree.map(lambda p, g: p - rate * g, params, grads)
        return jnp.divide(*loss_fn(moved, batch))

    found, expected = (jax.grad(loss_after_update)(0.1, x) for x in (True, False))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_rate_by_tokens_rounds_a_count_of_shares():
    names: dict[str, Any] = {"jax": jax, "jnp": jnp, "optax": optax}
    code = code_of("optimizers.md", "def scale_by_tokens_seen")
    exec(code.split("\ndecay")[0], names)
    decay = names["scale_by_tokens_seen"](lambda tokens: tokens)
    inner = optax.chain(optax.sgd(1.0), decay)
    step = make_train_step(lambda p, x: (p * x, x), inner, 41)
    state = step.init(jnp.zeros(()))
    for _ in range(41):
        state, metrics = step(state, jnp.float32(1 / 41))
    assert metrics.updated
    assert int(metrics.num_tokens) == 0  # which truncates 0.99999958
    assert int(state.opt_state.inner_opt_state[1]["rest"]) == 1
