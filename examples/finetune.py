"""Fine-tunes a small transformer on dialogue with accumulated gradients, seven ways.

    python examples/finetune.py

Each way trains the same model on the same micro-batches, and the program reports how
far each one ends from training on whole windows. Prompts are masked and answers have
any length, so micro-batches hold different numbers of loss tokens, and their means must
not be averaged. Text is bytes and the parameters start at random: the example shows the
arithmetic of training and does not make a good model.

`--lora-rank 4` trains low-rank adapters next to the frozen matrices, see `model.py`.
`--data FILE.jsonl` uses your data: in each line an object with `prompt` and
`completion`.

`--checkpoint-dir DIRECTORY --save-every 50` trains a single run instead, on all devices
that jax sees. The run can be killed at any moment, and the same command resumes it
without changing the result; with more `--updates`, it continues a run that is complete.
"""

import argparse
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import data
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from data import Batch, InputError, Window
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from model import HEAD_DIM, Params, init, init_adapters, loss_fn, mean_loss_fn
from report import NAIVE, REFERENCE, Run, describe, make_table, write_picture
from rich.console import Console
from rich.progress import Progress

import optax_tokenaccum
from optax_tokenaccum import (
    StepState,
    make_train_step,
    make_window_step,
    regroup_sums,
    token_accumulation,
)

OPTIMIZERS = {"adamw": optax.adamw, "sgd": optax.sgd}
LEARNING_RATES = {"adamw": 3e-3, "sgd": 0.1}
# The options that may change when a run resumes: no arithmetic depends on them.
FREE = {"updates", "data", "out", "checkpoint_dir", "save_every"}


class Way(NamedTuple):
    """A way to train on windows. No call waits for the device.

    Attributes:
      init: `params -> StepState`.
      step: `(state, batch, frozen=frozen) -> (state, metrics)`; it donates the state.
      batches: the attribute of `Window` with the batches, each for a call of `step`.
      program: the compiled function of `step` whose memory is measured.
    """

    init: Callable[[Params], StepState]
    step: Callable[..., tuple[StepState, Any]]
    batches: str
    program: Any


def loop_of(
    optimizer: Any,
    value_and_grad: Callable[[Params, Batch, Params], tuple[Any, Params]],
    batches: str,
    passes_count: bool = False,
) -> Way:
    """A loop of your own: a gradient, and an optimizer that is called with each."""

    @partial(jax.jit, donate_argnums=0)
    def step(state: StepState, batch: Batch, frozen: Params) -> tuple[StepState, Any]:
        params, opt_state = state
        (loss, n), grads = value_and_grad(params, batch, frozen)
        count = {"num_tokens": n} if passes_count else {}
        updates, opt_state = optimizer.update(grads, opt_state, params, **count)
        return StepState(optax.apply_updates(params, updates), opt_state), loss

    def init(params: Params) -> StepState:
        return StepState(params, optimizer.init(params))

    return Way(init, step, batches, step)


def seven_ways(
    inner: optax.GradientTransformation, k: int, rows: int
) -> dict[str, Way]:
    """Makes the ways to train on windows of `k` micro-batches, the reference first."""
    parts, whole = "micro_batches", "whole"
    of_mean = jax.value_and_grad(mean_loss_fn, has_aux=True)
    of_sum = jax.value_and_grad(loss_fn, has_aux=True)
    # optax cuts up the whole window, so the padding is the same as in the window step.
    # By default, it adds up what the function returns.
    sums = optax.microbatching.microbatch(of_sum, argnums=1, microbatch_size=rows)

    def of_cut(*args: Any) -> tuple[Any, Params]:
        (loss_sum, n), grads = sums(*args)
        return (loss_sum / n, n), jax.tree.map(lambda g: g / n, grads)

    ours = optax_tokenaccum.MultiSteps(inner, k)
    transformation = token_accumulation(inner, k)
    step = make_train_step(loss_fn, inner, k)
    window_step = make_window_step(loss_fn, inner)
    return {
        REFERENCE: loop_of(inner, of_mean, whole),
        NAIVE: loop_of(optax.MultiSteps(inner, k), of_mean, parts),
        "MultiSteps": loop_of(ours, of_mean, parts, True),
        "token_accumulation": loop_of(transformation, of_sum, parts, True),
        "make_train_step": Way(step.init, step, parts, step.accumulate),
        # Pads all micro-batches to the window's longest sequence, since one array has
        # them. In return, no sums are kept between calls.
        "make_window_step": Way(window_step.init, window_step, "stacked", window_step),
        "optax.microbatching": loop_of(inner, of_cut, whole),
    }


