"""Problems with answers in float64, and the table of ways x layouts x options.

From the top to the end of the file:

* `PROBLEMS`: losses whose gradients are known; `WINDOWS`: tokens of micro-batches.
* `answer`: what a run must give, by plain JAX in float64; `by_hand`: one window.
* `WAYS`: three short ways to one gradient, for tests of a network.
* `STEPS`, `LAYOUTS`, `OPTIONS`: runs of steps (`of_step`).
* `LOOPS`: runs of loops that a user writes (`of_loop`), each a function `by_...`.
* `ALL`, `cover`: every possible case, and few cases that have every pair.

A new way is one line in `STEPS` or in `LOOPS`, and a new layout one in `LAYOUTS`.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import chex
import helpers
import jax
import jax.numpy as jnp
import meshes
import nnx_ways
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from optax_tokenaccum import (
    MultiSteps,
    accumulate_over_window,
    coupled_value_and_grad,
    linen,
    make_train_step,
    make_window_step,
    token_accumulation,
    window_gradient,
    window_value_and_grad,
)
from optax_tokenaccum import nnx as nnx_steps
from optax_tokenaccum.losses import linear_cross_entropy_sum

ROWS, FEATURES, WIDTH, LAYERS, K, RATE = 8, 8, 40, 3, 3, 0.125
KEY = np.asarray(jax.random.key_data(jax.random.key(7)))


class Problem(NamedTuple):
    """A loss of rows; `key` and `state` tell whether it takes them."""

    params: Any
    # (params, batch, rng, model_state) -> (loss_sum, num_tokens, aux, model_state)
    loss: Callable[..., Any]
    rows: Callable[[int, np.ndarray], Any]  # (seed, weights of the rows) -> a batch
    users: Callable[..., Any] | None = None  # the same loss, as users call it
    state: Any = None
    key: bool = False
    real: bool = False  # the loss of rows that do not count is real, not 0/0


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def batch_of(seed: int, weights: Any) -> Any:
    """Micro-batches differ in mean, so that a mean of means is another gradient."""
    rows = len(weights)
    made = {"x": normal(seed, rows, FEATURES), "y": seed + normal(seed + 100, rows)}
    return made | {"weights": np.float32(weights)}


def squares(y: Any, batch: Any) -> Any:
    losses = (y - batch["y"]) ** 2
    return jnp.sum(losses * batch["weights"]), jnp.sum(batch["weights"])


def linear_loss(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """A regression, whose rows have weights."""
    return squares(batch["x"] @ params["w"], batch)


def exact(params: Any, *batches: Any) -> Any:
    """The gradient of its weighted mean over all rows, in float64."""
    rows = [float64([b[name] for b in batches]) for name in ("x", "y", "weights")]
    x, y, weights = map(np.concatenate, rows)
    errors = (x @ np.asarray(params["w"], np.float64) - y) * weights
    return {"w": 2 * x.T @ errors / weights.sum()}


def whole(params: Any, batch: Any, rng: Any, state: Any) -> Any:
    """`None` in the place of an array is not a leaf, as after `equinox.partition`."""
    assert params["bias"] is None and batch["no"] is None
    return *linear_loss(params, batch), None, None


def rows_of(seed: int, weights: np.ndarray) -> Any:
    return batch_of(seed, weights) | {"no": None}


def keys(params: Any, batch: Any, rng: Any, state: Any) -> Any:
    kept = jax.random.bits(rng, batch["x"].shape, "uint32") % 2
    return *squares((batch["x"] * kept) @ params["w"], batch), kept, None


def statistics(params: Any, batch: Any, rng: Any, state: Any) -> Any:
    """Running statistics; the loss assigns to the state that it is given, as it may."""
    x = batch["x"]
    y = ((x - state["mean"]) / jnp.sqrt(state["var"])) @ params["w"]
    for name, value in {"mean": x.mean(0), "var": x.var(0)}.items():
        state[name] += 0.5 * (value - state[name])
    state["calls"] += 1
    return *squares(y, batch), None, state


def layer(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w), None


def through_layers(params: Any, x: Any) -> Any:
    return jax.lax.scan(layer, x.astype(params["layers"].dtype), params["layers"])[0]


def loss_through(network: Any) -> Any:
    """A regression on what `network(params, x)` makes of the features."""

    def loss_fn(params: Any, batch: Any) -> Any:
        y = network(params, batch["x"]) * params["out"]
        return squares(jnp.sum(y, -1), batch)

    return loss_fn


layered_loss = loss_through(through_layers)


def layered(params: Any, batch: Any, rng: Any, state: Any) -> Any:
    return *layered_loss(params, batch), None, None


def anchors(params: Any, batch: Any, rng: Any, state: Any) -> Any:
    """Focal loss: every row has one anchor, and those that are positive count."""
    y = through_layers(params, batch["x"]) * params["out"]
    logits, positive = jnp.sum(y, -1), batch["weights"] > 0
    signed = jnp.where(positive, logits, -logits)
    losses = -(jax.nn.sigmoid(-signed) ** 2) * jax.nn.log_sigmoid(signed)
    return jnp.sum(losses), jnp.sum(positive), None, None


def wide_rows(seed: int, weights: np.ndarray) -> Any:
    return batch_of(seed, weights) | {"x": normal(seed, ROWS, WIDTH)}


def ragged_rows(seed: int, weights: np.ndarray) -> Any:
    batch = helpers.ragged_batch(seed, ROWS)
    return batch | {"weights": np.float32(batch.pop("mask") * weights[:, None])}


def ragged(params: Any, batch: Any, rng: Any, state: Any) -> Any:
    logits = helpers.logits_of(params, batch["tokens"])
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(
        logits, batch["labels"]
    )
    weights = batch["weights"]
    return jnp.sum(losses * weights), jnp.sum(weights), None, None


def ragged_in_chunks(params: Any, batch: Any, rng: Any, state: Any) -> Any:
    hidden = jnp.tanh(params["embed"][batch["tokens"]] @ params["hidden"])
    given = hidden, params["out"], batch["labels"], batch["weights"]
    return *linear_cross_entropy_sum(*given, chunk_size=10), None, None


PARAMS = {"w": jnp.asarray(normal(1, FEATURES))}  # of `linear_loss`
LINEAR = jax.device_get(PARAMS) | {"bias": None, "empty": {}}
# At least 16 KB of sums, which are overwritten in a loop when a window closes.
STACKED = {"layers": normal(2, LAYERS, WIDTH, WIDTH) / 6, "out": normal(3, WIDTH) / 3}
FEW = {"layers": normal(2, LAYERS, FEATURES, FEATURES) / 3, "out": normal(3, FEATURES)}
FEW = jax.tree.map(jnp.asarray, FEW)  # for networks that no way to train needs
EMBEDDED = jax.device_get(helpers.init_params(0))
STATE = {"mean": np.zeros(FEATURES, np.float32), "var": np.ones(FEATURES, np.float32)}
PROBLEMS = {
    "whole": Problem(LINEAR, whole, rows_of),
    "layered": Problem(STACKED, layered, wide_rows),
    "anchors": Problem(STACKED, anchors, wide_rows, real=True),
    "keys": Problem(LINEAR, keys, rows_of, key=True),
    "state": Problem(LINEAR, statistics, rows_of, state=STATE | {"calls": np.int32(0)}),
    "ragged": Problem(EMBEDDED, ragged, ragged_rows, ragged_in_chunks),
}
# Tokens of each micro-batch; of the second window there are none, and of the last less
# than 1.
WINDOWS = [(8, 0, 3), (0, 0, 0), (0, 5, 1), (1 / 4, 1 / 16, 0)]


def windows_of(problem: Problem) -> list[list[Any]]:
    def batch_of(i: int, tokens: float) -> Any:
        weights = np.clip(tokens - np.arange(ROWS), 0, 1).astype(np.float32)
        return problem.rows(i, weights) | {"scale": np.ones(ROWS, np.float32)}

    return [
        [batch_of(K * w + i, n) for i, n in enumerate(x)]
        for w, x in [*enumerate(WINDOWS)]
    ]


def bad(batch: Any) -> Any:
    """A micro-batch whose gradient is NaN, because of one row."""
    return batch | {"scale": np.where(np.arange(ROWS) == 5, np.nan, batch["scale"])}


# The answers, in plain JAX.


@functools.cache
def float64_loss(name: str) -> Any:
    problem = PROBLEMS[name]

    def loss(params: Any, batch: Any, rng: Any, state: Any) -> Any:
        rng = jax.random.wrap_key_data(rng)
        loss_sum, n, _, state = problem.loss(params, batch, rng, state)
        return loss_sum, (n, state)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


class Answer(NamedTuple):
    loss: Any
    tokens: Any
    gradient: Any
    state: Any


def float64(tree: Any) -> Any:
    def wide(x: Any) -> Any:
        x = np.asarray(x)
        return x.astype(np.float64) if x.dtype.kind == "f" else x

    return jax.tree.map(wide, tree)


def answer(
    name: str,
    params: Any,
    state: Any,
    window: list[Any],
    update: int,
    devices: int = 1,
    rejected: int = K,
) -> Answer:
    """The token means of a window; devices have their own keys, and equal states.

    `rejected` is the number of a micro-batch that is rejected, and not in `window`.
    """
    with jax.enable_x64(True):
        params, state = float64((params, state))
        loss = tokens = 0.0
        gradient = jax.tree.map(np.zeros_like, params)
        for i, batch in enumerate(window):
            after = []
            for place, part in enumerate(helpers.cut(float64(batch), devices)):
                number = i + (i >= rejected)
                rng = jax.random.key_data(key_of(update, number, place, devices))
                own = {**state} if state else None
                (x, (n, new)), g = float64_loss(name)(params, part, rng, own)
                loss, tokens = loss + x, tokens + n
                gradient = jax.tree.map(np.add, gradient, g)
                after.append(new)
            state = jax.tree.map(lambda *x: np.mean(x, 0), *after)
        mean = jax.tree.map(lambda g: np.asarray(g / (tokens or 1)), gradient)
        if not tokens:
            mean = jax.tree.map(np.zeros_like, mean)
        return Answer(
            float(loss / tokens) if tokens else 0.0, float(tokens), mean, state
        )


# The gradient of a window, for tests of networks: in three ways, and by hand.


def batches_of(*tokens: int) -> list[Any]:
    return [batch_of(i, np.arange(ROWS) < n) for i, n in enumerate(tokens)]


BATCHES = batches_of(8, 0, 3)
# An optimizer whose state is the last gradient that it was given.
KEEPS = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda gradient, state, params: (jax.tree.map(jnp.zeros_like, params), gradient),
)


def value_and_grad(loss_fn: Any, params: Any, batches: Any) -> Any:
    return jax.jit(window_value_and_grad(loss_fn))(params, helpers.stack(batches))[1]


def train_step(loss_fn: Any, params: Any, batches: Any, **options: Any) -> Any:
    step = make_train_step(loss_fn, KEEPS, len(batches), **options)
    state, _ = helpers.run_step(step, step.init(params), batches)
    return state.opt_state.inner_opt_state


def window_step(loss_fn: Any, params: Any, batches: Any, **options: Any) -> Any:
    step = make_window_step(loss_fn, KEEPS, **options)
    state, _ = step(step.init(params), helpers.stack(batches))
    return state.opt_state.inner_opt_state


WAYS = [value_and_grad, train_step, window_step]


def by_hand(loss_fn: Any, params: Any, batches: Any) -> Any:
    """The gradient, of gradients that are added by NumPy, in float64."""

    def wide(gradient: Any, param: Any) -> Any:
        if not jnp.issubdtype(param.dtype, jnp.inexact):
            return np.zeros(param.shape)
        kind = np.complex128 if jnp.iscomplexobj(param) else np.float64
        return np.asarray(gradient).astype(kind)

    params = jax.device_get(params)
    f = jax.jit(jax.grad(loss_fn, has_aux=True, allow_int=True))
    tokens, sums = 0.0, jax.tree.map(lambda p: wide(0 * p, p), params)
    for batch in batches:
        new, n = f(params, batch)
        if np.isfinite(n) and n > 0:
            new = jax.tree.map(lambda p, g: wide(g, p), params, new)
            tokens, sums = tokens + float(n), jax.tree.map(np.add, sums, new)
    return jax.tree.map(lambda x, p: (x / (tokens or 1)).astype(p.dtype), sums, params)


def check_gradient(
    way: Any,
    loss_fn: Any,
    params: Any = None,
    batches: Any = BATCHES,
) -> None:
    """Errors are relative to the largest element of a leaf: small ones may cancel."""
    params = FEW if params is None else params
    got = way(loss_fn, params, batches)
    expected = by_hand(loss_fn, params, batches)
    chex.assert_tree_all_finite(expected)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, expected)
    scaled = [
        jax.tree.map(lambda x, of: x / (np.abs(of).max(initial=0) or 1), tree, expected)
        for tree in (got, expected)
    ]
    chex.assert_trees_all_close(*scaled, rtol=0, atol=1e-5)


# The ways to train.


def update(gradient: Any, state: Any, params: Any = None, **extra: Any) -> Any:
    value = jnp.asarray(extra.get("value", jnp.nan), jnp.float32)
    new = {
        "gradient": gradient,
        "given": jnp.stack([state["given"][0] + 1, extra["num_tokens"], value]),
        "factored": jax.tree.map(lambda g: jnp.mean(g, -1), gradient),
    }
    return jax.tree.map(lambda g: -RATE * g, gradient), new


def init(params: Any) -> Any:
    zeros = jax.tree.map(jnp.zeros_like, params)
    means = jax.tree.map(lambda g: jnp.mean(g, -1), zeros)
    return {"gradient": zeros, "given": jnp.zeros(3), "factored": means}


# SGD that keeps its last gradient, and how often it ran, on what tokens and value. A
# compiler would place its means, of the shape of no parameter, anywhere.
SPY = optax.GradientTransformationExtraArgs(init, update)


def loss_fn(problem: Problem, has_aux: bool = False) -> Any:
    """As users write it, a mean in between: 0/0 without tokens."""

    def returned(params: Any, batch: Any, rng: Any = None, state: Any = None) -> Any:
        f = problem.users or problem.loss
        loss_sum, n, aux, state = f(params, batch, rng, state)
        loss_sum = loss_sum if problem.real else loss_sum / n * n
        loss_sum = loss_sum * jnp.mean(batch["scale"])
        values = loss_sum, ((n, aux) if has_aux else n)
        return values if problem.state is None else (values, state)

    if problem.state is not None:
        return lambda params, state, batch: returned(params, batch, None, state)
    if problem.key:
        return lambda params, batch, rng: returned(params, batch, rng)
    return lambda params, batch: returned(params, batch)


STEPS = ["two programs", "one program", "window", "nnx two programs", "nnx window"]
LAYOUTS = [
    "1",
    "8",
    "8, explicit",
    "8, explicit, each",
    "8, each, spread",
    "4 x 2",  # parameters are spread over the other axis, as in tensor parallelism
    "8, no mesh",  # the step is not told of the devices
]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "skips": helpers.SKIPS,
    "kept": {"donate": False},
}


class Run(NamedTuple):
    """What training on all windows did: of each window, and of all calls."""

    name: str
    way: str
    layout: str
    option: str
    windows: list[list[Any]]  # without micro-batches that are rejected
    params: list[Any]  # before and after each window
    inner: list[Any]  # states of the inner optimizer, before and after
    states: list[Any] = []  # of the model
    so_far: Any = None  # `window_gradient` before the last call of the first window
    metrics: list[Any] = []  # of each call, in a list for each window
    sums: list[Any] = []  # between windows
    compilations: list[int] = []  # in each window
    deleted: list[set[bool]] = []  # old parameters and states, by each window
    placements: tuple[Any, Any] = (None, None)
    given: Any = None  # parameters of the caller

    @property
    def devices(self) -> int:
        """That see their own rows."""
        return {"8": 8, "8, explicit": 8, "4 x 2": 4}.get(self.layout, 1)

    def answer(self, i: int, calls: int = K) -> Answer:
        updates = sum(any(x) for x in WINDOWS[:i])
        state = self.states[i] if self.states else None
        return answer(
            self.name,
            self.params[i],
            state,
            self.windows[i][:calls],
            updates,
            self.devices,
            i % K if self.option == "skips" else K,
        )


def fold_in(key: jax.Array, *numbers: int) -> jax.Array:
    """As the library does, after a number of its own: no `split` returns such keys."""
    return functools.reduce(jax.random.fold_in, (0x746F6B6E, *numbers), key)


def key_of(update: int, number: int, place: int, devices: int) -> jax.Array:
    key = fold_in(jax.random.wrap_key_data(KEY), update, number)
    return fold_in(key, place) if devices > 1 else key


def drawn(key: jax.Array, rows: int) -> np.ndarray:
    """What the loss of keys draws for a micro-batch of one device."""
    return np.asarray(jax.random.bits(key, (rows, FEATURES), "uint32") % 2)


def over(layout: str) -> tuple[Any, str, dict[str, Any]]:
    """The mesh, the axis that parameters are spread over, and the step's options."""
    if layout == "4 x 2":
        mesh = meshes.make_mesh((4, 2), "auto explicit")
        return mesh, "model", {"mesh": mesh, "data_axes": "data"}
    if layout == "8, no mesh":
        return meshes.make_mesh((8,)), "", {"mesh": None, "data_axes": None}
    options = {"mesh": None, "data_axes": None}
    options |= meshes.over(layout.removesuffix(", spread"))
    return options["mesh"], "data" if "spread" in layout else "", options


