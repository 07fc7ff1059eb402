"""Steps so small that the host takes most of their time, and k = 1."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import optax_tokenaccum.nnx
from benchmarks.measure import interleaved, ratios, say
from benchmarks.report import Rows
from benchmarks.speed import run_one
from benchmarks.ways import ADAMW, WAYS, Loop, Way, apply, mean_like, one_program
from benchmarks.workloads import Workload, square_layers, tiny, window_of
from optax_tokenaccum import make_train_step, make_window_step, token_accumulation

SMALL = "optax.MultiSteps", "MultiSteps", "train step", "window step"
WIDTH, BLOCKS, K = 8, 28, 4


def run(quick: bool) -> Rows:
    """Returns a row for every model and way, over the first way of the model."""
    say("host: small arrays")
    ways = {name: WAYS[name] for name in SMALL}
    rows = timed("small arrays", tiny(), ways, 2 if quick else 8, 1 if quick else 50)
    say("host: NNX")
    rows += nnx_rows(quick)
    say("host: windows of one micro-batch")
    ways = {name: WAYS[name] for name in ("optax.MultiSteps", "train step")}
    ways = {"plain step": Way(plain_step)} | ways
    workload = tiny() if quick else square_layers()
    return rows + timed("k = 1", workload, ways, 1, 1)


def timed(
    model: str, workload: Workload, ways: dict[str, Way], k: int, windows: int
) -> Rows:
    window = window_of(workload, k)
    loops = {name: way.build(workload, ADAMW, k) for name, way in ways.items()}
    states = {name: loop.init(workload.params) for name, loop in loops.items()}

    def run(name: str) -> Any:
        for _ in range(windows):
            run_one(loops, states, window, name)
        return states[name]

    return over_first(model, k, {name: partial(run, name) for name in loops})


def over_first(model: str, k: int, runs: dict[str, Callable[[], Any]]) -> Rows:
    over = ratios(interleaved(runs, rounds=21, seconds=20), next(iter(runs)))
    return [{"model": model, "k": k, "way": x, "time": over[x]} for x in over]


def plain_step(workload: Workload, inner: optax.GradientTransformation, k: int) -> Loop:
    """Without accumulation: the gradient of a micro-batch, and an update."""

    def step(params: Any, opt_state: Any, batch: Any, frozen: Any) -> Any:
        differentiate = jax.value_and_grad(workload.loss_fn, has_aux=True)
        (loss_sum, n), gradient = differentiate(params, batch, frozen)
        gradient = mean_like(params, (loss_sum, n, gradient))
        # Its norm and the loss are logged, as a step's are.
        logged = loss_sum / n, optax.tree.norm(gradient)
        return *apply(inner, params, opt_state, gradient), logged

    return one_program(workload, inner.init, step, "micro_batches")


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.down = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.down(nnx.relu(self.up(self.norm(x))))


def new_model() -> nnx.Module:
    rngs = nnx.Rngs(0)
    blocks = [Block(rngs) for _ in range(BLOCKS)]
    return nnx.Sequential(*blocks, nnx.Linear(WIDTH, WIDTH, rngs=rngs))


def nnx_rows(quick: bool) -> Rows:
    """Steps for an NNX model of 170 parameters, over the core's for the same."""
    graphdef, params = nnx.split(new_model())
    x = jnp.ones((2, WIDTH))

    def of_model(model: Any, x: Any) -> Any:
        return jnp.sum(model(x) ** 2), jnp.float32(x.shape[0])

    def of_params(params: Any, x: Any) -> Any:
        return of_model(nnx.merge(graphdef, params), x)

    @nnx.jit
    def optax_step(model: Any, optimizer: nnx.Optimizer, x: Any) -> None:
        gradient = nnx.grad(lambda m, x: of_model(m, x)[0] / len(x))(model, x)
        optimizer.update(model, gradient)

    def core(step: Any, batch: Any) -> Callable[[], Any]:
        states = [step.init(params)]

        def run() -> Any:
            for _ in range(1 if quick else 2 * K):
                states[0], _ = step(states[0], batch)
            return states[0].params

        return run

    def of_nnx(
        step: Any, tx: optax.GradientTransformation, x: Any
    ) -> Callable[[], Any]:
        model = new_model()
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        def run() -> Any:
            for _ in range(1 if quick else 2 * K):
                step(model, optimizer, x)
            return optimizer.step.get_raw_value()

        return run

    accumulating = token_accumulation(ADAMW, K)
    optax_steps: Any = optax.MultiSteps(ADAMW, K)
    train = {
        "train step": core(make_train_step(of_params, ADAMW, K), x),
        "nnx train step": of_nnx(
            optax_tokenaccum.nnx.make_train_step(of_model), accumulating, x
        ),
        "nnx.jit, optax.MultiSteps": of_nnx(optax_step, optax_steps, x),
    }
    window = jnp.stack([x] * K)
    whole = {
        "window step": core(make_window_step(of_params, ADAMW), window),
        "nnx window step": of_nnx(
            optax_tokenaccum.nnx.make_window_step(of_model), ADAMW, window
        ),
    }
    return [row for runs in (train, whole) for row in over_first("NNX", K, runs)]