def compare(
    options: argparse.Namespace,
    windows: list[Window],
    held_out: list[Batch],
    console: Console,
) -> list[Run]:
    """Trains every way in lockstep, and returns what was measured.

    Every way trains on a window before the next window begins, so the distance to the
    reference is measured after every update without storing old parameters.
    """
    params, frozen = make_parameters(options)
    inner = OPTIMIZERS[options.optimizer](options.learning_rate)
    k, rows = options.gradient_accumulation_steps, options.micro_batch_size
    ways = seven_ways(inner, k, rows)
    runs = {name: Run(name) for name in ways}
    states = {
        name: way.init(jax.tree.map(jnp.copy, params)) for name, way in ways.items()
    }
    with Progress(console=console) as bar:
        task = bar.add_task("", total=len(ways) * len(windows))
        for window in windows:
            for name, way in ways.items():
                state = states[name]
                for batch in getattr(window, way.batches):
                    state, _ = way.step(state, batch, frozen=frozen)
                states[name] = state
                far = distance(state.params, states[REFERENCE].params)
                runs[name].distances.append(float(far))
                runs[name].losses.append(mean_loss(state.params, frozen, held_out))
                bar.update(task, description=name, advance=1)
    for name, way in ways.items():
        batches = (x for window in windows for x in getattr(window, way.batches))
        largest = max(batches, key=lambda batch: batch.inputs.size)
        program = way.program.lower(states[name], largest, frozen=frozen)
        memory = program.compile().memory_analysis()
        if memory is not None:  # in addition to the arguments
            outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
            runs[name].memory = memory.temp_size_in_bytes + outputs
    return [*runs.values()]


def mean_loss(params: Params, frozen: Params, batches: list[Batch]) -> float:
    """The sum of the losses divided by the number of tokens, over all batches."""
    loss_and_count = jax.jit(loss_fn)
    sums = [loss_and_count(params, batch, frozen) for batch in batches]
    loss_sums, counts = zip(*sums, strict=True)
    return float(sum(loss_sums) / sum(counts))


@jax.jit
def distance(params: Params, reference: Params) -> jax.Array:
    """The L2 norm of the difference, divided by the L2 norm of the reference."""
    difference = jax.tree.map(jnp.subtract, params, reference)
    return optax.tree.norm(difference) / optax.tree.norm(reference)