def placed(params: Any, mesh: Any, axis: str) -> Any:
    """Spread over the axis of a mesh, or everywhere on it."""

    def put(x: np.ndarray) -> jax.Array:
        first = next(i for i, n in enumerate(x.shape) if n % 8 == 0)
        spec = P(*[None] * first, axis) if axis else P()
        return jax.device_put(x, NamedSharding(mesh, spec))

    return jax.tree.map(put if mesh else jnp.asarray, params)


def host(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.array(x), tree)


def inner_of(state: Any) -> Any:
    return getattr(state.opt_state, "inner_opt_state", state.opt_state)


def parts_of(state: Any) -> tuple[Any, Any, Any]:
    return state.params, state.opt_state, getattr(state, "model_state", ())


@functools.cache
def of_step(name: str, way: str, layout: str, option: str) -> Run:
    problem, (mesh, axis, options) = PROBLEMS[name], over(layout)
    options |= OPTIONS[option] | {"has_aux": problem.key}
    options |= {"has_model_state": True} if problem.state else {}
    options |= {"loss_fn": loss_fn(problem, problem.key), "k": K}
    step = meshes.make_step(way, SPY, **options)
    given = placed(problem.params, mesh, axis)
    model_state = (jax.tree.map(jnp.asarray, problem.state),) if problem.state else ()
    state = step.init(given, *model_state)
    windows = windows_of(problem)
    raw = jnp.asarray(KEY)  # as `jax.random.PRNGKey` makes it
    key = raw if option == "kept" else jax.random.wrap_key_data(raw)
    kwargs = {"rng": key} if problem.key else {}
    params, inner = [host(state.params)], [host(inner_of(state))]
    states, metrics, sums, deleted = [*map(host, model_state)], [], [], []
    compiled, so_far = [], None
    before = jax.tree.map(lambda x: x.sharding, parts_of(state))
    for i, window in enumerate(windows):
        if option == "skips":
            window = [*window[: i % K], bad(windows[0][0]), *window[i % K :]]
        params_before, _, states_before = parts_of(state)
        old, found = jax.tree.leaves((params_before, states_before)), []
        calls, number = [helpers.stack(window)] if "window" in way else window, 0
        if layout == "8, no mesh":
            rows = NamedSharding(mesh, P(*[None] * ("window" in way), "data"))
            calls = jax.device_put(calls, rows)
        for j, batch in enumerate(calls):
            if i == 0 and j == len(window) - 1:
                so_far = host(window_gradient(state.opt_state, state.params))
            with helpers.count_compilations() as compilations:
                state, m = step(state, batch, **kwargs)
            number += len(compilations)
            found.append(m)
        compiled.append(number)
        deleted.append({x.is_deleted() for x in old})
        params.append(host(state.params))
        inner.append(host(inner_of(state)))
        metrics.append(host(found))
        sums.append(host(getattr(state.opt_state, "grad_sums", ())))
        if problem.state:
            states.append(host(state.model_state))
    after = jax.tree.map(lambda x: x.sharding, parts_of(state))
    return Run(
        name,
        way,
        layout,
        option,
        windows,
        params,
        inner,
        states,
        so_far,
        metrics,
        sums,
        compiled,
        deleted,
        (before, after),
        given,
    )


