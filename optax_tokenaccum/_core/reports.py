"""What backward passes report, to whom collects it while a program is traced."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple


class Collected(NamedTuple):
    """What backward passes report, by the paths of parameters.

    Attributes:
      reasons: why gradients exist as a whole next to their sums.
      by_layer: of parameters whose gradients are added layer by layer, and that the
        compiler may spread: the axis of the layers, and the names of its mesh axes.
      losses: those that were differentiated.
    """

    reasons: dict[str, str]
    by_layer: dict[str, tuple[int, frozenset[str]]]
    losses: list[Any]


_collected: ContextVar[Collected | None] = ContextVar("collected", default=None)


@contextlib.contextmanager
def collect() -> Iterator[Collected]:
    """Collects the reports of what is traced inside the block."""
    collected = Collected({}, {}, [])
    token = _collected.set(collected)
    try:
        yield collected
    finally:
        _collected.reset(token)


def report(reasons: dict[str, str]) -> None:
    """Adds to what `collect` collects, if it does."""
    if collected := _collected.get():
        collected.reasons.update(reasons)


def report_layers(by_layer: dict[str, tuple[int, frozenset[str]]]) -> None:
    if collected := _collected.get():
        collected.by_layer.update(by_layer)


def report_loss(loss: Any) -> None:
    if collected := _collected.get():
        collected.losses.append(loss)
