"""Loss curves of full batches, of this library and of a mean of means.

    pip install -e ".[examples]"
    PYTHONPATH=examples python -m benchmarks.curves benchmarks/results/curves

trains the model of `examples/finetune.py` on its dialogues, and evaluates on those held
out. A number after the folder replaces that of updates.
"""

import statistics
import sys
from pathlib import Path

import data
import jax
from finetune import ROWS, distance, five_methods, mean_loss
from model import init

from benchmarks import report
from benchmarks.measure import say

METHODS = {"full batch": "full-batch", "exact": "make_train_step"}
METHODS |= {"naive": "optax.MultiSteps"}
SEEDS, K, POINTS = 3, 16, 3


def by_seed(updates: int) -> report.Rows:
    """Losses along the way, and distances from the parameters of full batches."""
    rows: report.Rows = []
    train, validation = data.load()
    held_out, of_k = data.batches_in_order(validation), five_methods(K)
    for seed in range(SEEDS):
        states = {}
        for name, way in METHODS.items():  # a step donates its parameters
            key = jax.random.key(seed)
            params = init(key, vocabulary=data.VOCABULARY, d_model=64, layers=2)
            states[name] = of_k[way].init(params)
        windows = data.make_windows(train, (updates, K, ROWS), seed)
        for done, window in enumerate(windows, start=1):
            for name, way in METHODS.items():
                for batch in getattr(window, of_k[way].batches):
                    states[name], _ = of_k[way].step(states[name], batch)
            if done % max(updates // POINTS, 1) == 0:
                row = {x: mean_loss(y.params, held_out) for x, y in states.items()}
                row["naive - full batch"] = row["naive"] - row["full batch"]
                for name in ("exact", "naive"):
                    far = distance(states[name].params, states["full batch"].params)
                    row[f"distance, {name}"] = float(far)
                rows.append({"updates": done, "seed": seed} | row)
                say(f"curves: {rows[-1]}")
    return rows


def main(folder: str, updates: str = "300") -> None:
    """Writes the results of every seed, and their medians, least and most."""
    with jax.default_matmul_precision("highest"):  # a GPU would round to TF32
        found, rows = by_seed(int(updates)), []
    for done in dict.fromkeys(row["updates"] for row in found):
        row = {"updates": done}
        for name in [*found[0]][2:]:
            values = sorted(x[name] for x in found if x["updates"] == done)
            digits = ".2g" if "distance" in name else ".3f"
            of = statistics.median(values), values[0], values[-1]
            row[name] = "{} ({} to {})".format(*(format(x, digits) for x in of))
        rows.append(row)
    print(report.write({"curves": rows, "curves by seed": found}, Path(folder)))


if __name__ == "__main__":
    main(*sys.argv[1:])