def mean_fn(problem: Problem) -> Any:
    def mean(params: Any, batch: Any) -> Any:
        loss_sum, n = loss_fn(problem)(params, batch)
        return loss_sum / n, n

    return mean


def by_transformation(problem: Problem) -> Any:
    tx = optax.chain(optax.identity(), token_accumulation(SPY, K))
    return by_update(tx, loss_fn(problem))


def by_multi_steps(problem: Problem) -> Any:
    return by_update(MultiSteps(SPY, K), mean_fn(problem))


def by_update(tx: Any, f: Any) -> Any:
    def micro_step(carry: Any, batch: Any) -> Any:
        params, state = carry
        (value, n), g = jax.value_and_grad(f, has_aux=True)(params, batch)
        updates, state = tx.update(g, state, params, num_tokens=n, value=value)
        return optax.apply_updates(params, updates), state

    step = jax.jit(micro_step, donate_argnums=0)

    def run(carry: Any, window: list[Any]) -> Any:
        for batch in window:
            carry = step(carry, batch)
        return carry

    def part(name: str) -> Any:
        return lambda state: optax.tree.get(state, name)

    return tx.init, run, part("inner_opt_state"), part("grad_sums")


def by_linen(problem: Problem) -> Any:
    def micro_step(carry: Any, batch: Any) -> Any:
        params, opt_state = carry
        made = linen.TrainState.create(apply_fn=None, params=params, tx=tx)
        made = made.replace(opt_state=opt_state)
        (value, n), g = jax.value_and_grad(f, has_aux=True)(params, batch)
        made = made.apply_gradients(grads=g, num_tokens=n, value=value)
        return made.params, made.opt_state

    tx, f = token_accumulation(SPY, K), loss_fn(problem)
    init, _, inner, sums = by_update(tx, f)
    step = jax.jit(micro_step)
    return init, lambda carry, x: functools.reduce(step, x, carry), inner, sums


