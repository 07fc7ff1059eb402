"""A picture of a window's padding, before and after planning."""

from pathlib import Path

import matplotlib
import numpy as np

from benchmarks.ragged import dialogue
from benchmarks.settings import Settings
from optax_tokenaccum import choose_length_buckets, plan_window


def picture(settings: Settings, path: Path) -> None:
    """Draws one line per row: tokens dark, padding light."""
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    sequences = dialogue(settings)
    everything = [len(sequence.inputs) for sequence in sequences]
    buckets = choose_length_buckets(everything, settings.shapes)
    drawn = np.random.default_rng(0).permutation(everything)[: settings.sequences]
    plans = plan_window(
        drawn, max_tokens=2 * settings.max_length, length_buckets=buckets
    )
    before = [(length, drawn.max()) for length in drawn]
    after = [
        (drawn[plan.indices[row]] if row < len(plan.indices) else 0, plan.length)
        for plan in plans
        for row in range(plan.num_rows)
    ]
    figure, panels = plt.subplots(1, 2, figsize=(9, 5), sharex=True)
    titles = ("padded to the longest", f"planned in {len(set(buckets))} shapes")
    for panel, rows, title in zip(panels, (before, after), titles, strict=True):
        tokens, widths = np.array(rows).T
        places = np.arange(len(rows))
        panel.barh(places, widths, height=1, color="C7", alpha=0.35, label="padding")
        panel.barh(places, tokens, height=1, color="C0", label="tokens")
        share = widths.sum() / tokens.sum()
        panel.set_title(f"{title}: {share:.2f} times the tokens")
        panel.set_xlabel("positions")
        panel.invert_yaxis()
    panels[0].set_ylabel("rows of a window")
    panels[0].legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
