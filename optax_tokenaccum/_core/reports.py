"""What backward passes report, to whom collects it while a program is traced."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class Collected:
    """What backward passes report, by the paths of parameters.

    Attributes:
      reasons: why gradients exist as a whole next to their sums.
      by_layer: of parameters whose gradients are added layer by layer, and that the
        compiler may spread: the axis of the layers, and the names of its mesh axes.
      has_loss: whether any loss was differentiated.
      is_unrolled: whether one read no parameter in a loop.
    """

    reasons: dict[str, str] = field(default_factory=dict)
    by_layer: dict[str, tuple[int, frozenset[str]]] = field(default_factory=dict)
    has_loss: bool = False
    is_unrolled: bool = False


_collectors: ContextVar[tuple[Collected, ...]] = ContextVar("collectors", default=())


@contextlib.contextmanager
def collect() -> Iterator[Collected]:
    """Collects the reports of what is traced inside the block."""
    collected = Collected()
    token = _collectors.set((*_collectors.get(), collected))
    try:
        yield collected
    finally:
        _collectors.reset(token)


def report(reasons: dict[str, str]) -> None:
    """Adds to what every `collect` around this collects."""
    for collected in _collectors.get():
        collected.reasons.update(reasons)


def report_layers(by_layer: dict[str, tuple[int, frozenset[str]]]) -> None:
    for collected in _collectors.get():
        collected.by_layer.update(by_layer)


def report_loss() -> None:
    for collected in _collectors.get():
        collected.has_loss = True


def report_unrolled() -> None:
    for collected in _collectors.get():
        collected.is_unrolled = True
