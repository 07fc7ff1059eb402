"""Tells how much memory a compiled program holds."""

import dataclasses

import jax

from optax_tokenaccum.compiled._reports import as_compiled, table


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """The result of `memory`, in bytes on each device; `print` shows it as a table.

    Attributes:
      arguments: the program's inputs.
      outputs: its results, together with those that reuse an argument's memory.
      aliased: the results that reuse the memory of a donated argument.
      temporaries: everything between inputs and results, in one piece.
      code: the program itself, where the backend tells; 0 on a CPU.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from optax_tokenaccum.compiled import memory
      >>> double = jax.jit(lambda x: 2 * x, donate_argnums=0)
      >>> report = memory(double.lower(jnp.ones(1000)).compile())
      >>> print(report.arguments, report.aliased, report.peak)
      4000 4000 4000
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int

    @property
    def peak(self) -> int:
        """All that the program holds: what is aliased counts once."""
        held = self.arguments + self.outputs - self.aliased
        return held + self.temporaries + self.code

    def __str__(self) -> str:
        names = "arguments", "outputs", "less aliased", "temporaries", "code", "peak"
        numbers = (*dataclasses.astuple(self), self.peak)
        return table("Bytes on each device:", [*zip(names, numbers, strict=True)], "<>")


def memory(compiled: jax.stages.Compiled) -> MemoryReport:
    """Tells how much memory a compiled program holds on each device.

    The figures are XLA's own, from `compiled.memory_analysis()`. They count only this
    program: the inner optimizer's state, which `step.accumulate` is not given, or a
    batch that waits for its turn, are held besides. `largest_micro_batch` counts these
    too. Arrays that the function closes over are in the program, and XLA does not count
    them: pass them as arguments.

    Args:
      compiled: the result of `jax.jit(f).lower(...).compile()`, of
        `step.accumulate.lower(state, batch).compile()` and the like, or of
        `nnx.jit(f).lower(...).compile()`.

    Raises:
      TypeError: `compiled` is not a compiled program.
      ValueError: the backend does not tell.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from optax_tokenaccum import make_train_step
      >>> from optax_tokenaccum.compiled import memory
      >>> def loss_fn(params, x):
      ...     return jnp.sum(jnp.tanh(x @ params) ** 2), len(x)
      >>> step = make_train_step(loss_fn, optax.adamw(1e-3), 8)
      >>> state = step.init(jax.ShapeDtypeStruct((1000, 1000), jnp.float32))
      >>> batch = jax.ShapeDtypeStruct((8, 1000), jnp.float32)
      >>> report = memory(step.accumulate.lower(state, batch).compile())
      >>> 8e6 < report.arguments < 9e6  # parameters and sums, not the moments
      True
    """
    found = as_compiled(compiled, "memory").memory_analysis()
    if found is None:
        raise ValueError(
            "The backend must tell the memory of a compiled program: got None from "
            "compiled.memory_analysis(). Compile for another backend."
        )
    return MemoryReport(
        found.argument_size_in_bytes,
        found.output_size_in_bytes,
        found.alias_size_in_bytes,
        found.temp_size_in_bytes,
        found.generated_code_size_in_bytes,
    )
