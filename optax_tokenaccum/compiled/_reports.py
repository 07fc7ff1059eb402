"""What the reports on compiled programs share: their argument, and their table."""

from collections.abc import Sequence
from typing import Any

import jax


def as_compiled(given: Any, function: str) -> jax.stages.Compiled:
    """The compiled program that was given to a public function of this name."""
    # nnx.jit wraps the compiled program in a flax class.
    compiled = getattr(given, "compiled", given)
    if not isinstance(compiled, jax.stages.Compiled):
        raise TypeError(
            f"{function} needs a compiled program, a jax.stages.Compiled: got "
            f"{type(given).__name__}. Write jax.jit(f).lower(...).compile(), or "
            "step.accumulate.lower(state, batch).compile() for a step."
        )
    return compiled


def table(title: str, rows: Sequence[tuple[object, ...]], sides: str) -> str:
    """A table whose columns are aligned to `sides`, one of < and > for each."""
    texts = [[*map(_text, row)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = [title]
    for row in texts:
        cells = zip(row, sides, widths, strict=True)
        line = "  ".join(f"{cell:{side}{width}}" for cell, side, width in cells)
        lines.append(line.rstrip())
    return "\n".join(lines)


def _text(cell: object) -> str:
    return "?" if cell is None else f"{cell:,}" if isinstance(cell, int) else str(cell)
