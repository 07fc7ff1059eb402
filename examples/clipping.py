"""Compares clipping inside and outside the accumulation with a clipped full batch.

    python examples/clipping.py --out docs/images/clipping.png

For one window of a small Llama on ragged rows, the program measures how far the update
is from the reference: `optax.clip_by_global_norm`, then SGD, on the full batch at once.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from batches import Batch
from llama import ROWS, init, loss_fn, make_rows
from matplotlib.figure import Figure
from naive_or_exact import compare, flat, value_and_grad
from rich import box
from rich.console import Console
from rich.table import Table

from optax_tokenaccum import token_accumulation

K, SEEDS = 16, 9
# Clip norms over the norm of the full batch's gradient; the table has only `SHOWN`.
CLIP_NORMS = [2.0**i for i in range(-2, 11)]
SHOWN = [1.0, 4.0, 16.0, 64.0, 256.0, 1024.0]


def _clip_and_sgd(clip_norm: Any) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(clip_norm), optax.sgd(1.0))


def _inside(clip_norm: Any) -> Any:
    return token_accumulation(_clip_and_sgd(clip_norm), K)


def _outside(clip_norm: Any) -> Any:
    accumulation = token_accumulation(optax.sgd(1.0), K)
    return optax.chain(optax.clip_by_global_norm(clip_norm), accumulation)


def _outside_mean(clip_norm: Any) -> Any:
    accumulation = token_accumulation(optax.sgd(1.0), K, gradients="mean")
    return optax.chain(optax.clip_by_global_norm(clip_norm), accumulation)


def _multi_steps(clip_norm: Any) -> Any:
    return optax.MultiSteps(_clip_and_sgd(clip_norm), K)


# Way -> (its optimizer, whether it takes gradients of mean losses).
WAYS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "inside": (_inside, False),
    "outside, of means": (_outside_mean, True),
    "outside, of sums": (_outside, False),
    "optax.MultiSteps": (_multi_steps, True),
}
# Other curves coincide with the first, so the first is drawn as a wide band.
_LOOKS: dict[str, dict[str, Any]] = {
    "inside": {"color": "#1f6fb4", "linewidth": 8, "alpha": 0.5},
    "outside, of means": {"color": "#c77d0a", "marker": "s"},
    "outside, of sums": {"color": "#7b4fb5", "marker": "^"},
    "optax.MultiSteps": {"color": "#d1342f", "marker": "D"},
}


@partial(jax.jit, static_argnames="way")
def update_of(way: str, clip_norm: Any, grads: jax.Array, counts: Any) -> jax.Array:
    """The update from the `[K, size]` gradients of one window, as one vector."""
    optimizer = WAYS[way][0](clip_norm)
    params = jnp.zeros_like(grads[0])
    state = optimizer.init(params)
    updates = params
    for i in range(K):
        count = {} if way == "optax.MultiSteps" else {"num_tokens": counts[i]}
        updates, state = optimizer.update(grads[i], state, params, **count)
    return updates


def measure(seed: int) -> dict[str, list[dict[str, float]]]:
    """Compares each way's update to the full batch's, at every clip norm."""
    params, rows = init(seed, width=32, layers=2), make_rows(seed)
    size = ROWS // K
    window = [
        Batch(*(part[start : start + size] for part in rows))
        for start in range(0, ROWS, size)
    ]

    def gradients(batches: list[Batch], mean: bool) -> tuple[np.ndarray, list[Any]]:
        found = [value_and_grad(loss_fn, params, batch, mean) for batch in batches]
        grads = [np.float32(flat(gradient)) for _, gradient in found]
        return np.stack(grads), [n for (_, n), _ in found]

    full = gradients([rows], mean=True)[0][0]
    norm = np.linalg.norm(full)
    result = {}
    for way, (_, mean) in WAYS.items():
        grads, counts = gradients(window, mean)
        result[way] = []
        for ratio in CLIP_NORMS:
            got = update_of(way, np.float32(ratio * norm), grads, counts)
            result[way].append(compare(-full * min(ratio, 1), flat(got)))
    return result


def medians(seeds: int) -> dict[str, dict[str, np.ndarray]]:
    """Medians over `seeds` models for each way and measure, one per clip norm."""
    found = [measure(seed) for seed in range(seeds)]
    return {
        way: {
            name: np.median([[p[name] for p in run[way]] for run in found], axis=0)
            for name in ("relative L2", "cosine", "norm ratio")
        }
        for way in WAYS
    }


def make_table(found: dict[str, dict[str, np.ndarray]]) -> Table:
    """A table of distances, and of cosine and norm at a clip norm of 1."""
    table = Table(
        title="Distance of the update to the full batch's, by the clip norm",
        caption="Relative L2. Cosine and norm: at a clip norm of 1",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
    )
    headers = ["clipped", *(f"{norm:g}" for norm in SHOWN), "cosine", "norm"]
    for i, header in enumerate(headers):
        table.add_column(header, justify="right" if i else "left", no_wrap=True)
    one = CLIP_NORMS.index(1.0)
    for way, values in found.items():
        distances = values["relative L2"][[CLIP_NORMS.index(norm) for norm in SHOWN]]
        cells = [f"{x:.0e}" if x < 1e-5 else f"{x:.2g}" for x in distances]
        cosine, norm = values["cosine"][one], values["norm ratio"][one]
        table.add_row(way, *cells, f"{cosine:.3f}", f"{norm:.2g}")
    return table


def write_picture(path: Path, found: dict[str, dict[str, np.ndarray]]) -> None:
    """Draws the distance and the norm of the update against the clip norm."""
    figure = Figure(figsize=(9.6, 4.4), dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2)
    left.set_title("Distance of the update to the full batch's (relative L2)")
    right.set_title("Norm of the update over the full batch's")
    for way, values in found.items():
        look = {"label": way} | _LOOKS[way]
        left.plot(CLIP_NORMS, values["relative L2"], **look)
        right.plot(CLIP_NORMS, values["norm ratio"], **look)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("clip norm, over the norm of the full batch's gradient")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path)


def main() -> None:
    """Reads the command line, measures, and reports."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="draws the picture, a PNG file"
    )
    options = parser.parse_args()
    # By default, a GPU rounds the factors of float32 matrix products to TF32.
    jax.config.update("jax_default_matmul_precision", "highest")
    found = medians(SEEDS)
    Console(highlight=False, markup=False).print(make_table(found))
    if options.out:
        write_picture(options.out, found)


if __name__ == "__main__":
    main()
