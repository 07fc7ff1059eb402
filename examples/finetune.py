"""Fine-tunes a small transformer on dialogue with accumulated gradients, seven ways.

    python examples/finetune.py

Each method in `methods.py` trains the same model on the same micro-batches, and the
program reports how far each one ends from training on whole windows. Prompts are masked
and answers have any length, so micro-batches hold different numbers of loss tokens, and
their means must not be averaged. Text is bytes and the parameters start at random: the
example shows the arithmetic of training and does not make a good model.

`--lora-rank 4` trains low-rank adapters next to the frozen matrices, see `lora.py`.
Here the frozen matrices are random too, so there is less to learn.

`--plan` adds two ways that cut each window by length instead of into a fixed number of
rows, see `planned.py`: the same updates with less padding.

`--micro-batch-size auto --memory-limit 2GB` takes the rows that fit, see `fitting.py`.

`--gradient-noise` measures how many tokens a window needs, see `noise.py`.

`--data FILE.jsonl` uses your data: one example per line, with `prompt` and
`completion`.

`--checkpoint-dir DIRECTORY --save-every 50` trains a single run instead. The run can be
killed at any moment and resumed without changing the result, see `resumable.py`. Ctrl-C
prints which checkpoint is the last. The loss is printed with every checkpoint. The same
command with more `--updates` continues the run. It uses all devices that jax sees, and
can resume on more or fewer devices.

With `--coordinator HOST:PORT --num-processes N --process-id I` in addition, the run
uses the devices of several processes. Start each process with the same command, except
for `I`. On Slurm and GKE, `--distributed` alone is enough. See `processes.py` and
`docs/many_processes.md`.
"""

import sys

from interrupt import end_on_ctrl_c, say_on_ctrl_c

if __name__ == "__main__":  # Importing the rest takes seconds.
    end_on_ctrl_c()

from argparse import Namespace
from pathlib import Path

import jax
import noise
import optax
import processes
import resumable
from bar import Bar
from batches import (
    VOCABULARY,
    Batch,
    Window,
    batches_in_order,
    encode,
    fill_rows,
    make_windows,
    padded_lengths,
)
from compare import compare
from dialogue import DataError, read_corpus, read_jsonl, split_by_prompt
from fitting import MemoryLimitError, fit_rows
from jax.sharding import Mesh
from lora import init_adapters
from methods import REFERENCE, loss_fn
from options import AUTO, OPTIMIZERS, parse_options
from planned import PLANNED
from processes import PeerError, on_every_device, spread_rows
from report import (
    describe,
    describe_plans,
    make_table,
    write_json,
    write_picture,
)
from resumable import CheckpointError, Settings, fingerprint
from rich.console import Console
from run_directory import last_checkpoint
from transformer import Params, init

from optax_tokenaccum import StepMetrics, TrainStep, make_train_step

EVALUATION_ROWS = 32
# The options that affect the arithmetic or the data. The number of updates does not: a
# longer run begins with the windows of a shorter one.
DECIDING = (
    "optimizer",
    "learning_rate",
    "seed",
    "gradient_accumulation_steps",
    "micro_batch_size",
    "max_length",
    "d_model",
    "layers",
    "lora_rank",
)


def main() -> None:
    """Reads the command line and the data, and trains."""
    options = parse_options(sys.argv[1:])
    say_on_ctrl_c(lambda: how_to_continue(options.checkpoint_dir))
    try:
        if options.distributed:
            processes.start(
                options.coordinator, options.num_processes, options.process_id
            )
        run(options)
    except (CheckpointError, DataError, MemoryLimitError, OSError, PeerError) as error:
        sys.exit(f"error: {error}")


def how_to_continue(directory: Path | None) -> str:
    """Says, after an interruption, what the same command would do."""
    if directory is None:
        return (
            ": only --checkpoint-dir makes a run that resumes, the same command starts "
            "from the beginning"
        )
    number = last_checkpoint(directory)
    if number is None:
        return (
            " before the first checkpoint: the same command starts from the beginning"
        )
    return f": the same command resumes from checkpoint {number} in {directory}"


