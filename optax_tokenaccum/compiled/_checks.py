"""What the reports on compiled programs require."""

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
