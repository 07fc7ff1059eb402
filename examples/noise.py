"""Measures how many tokens a window needs, for `finetune.py --gradient-noise`.

`make_train_step(..., gradient_noise=True)` trains, and each window gives an estimate of
the gradient noise. One window's estimate says little, and training changes the noise:
this file therefore averages over parts of the run. The micro-batches are random rows of
the corpus, as the estimate needs. `docs/how_many_tokens.md` explains the numbers.
"""

import itertools
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import optax
from bar import Bar
from batches import Window
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter
from methods import loss_fn
from options import OPTIMIZERS
from rich.console import Console
from transformer import Params

from optax_tokenaccum import StepMetrics, make_train_step

PARTS = 3
FEWEST = 10
"""Fewer windows than this are not averaged."""


class Scale(NamedTuple):
    """The noise scale over some windows, in tokens, and its standard error.

    Attributes:
      tokens: NaN if the windows are too few, or if an average is not positive.
      error: the standard error of `tokens`; NaN if that is NaN.
    """

    tokens: float
    error: float

    @property
    def is_reliable(self) -> bool:
        """Whether the standard error is at most half of the scale."""
        return self.error <= self.tokens / 2  # False for NaN

    def __str__(self) -> str:
        if np.isnan(self.tokens):
            return "noise scale unknown"
        return (
            f"noise scale {self.tokens:,.0f} tokens (standard error {self.error:,.0f})"
        )


def measure(
    options: Namespace,
    params: Params,
    frozen: Params,
    windows: list[Window],
    console: Console,
) -> None:
    """Trains, prints the noise scale over the run, and draws `noise.png`.

    Args:
      options: the command line.
      params: the parameters to train; they are donated.
      frozen: the parameters that are not trained.
      windows: one per update; their micro-batches must be cut at random.
      console: where to print.
    """
    inner = OPTIMIZERS[options.optimizer](options.learning_rate)
    k = options.gradient_accumulation_steps
    with Bar(console, len(windows)) as bar:
        bar.say("training")
        closed = train(params, frozen, windows, inner, k, bar.step)
    console.print(describe(closed))
    write_picture(options.out / "noise.png", closed)
    console.print(f"written: noise.png in {options.out}")


def train(
    params: Params,
    frozen: Params,
    windows: list[Window],
    inner: optax.GradientTransformation,
    k: int,
    after_update: Callable[[], None],
) -> list[StepMetrics]:
    """Trains with `k` micro-batches a window; returns the metrics of each window."""
    step = make_train_step(loss_fn, inner, every_k_schedule=k, gradient_noise=True)
    state, seen = step.init(params), []
    for window in windows:
        for batch in window.micro_batches:
            state, metrics = step(state, batch, frozen=frozen)
            seen.append(metrics)
        after_update()
    return [metrics for metrics in jax.device_get(seen) if metrics.updated]


def scale_of(closed: list[StepMetrics]) -> Scale:
    """Averages both estimates over the windows first, and divides then."""
    noise = np.array([window.gradient_noise for window in closed], np.float64)
    noise = noise[~np.isnan(noise).any(axis=1)]
    if len(noise) < FEWEST:
        return Scale(np.nan, np.nan)
    trace, squared_norm = noise.mean(axis=0)
    if trace <= 0 or squared_norm <= 0:
        return Scale(np.nan, np.nan)
    scale = trace / squared_norm
    # To first order, the error of the quotient is that of this mean, whose value is 0.
    residuals = (noise[:, 0] - scale * noise[:, 1]) / squared_norm
    return Scale(scale, residuals.std(ddof=1) / len(noise) ** 0.5)


def describe(closed: list[StepMetrics]) -> str:
    """Describes the loss and the noise of each third, and advises by the last third."""
    bounds = [len(closed) * i // PARTS for i in range(PARTS + 1)]
    lines = []
    for begin, end in itertools.pairwise(bounds):
        if part := closed[begin:end]:
            counts = [window.num_tokens for window in part]
            loss = np.average([window.loss for window in part], weights=counts)
            lines.append(
                f"updates {begin + 1} to {end}: loss {loss:.4f}; {scale_of(part)}; "
                f"{np.mean(counts):,.0f} tokens a window"
            )
    last = closed[bounds[-2] :]
    tokens = float(np.mean([window.num_tokens for window in last]))
    return "\n".join([*lines, advise(scale_of(last), tokens)])


def advise(scale: Scale, tokens: float) -> str:
    """Says in one sentence what the noise scale means for windows of so many tokens."""
    page = "see docs/how_many_tokens.md"
    if not scale.is_reliable:
        return (
            "The noise scale of the last third is unknown, or its standard error is "
            f"over half of it: give more --updates, {page}."
        )
    ratio = tokens / scale.tokens
    if ratio > 10:
        follows = (
            "most of the accumulation is wasted, and fewer micro-batches are enough"
        )
    elif ratio < 1:
        follows = "updates are noisy, and larger windows would need fewer of them"
    else:
        progress = ratio / (1 + ratio)
        follows = (
            f"an update makes at most {progress:.0%} of the progress of one with the "
            "exact gradient"
        )
    return f"A window has {ratio:.2g} times the noise scale: {follows}, {page}."


def write_picture(path: Path, closed: list[StepMetrics]) -> None:
    """Draws the running noise scale and the tokens of each window.

    Args:
      path: the PNG file.
      closed: the metrics of the windows, in order.
    """
    span = max(FEWEST, len(closed) // 10)
    ends = range(span, len(closed) + 1)
    scales = [scale_of(closed[end - span : end]).tokens for end in ends]
    figure = Figure(figsize=(8, 4.4), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.set_title("How many tokens does a window need?", fontweight="bold")
    tokens = [window.num_tokens for window in closed]
    updates = range(1, len(closed) + 1)
    axes.plot(updates, tokens, ".", color="0.6", label="tokens of a window")
    label = f"noise scale, averaged over the last {span} windows"
    axes.plot(ends, scales, color="#1f6fb4", label=label)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_xlabel("optimizer updates")
    axes.set_ylabel("tokens")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