def by_function(value_and_grad: Any) -> Any:
    """A window's function of parameters and micro-batches, and an update of our own."""

    def step(carry: Any, window: Any) -> Any:
        params, state = carry
        (loss, (n, _)), g = value_and_grad(params, window)
        updates, new = SPY.update(g, state, params, value=loss, num_tokens=n)
        new = optax.apply_updates(params, updates), new
        return jax.tree.map(lambda x, y: jnp.where(n > 0, x, y), new, carry)

    jitted = jax.jit(step)

    def run(carry: Any, window: list[Any]) -> Any:
        return jitted(carry, helpers.stack(window))

    return SPY.init, run, lambda state: state, lambda state: ()


def by_loss(problem: Problem) -> Any:
    return by_function(window_value_and_grad(loss_fn(problem)))


def by_gradients(problem: Problem) -> Any:
    f = jax.value_and_grad(loss_fn(problem), has_aux=True)
    return by_function(accumulate_over_window(f))


def by_means(problem: Problem) -> Any:
    f = jax.value_and_grad(mean_fn(problem), has_aux=True)
    return by_function(accumulate_over_window(f, gradients="mean"))


def by_model(problem: Problem) -> Any:
    def of_model(model: Any, batch: Any) -> Any:
        return loss_fn(problem)(model.params(), batch)

    f = nnx_steps.window_value_and_grad(of_model)

    def value_and_grad(params: Any, window: Any) -> Any:
        model = nnx_ways.Holder(params)
        values, g = f(model, window)
        return values, model.structure.unflatten(jax.tree.leaves(g))

    return by_function(value_and_grad)


