"""`linear_cross_entropy_sum` next to the loss of tokamax, on this machine.

It needs an environment of its own, because tokamax chooses versions:

    pip install tokamax==0.0.17
    python -m benchmarks.vocabulary benchmarks/results/fits

A run is the loss and both gradients in float32, of 2,048 tokens of width 256. The runs
of both losses take turns. An error is relative to the loss and the gradients of all
logits: that of tokamax is the padding that it counts.
"""

import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import report
from benchmarks.measure import interleaved, ratios, relative_error, say
from optax_tokenaccum.losses import linear_cross_entropy_sum, softmax_cross_entropy_sum

TOKENS, WIDTH, WORDS = 2048, 256, (32_768, 128_000)


def ours(hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
    return linear_cross_entropy_sum(hidden, head, labels)[0]


def of_all_logits(hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
    return softmax_cross_entropy_sum(hidden @ head, labels)[0]


def of_tokamax(hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
    tokamax: Any = importlib.import_module("tokamax")
    return tokamax.linear_softmax_cross_entropy_loss(
        hidden, labels, head, implementation="chunked_xla"
    )


def compare(words: int) -> report.Rows:
    """Temporaries and times with one vocabulary."""
    rng = np.random.default_rng(0)
    arrays = (
        jnp.asarray(rng.normal(size=(TOKENS, WIDTH)), jnp.float32),
        jnp.asarray(rng.normal(size=(WIDTH, words)) / WIDTH**0.5, jnp.float32),
        jnp.asarray(rng.integers(0, words, TOKENS)),
    )
    runs, memory, errors = {}, {}, {}
    expected = jax.device_get(jax.value_and_grad(of_all_logits, (0, 1))(*arrays))
    for name, loss in {"tokamax": of_tokamax, "ours": ours}.items():
        program = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*arrays).compile()
        analysis: Any = program.memory_analysis()
        memory[name] = analysis.temp_size_in_bytes / 1e6
        runs[name] = functools.partial(program, *arrays)
        errors[name] = relative_error(jax.device_get(program(*arrays)), expected)
    times = ratios(interleaved(runs, rounds=11), "tokamax")
    return [
        {
            "loss": name,
            "words": words,
            "MB of temporaries": round(memory[name], 1),
            "time / tokamax": times[name],
            "error": float(f"{errors[name]:.1e}"),
        }
        for name in runs
    ]


def main() -> None:
    """Writes the results to the folder that the command line names."""
    if importlib.util.find_spec("tokamax") is None:
        return say("vocabulary skipped: pip install tokamax==0.0.17")
    rows = [row for words in WORDS for row in compare(words)]
    print(report.write({"next to tokamax": rows}, Path(sys.argv[1])))


if __name__ == "__main__":
    main()