def run(options: Namespace) -> None:
    """Reads the data and trains.

    Raises:
      CheckpointError: see `train_one_run`.
      DataError: the data cannot be used as it is.
      MemoryLimitError: see `rows_that_fit`.
      PeerError: another process cannot continue.
    """
    quiet = not processes.is_first()
    console = Console(highlight=False, markup=False, quiet=quiet)
    # By default, a GPU rounds the factors of float32 matrix products to TF32. The
    # rounding errors would hide the differences that are measured here.
    jax.config.update("jax_default_matmul_precision", "highest")
    with processes.together():
        train, validation = load(options.data, options.max_length, console)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    if options.micro_batch_size == AUTO:
        options.micro_batch_size = rows_that_fit(options, len(train), console)
    windows = make_windows(
        train,
        updates=options.updates,
        accumulation_steps=options.gradient_accumulation_steps,
        micro_batch_size=options.micro_batch_size,
        lengths=padded_lengths(options.max_length),
        seed=options.seed,
    )
    console.print(describe(windows, len(train)))
    if options.plan:
        console.print(describe_plans(windows))
    if options.gradient_noise:
        noise.measure(options, *make_parameters(options), windows, console)
    elif options.checkpoint_dir is None:
        compare_methods(options, windows, train, validation, console)
    else:
        train_one_run(options, windows, train, console)


def rows_that_fit(options: Namespace, num_pairs: int, console: Console) -> int:
    """Finds the rows of `--micro-batch-size auto`, and prints what they need.

    Raises:
      MemoryLimitError: not even a row fits, or the memory is not known.
    """
    params, frozen = make_parameters(options)
    mesh = None if options.checkpoint_dir is None else processes.make_mesh()
    fit = fit_rows(
        make_step(options, mesh),
        params,
        frozen,
        padded_lengths(options.max_length),
        options.memory_limit,
        devices=1 if mesh is None else mesh.size,
    )
    most = max(num_pairs // options.gradient_accumulation_steps, 1)
    rows = min(fit.size, most)
    console.print(
        f"micro-batches of {rows} rows: {fit.size} need {fit.peak_bytes / 1e6:,.0f} of "
        f"{fit.limit_bytes / 1e6:,.0f} MB"
        + (f", and a window of {most} has all pairs" if rows < fit.size else "")
    )
    return rows


def compare_methods(
    options: Namespace,
    windows: list[Window],
    train: list[Batch],
    validation: list[Batch],
    console: Console,
) -> None:
    """Trains with every method and reports the results."""
    params, frozen = make_parameters(options)
    lengths = padded_lengths(options.max_length)
    methods = list(dict.fromkeys([REFERENCE, *options.methods]))
    methods += PLANNED if options.plan else []
    with Bar(console, len(methods) * len(windows)) as bar:
        runs = compare(
            methods,
            params,
            frozen,
            windows,
            OPTIMIZERS[options.optimizer](options.learning_rate),
            options.gradient_accumulation_steps,
            train=batches_in_order(train, EVALUATION_ROWS, lengths),
            validation=batches_in_order(validation, EVALUATION_ROWS, lengths),
            say=bar.say,
            after_update=bar.step,
        )

    console.print(make_table(runs))
    settings = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
    }
    sizes = {"trained": optax.tree.size(params), "frozen": optax.tree.size(frozen)}
    write_json(options.out / "results.json", runs, settings, sizes)
    write_picture(
        options.out / "finetune.png",
        runs,
        f"{options.optimizer}, windows of {options.gradient_accumulation_steps} "
        f"micro-batches x {options.micro_batch_size} dialogues, {sizes['trained']:,} "
        f"trained and {sizes['frozen']:,} frozen parameters",
    )
    console.print(f"written: results.json and finetune.png in {options.out}")