def train_one_run(
    options: argparse.Namespace,
    windows: list[Window],
    train: list[Batch],
    console: Console,
) -> None:
    """Trains with `make_train_step`, from the last checkpoint if there is one.

    A run that was killed ends bit for bit like one that was not: a checkpoint is
    complete or absent, and holds the whole state with the sums of the open window; its
    number is the place in the data, which depend on the settings alone; and the
    arithmetic is the same on the same devices and versions (on a GPU, with
    `XLA_FLAGS=--xla_gpu_deterministic_ops=true`). On more or fewer devices, the result
    is the same up to rounding.

    Raises:
      InputError: the directory holds a run with other settings, or a longer one.
    """
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    params, frozen = make_parameters(options)
    frozen = jax.device_put(frozen, NamedSharding(mesh, P()))
    settings = {x: value for x, value in vars(options).items() if x not in FREE}
    settings["data_sha256"] = data.fingerprint(train)
    micro_batches = [batch for window in windows for batch in window.micro_batches]
    total = len(micro_batches)
    step = make_train_step(
        loss_fn,
        OPTIMIZERS[options.optimizer](options.learning_rate),
        options.gradient_accumulation_steps,
        mesh=mesh,
        data_axes="data",
    )

    def place(batch: Batch) -> Any:
        return jax.device_put(batch, NamedSharding(mesh, P("data")))

    directory = options.checkpoint_dir.absolute()
    kept = ocp.CheckpointManagerOptions(max_to_keep=3)
    with ocp.CheckpointManager(directory, options=kept) as manager:
        start = manager.latest_step() or 0
        if start > total:
            raise InputError(
                f"the run in {directory} has done {start} micro-batches, and --updates "
                f"{options.updates} asks for {total}: give more updates, or another "
                "directory for a new run"
            )
        state, losses = restore(manager, step.init(params), settings)
        console.print(
            f"{'resumes' if start else 'starts'} after {start} of {total} micro-batches"
            f": gradient_step {state.opt_state.gradient_step}, mini_step "
            f"{state.opt_state.mini_step}; devices: {mesh.size}"
        )
        waiting = []
        with Progress(console=console) as bar:
            left = bar.track(
                micro_batches[start:], total, start, description="training"
            )
            for done, batch in enumerate(left, start=start + 1):
                state, metrics = step(state, place(batch), frozen=frozen)
                waiting.append(metrics)
                if done % options.save_every == 0 or done == total:
                    # Only here does the host wait. Training continues during the save.
                    fetched = jax.device_get(waiting)
                    losses += [float(x.loss) for x in fetched if x.updated]
                    waiting.clear()
                    position = {"settings": settings, "losses": losses}
                    items = ocp.args.Composite(
                        state=ocp.args.StandardSave(state),
                        position=ocp.args.JsonSave(position | {"devices": mesh.size}),
                    )
                    manager.save(done, args=items)
                    if losses:
                        console.print(f"update {len(losses)}: loss {losses[-1]:.4f}")
    console.print(f"done: the state and the losses are checkpoint {total}, {directory}")


def restore(
    manager: ocp.CheckpointManager, like: StepState, settings: dict[str, Any]
) -> tuple[StepState, list[float]]:
    """Reads the state and the losses of the last checkpoint, for the devices of `like`.

    Without a checkpoint, `like` is the state.

    Raises:
      InputError: the checkpoint is from a run with other settings.
    """
    number = manager.latest_step()
    if number is None:
        return like, []

    def read(**item: Any) -> Any:
        return manager.restore(number, args=ocp.args.Composite(**item))

    position = read(position=ocp.args.JsonRestore())["position"]
    for name, value in settings.items():
        if position["settings"].get(name) != value:
            raise InputError(
                f"a run must keep the settings that it started with: {name} was "
                f"{position['settings'].get(name)}, and {value} was given. Give the "
                "former, or another directory for a new run"
            )

    def as_saved(acc: jax.Array, param: jax.Array) -> jax.ShapeDtypeStruct:
        """The shape of a sum, which was one for each of the devices at that time."""
        shape = position["devices"], *param.shape
        sharding = acc.sharding if shape == acc.shape else param.sharding
        return jax.ShapeDtypeStruct(shape, acc.dtype, sharding=sharding)

    sums = jax.tree.map(as_saved, like.opt_state.acc_grads, like.params)
    target = like._replace(opt_state=like.opt_state._replace(acc_grads=sums))
    state = read(state=ocp.args.StandardRestore(target))["state"]
    return regroup_sums(state, like), position["losses"]