def by_summaries(problem: Problem) -> Any:
    """The token mean as a loss of sums and counts; a sum is finite without tokens."""

    def summary(params: Any, batch: Any) -> Any:
        loss_sum, n, _, _ = problem.loss(params, batch, None, None)
        return loss_sum, jnp.asarray(n, jnp.float32)

    def mean(summaries: Any) -> Any:
        loss_sum, n = (x.sum() for x in summaries)
        return loss_sum / jnp.where(n > 0, n, 1) * (n > 0), (n, None)

    f = coupled_value_and_grad(summary, mean, has_aux=True)
    return by_function(f)


def by_shard_map(problem: Problem) -> Any:
    """Devices of the caller's own; the loss and the count are reduced."""

    def reduced(params: Any, batch: Any) -> Any:
        loss_sum, n, _, _ = problem.loss(params, batch, None, None)
        return jax.lax.psum(loss_sum, "data"), jax.lax.psum(n, "data")

    def value_and_grad(params: Any, window: Any) -> Any:
        specs = {"in_specs": (P(), P(None, "data")), "out_specs": P()}
        mesh = meshes.make_mesh((8,))
        return jax.shard_map(f, mesh=mesh, **specs)(params, window)

    f = window_value_and_grad(reduced)
    return by_function(value_and_grad)