def train_one_run(
    options: Namespace, windows: list[Window], train: list[Batch], console: Console
) -> None:
    """Trains with `make_train_step`, from the last checkpoint if there is one.

    Raises:
      CheckpointError: the directory holds something else, or is damaged.
      PeerError: another process cannot continue, or was given something else.
    """
    mesh = processes.make_mesh()
    params, frozen = make_parameters(options)
    step = make_step(options, mesh)
    settings = settings_of(options, train)
    micro_batches = [batch for window in windows for batch in window.micro_batches]
    position = resumable.resume(options.checkpoint_dir, settings, step, params)
    done, total = position.micro_batches, len(micro_batches)
    if done > total:
        raise CheckpointError(
            f"the run in {options.checkpoint_dir} has done {done} micro-batches, and "
            f"--updates {options.updates} asks for {total}: give more updates, or "
            "another directory for a new run. Nothing was changed"
        )
    opt_state = position.state.opt_state
    console.print(
        f"{'resumes' if done else 'starts'} after {done} of {total} micro-batches: "
        f"gradient_step {opt_state.gradient_step}, mini_step {opt_state.mini_step}; "
        f"devices: {mesh.size}, processes: {jax.process_count()}"
    )

    def print_loss(metrics: list[StepMetrics]) -> None:
        """Prints the loss of the windows that closed since the last checkpoint."""
        closed = [window for window in metrics if window.updated]
        if closed:
            tokens = sum(window.num_tokens for window in closed)
            loss = sum(window.loss * window.num_tokens for window in closed) / tokens
            console.print(
                f"update {closed[-1].gradient_step} of {options.updates}: loss "
                f"{loss:.4f}, the mean of {tokens:,.0f} tokens"
            )

    with Bar(console, total, done) as bar:
        state = resumable.train(
            options.checkpoint_dir,
            settings,
            options.save_every,
            step,
            position,
            micro_batches,
            after_micro_batch=bar.show,
            after_fetch=print_loss,
            place=lambda batch: spread_rows(fill_rows(batch, mesh.size), mesh),
            progress=bar.compiling,
            frozen=on_every_device(frozen, mesh),
        )
    console.print(
        f"done: gradient_step {state.opt_state.gradient_step}; the state is checkpoint "
        f"{total} in {options.checkpoint_dir}, the metrics are in {resumable.METRICS}"
    )


def make_step(options: Namespace, mesh: Mesh | None) -> TrainStep:
    """Makes the train step, of the single run if there is a mesh."""
    return make_train_step(
        loss_fn,
        OPTIMIZERS[options.optimizer](options.learning_rate),
        options.gradient_accumulation_steps,
        mesh=mesh,
        data_axes=None if mesh is None else processes.DATA,
    )


def settings_of(options: Namespace, train: list[Batch]) -> Settings:
    """All settings that must not change during a run."""
    deciding = {name: getattr(options, name) for name in DECIDING}
    return deciding | {"data_sha256": fingerprint(train)}


def make_parameters(options: Namespace) -> tuple[Params, Params]:
    """Makes the trained parameters and the frozen parameters."""
    model = init(
        jax.random.key(options.seed),
        vocabulary=VOCABULARY,
        d_model=options.d_model,
        layers=options.layers,
    )
    if not options.lora_rank:
        return model, {}
    # Uses another seed: random numbers from the same key are not independent.
    key = jax.random.key(options.seed + 1)
    return init_adapters(key, model, options.lora_rank), model


def load(
    data: Path | None, max_length: int, console: Console
) -> tuple[list[Batch], list[Batch]]:
    """Reads, filters and splits the data, and prints what was left out.

    Args:
      data: a JSONL file, or None for the dialogue corpus.
      max_length: the longest sequence in tokens; longer ones are left out.
      console: where to print.

    Returns:
      The encoded training pairs and the encoded validation pairs.

    Raises:
      DataError: the data cannot be used as it is.
    """
    if data is None:
        pairs, notes = read_corpus()
        console.print(notes)
    else:
        pairs = read_jsonl(data)
    length_of = {pair: len(encode(pair).inputs) for pair in pairs}
    kept = [pair for pair in pairs if length_of[pair] <= max_length]
    if not kept:
        raise DataError(
            f"no pair is left: all {len(pairs)} are longer than --max-length "
            f"{max_length}, and the shortest has {min(length_of.values())} tokens"
        )
    console.print(
        f"{len(pairs)} pairs of prompt and completion: left out "
        f"{len(pairs) - len(kept)} of over {max_length} tokens (--max-length; the "
        f"longest has {max(length_of.values())})"
    )
    train, validation = split_by_prompt(kept)
    console.print(
        f"{len(train)} pairs to train on and {len(validation)} to validate with; "
        "no prompt is in both"
    )
    return [encode(pair) for pair in train], [encode(pair) for pair in validation]


if __name__ == "__main__":
    main()