def main() -> None:
    """Reads the command line and the data, and trains."""
    options = parse_options(sys.argv[1:])
    try:
        run(options, Console(highlight=False, markup=False))
    except (InputError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("interrupted: --checkpoint-dir makes a run resume", file=sys.stderr)
        sys.exit(130)


def run(options: argparse.Namespace, console: Console) -> None:
    """Reads the data, trains, and reports."""
    # By default, a GPU rounds the factors of float32 matrix products to TF32. The
    # rounding errors would hide the differences that are measured here.
    jax.config.update("jax_default_matmul_precision", "highest")
    train, validation, notes = data.load(options.data, options.max_length)
    k, rows = options.gradient_accumulation_steps, options.micro_batch_size
    lengths = data.padded_lengths(options.max_length)
    windows = data.make_windows(
        train,
        (options.updates, k, rows),
        devices=jax.device_count() if options.checkpoint_dir else 1,
        lengths=lengths,
        seed=options.seed,
    )
    console.print(f"{notes}\n{describe(windows, len(train))}")
    if options.checkpoint_dir is not None:
        return train_one_run(options, windows, train, console)
    held_out = data.batches_in_order(validation, lengths)
    runs = compare(options, windows, held_out, console)
    console.print(make_table(runs))
    options.out.mkdir(parents=True, exist_ok=True)
    trained, frozen = map(optax.tree.size, make_parameters(options))
    setting = (
        f"{options.optimizer}, windows of {k} micro-batches x {rows} dialogues, "
        f"{trained:,} trained and {frozen:,} frozen parameters"
    )
    write_picture(options.out / "finetune.png", runs, setting)
    console.print(f"written: {options.out / 'finetune.png'}")


def make_parameters(options: argparse.Namespace) -> tuple[Params, Params]:
    """Makes the trained parameters and the frozen parameters."""
    model = init(
        jax.random.key(options.seed),
        vocabulary=data.VOCABULARY,
        d_model=options.d_model,
        layers=options.layers,
    )
    if not options.lora_rank:
        return model, {}
    # Uses another seed: random numbers from the same key are not independent.
    key = jax.random.key(options.seed + 1)
    return init_adapters(key, model, options.lora_rank), model


def parse_options(words: list[str]) -> argparse.Namespace:
    """Reads the command line; exits on a bad value and says what must hold."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])

    def add(flag: str, kind: type, default: Any, help: str, **how: Any) -> None:
        help += "" if default is None else f" ({default})"
        parser.add_argument(flag, type=kind, default=default, help=help, **how)

    steps = "--gradient-accumulation-steps"
    add(steps, int, 16, "micro-batches in a window", metavar="K")
    add("--micro-batch-size", int, 2, "dialogues in a micro-batch", metavar="ROWS")
    add("--updates", int, 30, "optimizer updates, one a window", metavar="N")
    add("--optimizer", str, "adamw", "or sgd", choices=OPTIMIZERS)
    add("--learning-rate", float, None, f"default: {LEARNING_RATES}", metavar="RATE")
    add("--d-model", int, 64, f"width of the model, a multiple of {HEAD_DIM}")
    add("--layers", int, 2, "layers of the model", metavar="N")
    add("--lora-rank", int, 0, "rank of trained adapters; 0: train everything")
    add("--seed", int, 0, "of the parameters and of the shuffle", metavar="N")
    add("--data", Path, None, "your data instead of dialogue", metavar="FILE.jsonl")
    add("--max-length", int, 256, "longest pair in bytes; longer ones are left out")
    add("--out", Path, Path("finetune_results"), "directory of the picture")
    add("--checkpoint-dir", Path, None, "train a single run that resumes from here")
    add("--save-every", int, 50, "micro-batches between checkpoints", metavar="M")
    options = parser.parse_args(words)
    if options.learning_rate is None:
        options.learning_rate = LEARNING_RATES[options.optimizer]
    for name, value in vars(options).items():
        least = 0 if name in ("lora_rank", "seed") else 1
        if isinstance(value, int) and value < least:
            flag = name.replace("_", "-")
            parser.error(f"--{flag} must be a whole number >= {least}, got {value}")
    if not 0 < options.learning_rate < math.inf:
        parser.error(f"--learning-rate must be above 0, got {options.learning_rate}")
    if options.d_model % HEAD_DIM:
        parser.error(
            f"--d-model must be a multiple of {HEAD_DIM} (the width of a head), "
            f"got {options.d_model}"
        )
    return options


if __name__ == "__main__":
    main()
