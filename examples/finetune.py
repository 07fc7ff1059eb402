"""Fine-tunes a small transformer on dialogue with accumulated gradients, five ways.

    python examples/finetune.py

Each method trains the same model on the same micro-batches, and the program reports how
far each one ends from training on whole windows. Prompts are masked and answers have
any length, so micro-batches hold different numbers of loss tokens, and their means must
not be averaged. Text is bytes and the parameters start at random: the example shows the
arithmetic of training and does not make a good model. It takes one to two minutes on
two CPU cores, and ends with a picture of losses and distances.

`--checkpoint-dir DIRECTORY --save-every 50` trains a single run instead. The run can be
killed at any moment, and the same command resumes it without changing the result; with
more `--updates`, it continues a run that is complete.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import data
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from data import Batch, Window
from model import Params, init, loss_fn, mean_loss_fn
from report import write_pictures
from tqdm import tqdm

import optax_tokenaccum
from optax_tokenaccum import StepMetrics, StepState, make_train_step, make_window_step

OPTIMIZER = optax.adamw(3e-3)
ROWS = 2  # dialogues in a micro-batch


class Method(NamedTuple):
    """How to train on windows. No call waits for the device."""

    init: Callable[[Params], StepState]
    step: Callable[[StepState, Batch], tuple[StepState, Any]]  # donates the state
    batches: str  # the attribute of `Window` with those for calls of `step`


def loop_of(optimizer: Any, batches: str, passes_count: bool = False) -> Method:
    """A loop of your own: a mean gradient, and an optimizer that is called with it."""

    @partial(jax.jit, donate_argnums=0)
    def step(state: StepState, batch: Batch) -> tuple[StepState, Any]:
        params, opt_state = state.params, state.opt_state
        value_and_grad = jax.value_and_grad(mean_loss_fn, has_aux=True)
        (loss, n), grads = value_and_grad(params, batch)
        count = {"num_tokens": n} if passes_count else {}
        updates, opt_state = optimizer.update(grads, opt_state, params, **count)
        return StepState(optax.apply_updates(params, updates), opt_state), (loss, n)

    def init(params: Params) -> StepState:
        return StepState(params, optimizer.init(params))

    return Method(init, step, batches)


def five_methods(k: int) -> dict[str, Method]:
    """Trains on windows of `k` micro-batches. The reference comes first."""
    inner, parts = OPTIMIZER, "micro_batches"
    step = make_train_step(loss_fn, inner, k)
    window_step = make_window_step(loss_fn, inner)
    return {
        "full-batch": loop_of(inner, "whole"),
        "optax.MultiSteps": loop_of(optax.MultiSteps(inner, k), parts),
        "MultiSteps": loop_of(optax_tokenaccum.MultiSteps(inner, k), parts, True),
        "make_train_step": Method(step.init, step, parts),
        # Pads all micro-batches to the window's longest sequence, since one array has
        # them. In return, no sums are kept between calls.
        "make_window_step": Method(window_step.init, window_step, "stacked"),
    }


def compare(
    params: Params,
    methods: dict[str, Method],
    windows: list[Window],
    held_out: list[Batch],
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Trains with each method, and prints how far each one ends from the first.

    Returns the losses of the windows, and the distances, by method.
    """
    print(f"{len(methods)} runs of {len(windows)} updates, a line as each one ends")
    head = "method", "distance", "validation loss", "difference"
    print("{:20}{:>12}{:>18}{:>12}".format(*head), flush=True)
    reference, losses, distances = None, {}, {}
    for name, method in methods.items():
        state, losses[name] = method.init(jax.tree.map(jnp.copy, params)), []
        for window in tqdm(windows, name, leave=False, disable=None, unit="update"):
            results = []
            for batch in getattr(window, method.batches):
                state, result = method.step(state, batch)
                results.append(result)
            losses[name].append(window_loss(results))  # waits for the device
        loss = mean_loss(state.params, held_out)
        far = by = "reference"
        if reference is None:
            reference = state.params, loss
        else:
            distances[name] = float(distance(state.params, reference[0]))
            far, by = f"{distances[name]:.1e}", f"{loss - reference[1]:+.1e}"
        print(f"{name:20}{far:>12}{loss:>18.4f}{by:>12}", flush=True)
    return losses, distances


def window_loss(results: list[Any]) -> float:
    """The token mean of a window, from what the calls of a method returned."""
    if isinstance(results[-1], StepMetrics):
        return float(results[-1].loss)
    losses, counts = zip(*results, strict=True)
    return float(np.average(np.asarray(losses), weights=np.asarray(counts)))


