"""Every optax optimizer: bare on full batches, and wrapped on ragged micro-batches.

Gradients, counts and losses are chosen so that every sum and mean over a window is
exact in float32: the wrapped optimizer must receive the same bits as the bare one.
"""

import inspect
import operator
import warnings
from collections.abc import Callable
from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from optax_tokenaccum import make_train_step, token_accumulation

pytestmark = pytest.mark.slow

# These do without the gradient of a window: the first two clip the gradient of each
# example, and the third estimates a Hessian from an objective.
LEFT_OUT = (
    "contrib.differentially_private_aggregate",
    "contrib.dpsgd",
    "contrib.sophia",
)

# Arguments without a default, or whose default leaves part of the optimizer unused.
ARGUMENTS: dict[str, dict[str, Any]] = {
    # By default only matrices of 128 rows and columns are factored.
    "adafactor": {"learning_rate": 0.1, "min_dim_size_to_factor": 2},
    # A line search needs the objective.
    "lbfgs": {"learning_rate": 0.1, "linesearch": None},
    # Without a key it warns that one will be required.
    "noisy_sgd": {"learning_rate": 0.1, "key": 0},
    # The default rank of 128 exceeds the matrix.
    "contrib.galore": {"learning_rate": 0.1, "rank": 2},
    # The default first step of 1e-6 is lost next to bfloat16 parameters.
    "contrib.mechanize": {"base_optimizer": optax.adamw(0.1), "s_init": 0.1},
    # By default a plateau takes 10 windows.
    "contrib.reduce_on_plateau": {"patience": 1},
    # Wrappers of another optimizer.
    "contrib.sam": {
        "optimizer": optax.sgd(0.1),
        "adv_optimizer": optax.chain(contrib.normalize(), optax.sgd(0.1)),
    },
    "contrib.schedule_free": {"base_optimizer": optax.sgd(0.1), "learning_rate": 0.1},
    "contrib.split_real_and_imaginary": {"inner": optax.adam(0.1)},
}

# Dtypes of the matrix and of the vector; and where optax's own code fails on float32
# next to bfloat16, because it clamps a value of one between bounds of the other.
MIXED, SAME = ("float32", "bfloat16"), ("float32", "float32")
OF_ONE_DTYPE = ("contrib.mechanize",)

# Their updates are small differences of large numbers, or come from an iteration that
# amplifies the rounding of its input 100 times.
ENLARGE_ROUNDING = ("contrib.muon", "contrib.schedule_free")


def find_optimizers() -> dict[str, Callable[..., Any]]:
    """Return factories by name, sorted, so that a new one in optax is found.

    Factories are all public functions with a learning rate, and in `optax.contrib` all
    that make a transformation. `scale_by_*` are only the parts of these.
    """
    found = {}
    for module, prefix in ((optax, ""), (contrib, "contrib.")):
        for name, factory in sorted(inspect.getmembers(module, inspect.isfunction)):
            signature = inspect.signature(factory)
            makes_one = any(p.endswith("learning_rate") for p in signature.parameters)
            if module is contrib:
                makes_one |= "GradientTransformation" in str(
                    signature.return_annotation
                )
            if makes_one and not name.startswith(("_", "scale_by_")):
                found[prefix + name] = factory
    return found


OPTIMIZERS = find_optimizers()
assert set(OPTIMIZERS) >= {*ARGUMENTS, *OF_ONE_DTYPE, *LEFT_OUT}
assert len(OPTIMIZERS) > 50


def make_optimizer(name: str) -> optax.GradientTransformationExtraArgs:
    """Make the optimizer with `ARGUMENTS`, or with a learning rate of 0.1."""
    parameters = inspect.signature(OPTIMIZERS[name]).parameters
    required = {n for n, p in parameters.items() if p.default is p.empty}
    arguments = ARGUMENTS.get(name, {n: 0.1 for n in required & {"learning_rate"}})
    with warnings.catch_warnings():
        # Deprecated optimizers are tested until optax removes them.
        warnings.simplefilter("ignore", DeprecationWarning)
        optimizer = OPTIMIZERS[name](**arguments)
    if name == "contrib.sam":
        # It claims to take extra arguments, but raises on `value`.
        optimizer = optax.GradientTransformation(*optimizer)
    return optax.with_extra_args_support(optimizer)


# Four windows of three micro-batches. The sum of their counts is a power of two, so
# that means over tokens are exact in float32; the mean losses are 4, 7, 3.25 and 5.
COUNTS = np.float32([[1, 2, 5], [8, 3, 5], [1, 30, 1], [2, 1, 1]])
LOSS_SUMS = np.float32([[8, 16, 8], [4, 64, 44], [8, 64, 32], [16, 2, 2]])
K = COUNTS.shape[1]
SHAPES = {"matrix": (8, 3), "vector": (3,)}


def eighths(seed: int, *axes: int) -> dict[str, np.ndarray]:
    """Nonzero 8-bit multiples of 1/8, exact in bfloat16; their sums are not."""
    rng = np.random.default_rng(seed)

    def drawn(shape: tuple[int, ...]) -> np.ndarray:
        size = *axes, *shape
        return np.float32(rng.integers(8, 253, size) * rng.choice([-1, 1], size) / 8)

    return {name: drawn(shape) for name, shape in SHAPES.items()}


def token_mean(sums: np.ndarray) -> np.ndarray:
    """Return the mean of each window over the tokens of its micro-batches."""
    return (sums.sum(1).T / COUNTS.sum(1)).T


GRADS = eighths(0, *COUNTS.shape)
MICRO_BATCHES = {"grads": GRADS, "value": LOSS_SUMS, "num_tokens": COUNTS}
MEANS = {
    "grads": {name: token_mean(g) for name, g in GRADS.items()},
    "value": token_mean(LOSS_SUMS),
}


for name, g in GRADS.items():
    naive = np.mean((g.T / COUNTS.T).T, axis=1)
    assert helpers.relative_error(naive, MEANS["grads"][name]) > 0.05


def at(where: Any, tree: dict[str, Any], dtypes: tuple[str, str]) -> dict[str, Any]:
    """One window or micro-batch, its gradients in the dtypes of the parameters."""
    found = jax.tree.map(operator.itemgetter(where), tree)
    return found | {"grads": cast(found["grads"], dtypes)}


def cast(tree: dict[str, Any], dtypes: tuple[str, str]) -> dict[str, np.ndarray]:
    pairs = zip(tree.items(), dtypes, strict=True)
    return {name: np.asarray(x, jnp.dtype(dtype)) for (name, x), dtype in pairs}


def loss_fn(params: Any, batch: Any) -> Any:
    zeros = jax.tree.map(
        lambda p: (p - jax.lax.stop_gradient(p)).astype(jnp.float32), params
    )
    return batch["value"] + optax.tree.vdot(batch["grads"], zeros), batch["num_tokens"]


# The program of a micro-batch knows no optimizer: one step accumulates for all.
ACCUMULATE = make_train_step(loss_fn, optax.identity()).accumulate


def watched(inner: Any, calls: list[Any]) -> optax.GradientTransformationExtraArgs:
    """Return `inner` with a callback that records each value and gradient it gets."""

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        given = {"grads": updates, "value": extra["value"]}
        jax.debug.callback(lambda given: calls.append(jax.device_get(given)), given)
        return inner.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def assert_close(got: Any, expected: Any, beside: Any = None) -> None:
    """Compare leaves: equal dtypes and integers, floats within `helpers.RTOL`.

    Errors are relative to `beside` if given, for example to the parameters that
    updates are added to.
    """

    def compare(x: Any, y: Any, z: Any) -> None:
        assert x.dtype == y.dtype
        if not jnp.issubdtype(x.dtype, jnp.floating):
            chex.assert_trees_all_equal(*map(optax.tree.unwrap_random_key_data, (x, y)))
            return
        x64, y64, z64 = (np.asarray(a, np.float64) for a in (x, y, z))
        # Equal infinities agree, like an initial best loss.
        error = np.subtract(x64, y64, out=np.zeros_like(y64), where=x64 != y64)
        norm = np.linalg.norm(z64[np.isfinite(z64)])
        assert np.linalg.norm(error) <= helpers.RTOL[str(x.dtype)] * norm

    jax.tree.map(compare, got, expected, expected if beside is None else beside)


@pytest.mark.parametrize("name", [x for x in OPTIMIZERS if x not in LEFT_OUT])
def test_wrapped_is_bare_on_the_full_batch(name: str):
    inner, calls, of_step = make_optimizer(name), [], []
    optimizer = token_accumulation(watched(inner, calls), K)
    bare, wrapped = jax.jit(inner.update), jax.jit(optimizer.update)
    step = make_train_step(loss_fn, watched(inner, of_step))
    dtypes = SAME if name in OF_ONE_DTYPE else MIXED
    small = jax.tree.map(lambda x: x / 16, eighths(1))
    params = jax.tree.map(jnp.asarray, cast(small, dtypes))
    state, step_state = optimizer.init(params), step.init(params)
    before, moved = helpers.signatures(state), set()
    for w in range(len(COUNTS)):
        window, inner_state = at(w, MEANS, dtypes), state.inner_opt_state
        expected, after = bare(
            window["grads"], inner_state, params, value=window["value"]
        )
        for i in range(K):
            batch = at((w, i), MICRO_BATCHES, dtypes)
            step_state, _ = ACCUMULATE(step_state, batch)
            updates, state = wrapped(batch.pop("grads"), state, params, **batch)
            assert helpers.signatures(state) == before
            assert i == K - 1 or not any(u.any() for u in updates.values())
        step_state, metrics = step.close_window(step_state)
        enlarged = name.startswith(ENLARGE_ROUNDING)
        assert_close(updates, expected, params if enlarged else None)
        # Some optimizers return dtypes that differ from those of `init`.
        after = jax.tree.map(lambda x, y: jnp.asarray(x, y.dtype), after, inner_state)
        assert_close(state.inner_opt_state, after)
        moved |= {name for name, update in updates.items() if update.any()}
        params = optax.apply_updates(params, updates)
        jax.effects_barrier()
        for received in (calls, of_step):
            # The inner optimizer ran once, on the exact means.
            chex.assert_trees_all_equal(received.pop(), window)
            assert not received
    chex.assert_tree_all_finite(params)
    assert moved == {*SHAPES}
    assert float(metrics.loss) == MEANS["value"][-1]
    step_inner = step_state.opt_state.inner_opt_state
    assert_close((step_state.params, step_inner), (params, state.inner_opt_state))