LOOPS: dict[str, Any] = {
    "transformation": by_transformation,
    "MultiSteps": by_multi_steps,
    "linen": by_linen,
    "function of the loss": by_loss,
    "function of gradients": by_gradients,
    "function of means": by_means,
    "function of a model": by_model,
    "function of summaries": by_summaries,
    "shard_map": by_shard_map,
}


@functools.cache
def of_loop(name: str, way: str) -> Run:
    problem = PROBLEMS[name]
    init, run, inner_of, sums_of = LOOPS[way](problem)
    params = jax.tree.map(jnp.asarray, problem.params)
    carry, windows = (params, init(params)), windows_of(problem)
    after, inner, sums = [host(params)], [host(inner_of(carry[1]))], []
    so_far = None
    if way in ("transformation", "MultiSteps", "linen"):
        _, opened = run(jax.tree.map(jnp.copy, carry), windows[0][:-1])
        so_far = host(jax.jit(window_gradient)(opened))
    for window in windows:
        carry = run(carry, window)
        after.append(host(carry[0]))
        inner.append(host(inner_of(carry[1])))
        sums.append(host(sums_of(carry[1])))
    given = {"so_far": so_far, "sums": sums}
    return Run(name, way, "1", "plain", windows, after, inner, **given)


def is_possible(name: str, way: str, layout: str, option: str) -> bool:
    """Of the loss of keys, all that is left without them is "whole"."""
    return name != "whole" and not (name == "state" and way in nnx_ways.WAYS)


ALL = [*itertools.product(PROBLEMS, STEPS, LAYOUTS, OPTIONS)]
ALL = [x for x in ALL if is_possible(*x)]


def cover(cases: list[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Few cases, in which every pair of values occurs that occurs in any case."""
    pairs = {x: {*itertools.combinations(enumerate(x), 2)} for x in cases}
    missing = set().union(*pairs.values())
    while missing:
        case = max(cases, key=lambda x: len(pairs[x] & missing))
        missing -= pairs[case]
        yield case