def mean_loss(params: Params, batches: list[Batch]) -> float:
    """The sum of the losses divided by the number of tokens, over all batches."""
    loss_and_count = jax.jit(loss_fn)
    sums = [loss_and_count(params, batch) for batch in batches]
    loss_sums, counts = zip(*sums, strict=True)
    return float(sum(loss_sums) / sum(counts))


@jax.jit
def distance(params: Params, reference: Params) -> jax.Array:
    """The L2 norm of the difference, divided by the L2 norm of the reference."""
    difference = jax.tree.map(jnp.subtract, params, reference)
    return optax.tree.norm(difference) / optax.tree.norm(reference)


def train_one_run(
    options: argparse.Namespace, params: Params, micro_batches: list[Batch]
) -> None:
    """Trains with `make_train_step`, from the last checkpoint if there is one.

    A run that was killed ends bit for bit like one that was not: a checkpoint is
    complete or absent, and holds the whole state with the sums of the open window; its
    number is the place in the data, which depend on the settings alone; and the
    arithmetic is the same on the same device and versions (on a GPU, with
    `XLA_FLAGS=--xla_gpu_deterministic_ops=true`).
    """
    k, total = options.gradient_accumulation_steps, len(micro_batches)
    step = make_train_step(loss_fn, OPTIMIZER, k)
    settings = {"k": k, "seed": options.seed}
    directory = options.checkpoint_dir.absolute()
    keep = ocp.CheckpointManagerOptions(max_to_keep=3)
    with ocp.CheckpointManager(directory, options=keep) as manager:
        state, start = step.init(params), manager.latest_step() or 0
        if start:
            one = ocp.args.Composite(settings=ocp.args.JsonRestore())
            found = manager.restore(start, args=one)
            if found["settings"] != settings:
                sys.exit(
                    f"error: the run in {directory} has {found['settings']}. Give the "
                    f"same options, or a different directory for {settings}"
                )
            other = ocp.args.Composite(state=ocp.args.StandardRestore(state))
            state = manager.restore(start, args=other)["state"]
        print(
            f"{'resumes' if start else 'starts'} after {start} of {total} micro-batches"
            f": gradient_step {state.opt_state.gradient_step}, mini_step "
            f"{state.opt_state.mini_step}"
        )
        for done, batch in enumerate(micro_batches[start:], start=start + 1):
            state, metrics = step(state, batch)
            if done % options.save_every == 0 or done == total:
                # Only here does the host wait. Training continues during the save.
                items = ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    settings=ocp.args.JsonSave(settings),
                )
                manager.save(done, args=items)
                print(f"saved after {done}: loss {metrics.loss:.4f} in this window")


def main() -> None:
    """Reads the command line and the data, trains, and reports."""
    start = time.monotonic()
    options = parse_options(sys.argv[1:])
    # By default, a GPU rounds the factors of float32 matrix products to TF32. The
    # rounding errors would hide the differences that are measured here.
    jax.config.update("jax_default_matmul_precision", "highest")
    train, validation = data.load()
    k = options.gradient_accumulation_steps
    windows = data.make_windows(train, (options.updates, k, ROWS), options.seed)
    micro_batches = [batch for window in windows for batch in window.micro_batches]
    counts = [int(batch.mask.sum()) for batch in micro_batches]
    print(f"a micro-batch holds {min(counts)} to {max(counts)} loss tokens")
    key = jax.random.key(options.seed)
    params = init(key, vocabulary=data.VOCABULARY, d_model=64, layers=2)
    if options.checkpoint_dir is not None:
        return train_one_run(options, params, micro_batches)
    held_out = data.batches_in_order(validation)
    losses, distances = compare(params, five_methods(k), windows, held_out)
    print(f"took {(time.monotonic() - start) / 60:.1f} minutes")
    options.out.mkdir(parents=True, exist_ok=True)
    for path in write_pictures(options.out, counts[:k], losses, distances):
        print(f"written: {path}")


def parse_options(words: list[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])

    def add(flag: str, default: Any, help: str, **how: Any) -> None:
        kind = Path if default is None else type(default)
        parser.add_argument(flag, type=kind, default=default, help=help, **how)

    add("--gradient-accumulation-steps", 16, "micro-batches in a window", metavar="K")
    add("--updates", 30, "optimizer updates, one a window", metavar="N")
    add("--seed", 0, "of the parameters and of the shuffle", metavar="N")
    add("--out", Path("finetune_results"), "directory of the pictures")
    add("--checkpoint-dir", None, "train a single run that resumes from here")
    add("--save-every", 50, "micro-batches between checkpoints", metavar="M")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
