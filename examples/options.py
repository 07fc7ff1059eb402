"""The command line of `finetune.py`."""

import argparse
import math
from pathlib import Path

import optax
from fitting import num_bytes
from methods import METHODS
from transformer import HEAD_DIM

OPTIMIZERS = {"adamw": optax.adamw, "sgd": optax.sgd}
LEARNING_RATES = {"adamw": 3e-3, "sgd": 0.1}
OUT = Path("finetune_results")
SAVE_EVERY = 50
AUTO = "auto"


def parse_options(words: list[str]) -> argparse.Namespace:
    """Reads the command line; exits on a bad value and says what must hold."""
    parser = argparse.ArgumentParser(
        description="Fine-tunes a small transformer on dialogue with accumulated "
        "gradients by several methods, and measures how far each ends from training "
        "on whole windows."
    )
    add = parser.add_argument
    add(
        "--gradient-accumulation-steps",
        type=positive_int,
        default=16,
        metavar="K",
        help="micro-batches in a window (%(default)s)",
    )
    add(
        "--micro-batch-size",
        type=positive_int_or_auto,
        default=2,
        metavar="ROWS",
        help="dialogues in a micro-batch (%(default)s); with auto, as many as fit into "
        "the memory of a device when make_train_step trains",
    )
    add(
        "--memory-limit",
        type=num_bytes,
        metavar="BYTES",
        help="of a device, for --micro-batch-size auto, such as 500MB, 2GB or 1.5GiB; "
        "needed on a CPU (what the device tells)",
    )
    add(
        "--updates",
        type=positive_int,
        default=30,
        metavar="N",
        help="optimizer updates, one a window (%(default)s)",
    )
    add(
        "--optimizer",
        choices=list(OPTIMIZERS),
        default="adamw",
        help="adamw, or sgd: its distances are the gradients' own (%(default)s)",
    )
    add(
        "--learning-rate",
        type=positive_float,
        metavar="RATE",
        help=", ".join(f"{rate} for {name}" for name, rate in LEARNING_RATES.items()),
    )
    add(
        "--d-model",
        type=width,
        default=64,
        metavar="WIDTH",
        help=f"width of the model, a multiple of {HEAD_DIM} (%(default)s)",
    )
    add(
        "--layers",
        type=positive_int,
        default=2,
        metavar="N",
        help="layers of the model (%(default)s)",
    )
    add(
        "--lora-rank",
        type=natural,
        default=0,
        metavar="RANK",
        help="train low-rank adapters of this rank and freeze the rest; 0 trains "
        "everything (%(default)s)",
    )
    add(
        "--seed",
        type=natural,
        default=0,
        metavar="N",
        help="of the parameters and of the shuffle (%(default)s)",
    )
    add(
        "--methods",
        nargs="+",
        choices=list(METHODS),
        metavar="METHOD",
        help=f"of {', '.join(METHODS)} (all); the first always runs, as the reference",
    )
    add(
        "--plan",
        action="store_true",
        help="train by make_train_step and make_window_step on windows cut by length, "
        "too: several shapes, less padding, the same update",
    )
    add(
        "--gradient-noise",
        action="store_true",
        help="instead of comparing, train by make_train_step and measure how many "
        "tokens a window needs: the noise scale over the run, next to the tokens of a "
        "window, and noise.png; with a hundred updates or more",
    )
    add(
        "--data",
        type=Path,
        metavar="FILE.jsonl",
        help="lines with prompt and completion, in place of the dialogue corpus",
    )
    add(
        "--max-length",
        type=positive_int,
        default=256,
        metavar="TOKENS",
        help="longer dialogues are counted and left out; a token is a byte, and two "
        "more mark the start and the middle (%(default)s)",
    )
    add(
        "--out",
        type=Path,
        metavar="DIRECTORY",
        help=f"for results.json and finetune.png, or for noise.png ({OUT})",
    )
    add(
        "--checkpoint-dir",
        type=Path,
        metavar="DIRECTORY",
        help="instead of comparing, train a single run by make_train_step that can be "
        "killed: the same command resumes from the last checkpoint here; on all "
        "devices that there are, with rows to fill where ROWS is not a multiple",
    )
    add(
        "--save-every",
        type=positive_int,
        metavar="M",
        help=f"micro-batches from checkpoint to checkpoint ({SAVE_EVERY})",
    )
    add(
        "--distributed",
        action="store_true",
        help="train the single run on the devices of several processes, which jax "
        "finds by itself on Slurm and on GKE; give all of them the same command",
    )
    add(
        "--coordinator",
        metavar="HOST:PORT",
        help="elsewhere: where process 0 listens, in the commands of all processes",
    )
    add(
        "--num-processes",
        type=positive_int,
        metavar="N",
        help="how many processes there are",
    )
    add(
        "--process-id",
        type=natural,
        metavar="I",
        help="which of them this is, from 0",
    )
    options = parser.parse_args(words)
    if options.learning_rate is None:
        options.learning_rate = LEARNING_RATES[options.optimizer]
    by_hand = options.coordinator, options.num_processes, options.process_id
    if set(by_hand) != {None}:
        if None in by_hand:
            parser.error(
                "--coordinator, --num-processes and --process-id go together: give "
                "all three, or --distributed where jax finds them"
            )
        if options.process_id >= options.num_processes:
            parser.error(
                f"--process-id must be below --num-processes {options.num_processes}, "
                f"got {options.process_id}"
            )
        options.distributed = True
    if options.memory_limit is not None and options.micro_batch_size != AUTO:
        parser.error(
            "--memory-limit decides the rows of a micro-batch: give --micro-batch-size "
            "auto too"
        )
    if options.gradient_noise:
        for name in ("methods", "plan", "checkpoint_dir"):
            if getattr(options, name):
                parser.error(
                    f"--gradient-noise measures a run of its own, by make_train_step "
                    f"on random micro-batches: leave --{name.replace('_', '-')} out"
                )
        if options.gradient_accumulation_steps == 1:
            parser.error(
                "--gradient-noise compares the micro-batches of a window: give "
                "--gradient-accumulation-steps of 2 or more"
            )
    if options.checkpoint_dir is None:
        if options.distributed:
            parser.error(
                "several processes train a single run: give them a --checkpoint-dir "
                "that they share"
            )
        if options.save_every is not None:
            parser.error(
                "--save-every needs a --checkpoint-dir to save to: give one, or leave "
                "--save-every out"
            )
        options.methods = options.methods or list(METHODS)
        options.out = options.out or OUT
    else:
        for name in ("methods", "out", "plan"):
            if getattr(options, name):
                parser.error(
                    f"--{name} is of the comparison, and --checkpoint-dir trains a "
                    "single run: leave one of them out"
                )
        options.save_every = options.save_every or SAVE_EVERY
    return options


def natural(text: str) -> int:
    """A whole number, zero or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number >= 0, got {text!r}")
    return int(text)


def positive_int(text: str) -> int:
    """A whole number, one or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return int(text)


def positive_int_or_auto(text: str) -> int | str:
    """A whole number, one or more, or `auto`."""
    return AUTO if text == AUTO else positive_int(text)


def width(text: str) -> int:
    """A width that is a multiple of `HEAD_DIM`."""
    value = positive_int(text)
    if value % HEAD_DIM:
        raise argparse.ArgumentTypeError(
            f"must be a multiple of {HEAD_DIM} (the width of a head), got {value}"
        )
    return value


def positive_float(text: str) -> float:
    """A finite number above zero."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value
