"""Trains by several methods in lockstep and measures how far they end up apart.

Every method trains on a window before the next window begins. The distance to the
reference is therefore measured after every update without storing old parameters, and
other work on the machine slows all methods alike.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import optax
from batches import PAD, Batch, Window
from methods import METHODS, Loop, Programs, loss_fn
from planned import PLANNED
from transformer import Params


@dataclass
class Run:
    """One method's training and what was measured.

    Attributes:
      method: its name in `METHODS` or `PLANNED`.
      loop: the training loop, a generator that stops after every update.
      params: the trained parameters after the last update.
      distances: relative L2 distances to the reference's parameters, one per update.
      validation_losses: number of updates done -> mean loss per validation token.
      train_loss: mean loss per training token, over the whole split, at the end.
      seconds: the total time of the windows that compiled nothing.
      tokens: the real tokens in those windows.
      memory: program -> temporary + output - aliased bytes; None where unknown.
    """

    method: str
    loop: Loop
    params: Params = field(default_factory=dict)
    distances: list[float] = field(default_factory=list)
    validation_losses: dict[int, float] = field(default_factory=dict)
    train_loss: float = float("nan")
    seconds: float = 0.0
    tokens: int = 0
    memory: dict[str, int | None] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float | None:
        """Real tokens per second; None if every window compiled something."""
        return self.tokens / self.seconds if self.seconds else None

    @property
    def validation_loss(self) -> float:
        """The mean loss per validation token at the end."""
        return self.validation_losses[max(self.validation_losses)]


def compare(
    methods: list[str],
    params: Params,
    frozen: Params,
    windows: list[Window],
    inner: optax.GradientTransformation,
    accumulation_steps: int,
    *,
    train: list[Batch],
    validation: list[Batch],
    say: Callable[[str], None],
    after_update: Callable[[], None],
) -> list[Run]:
    """Trains the same model on the same windows with each method.

    Args:
      methods: names in `METHODS` or `PLANNED`, the reference first.
      params: the parameters to train; every method gets a copy, since it donates them.
      frozen: the parameters that are not trained.
      windows: one per update.
      inner: the optimizer.
      accumulation_steps: micro-batches in a window.
      train: the training split, for its final loss.
      validation: the validation split; its loss is measured at about 20 updates.
      say: called with a description of the next activity.
      after_update: called after each update of each run.

    Returns:
      The finished runs.
    """
    runs = []
    for name in methods:
        own = jax.tree.map(jnp.copy, params)
        loop = (METHODS | PLANNED)[name](
            own, frozen, windows, inner, accumulation_steps
        )
        runs.append(Run(name, loop))
    reference = runs[0]
    shapes_compiled = set()
    evaluate_every = -(-len(windows) // 20)
    for update, window in enumerate(windows, start=1):
        shapes = {batch.inputs.shape for batch in [window.whole, *window.micro_batches]}
        compiles = not shapes <= shapes_compiled
        shapes_compiled |= shapes
        for run in runs:
            say(f"{'compiling' if compiles else 'training'}: {run.method}")
            start = time.perf_counter()
            run.params = jax.block_until_ready(next(run.loop))
            if not compiles:
                run.seconds += time.perf_counter() - start
                run.tokens += int((window.whole.inputs != PAD).sum())
            run.distances.append(float(_distance(run.params, reference.params)))
            if update % evaluate_every == 0 or update == len(windows):
                run.validation_losses[update] = mean_loss(
                    run.params, frozen, validation
                )
            after_update()
    for run in runs:
        say(f"measuring: {run.method}")
        run.train_loss = mean_loss(run.params, frozen, train)
        run.memory = {
            name: _memory(program) for name, program in _finish(run.loop).items()
        }
    return runs


def mean_loss(params: Params, frozen: Params, batches: list[Batch]) -> float:
    """The sum of the losses divided by the number of tokens, over all batches."""
    sums = [_loss_and_count(params, batch, frozen) for batch in batches]
    loss_sums, counts = zip(*sums, strict=True)
    return float(sum(loss_sums) / sum(counts))


_loss_and_count = jax.jit(loss_fn)


@jax.jit
def _distance(params: Params, reference: Params) -> jax.Array:
    """The L2 norm of the difference, divided by the L2 norm of the reference."""
    difference = jax.tree.map(jnp.subtract, params, reference)
    return optax.tree.norm(difference) / optax.tree.norm(reference)


def _finish(loop: Loop) -> Programs:
    """Ends a loop after its last window, and returns its programs."""
    try:
        next(loop)
    except StopIteration as stop:
        return stop.value
    raise RuntimeError("the loop must end after its last window, but it continued")


def _memory(program: jax.stages.Lowered) -> int | None:
    """Temporary + output - aliased bytes: memory in addition to the arguments."""
    memory = program.compile().memory_analysis()
    if memory is None:
        return None
    return (
        memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )
