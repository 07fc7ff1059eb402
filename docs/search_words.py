"""Words that readers search for, and the page that the search must show first."""

from typing import Any

from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

WORDS = {
    "docs/how_it_works": ["gradient accumulation", "micro-batch", "window"],
    "docs/fix_your_loop": ["MultiSteps", "optax.MultiSteps"],
    "docs/several_devices": [
        *("FSDP", "ZeRO", "HSDP", "tensor parallelism", "data parallelism"),
        *("multi-host", "jax.distributed"),
    ],
    "docs/many_devices": ["shard_map", "check_vma"],
    "docs/performance": ["memory", "speed", "GPU", "TPU", "remat", "whole gradients"],
    "docs/does_it_fit": ["out of memory", "OOM", "RESOURCE_EXHAUSTED"],
    "docs/how_many_tokens": ["batch size", "gradient noise scale"],
    "docs/ragged_run": ["padding", "ragged", "length buckets"],
    "docs/reinforcement_learning": [
        *("GRPO", "DAPO", "Dr. GRPO", "RL", "PPO", "RLHF", "policy gradient"),
    ],
    "docs/resuming": ["checkpoint", "resume", "Orbax"],
    "docs/several_losses": ["KL", "entropy bonus", "auxiliary loss", "denominators"],
    "docs/scope": ["bf16", "bfloat16", "fp16", "float16", "dtype"],
    "docs/own_your_step": ["LoRA", "dropout", "axlearn", "levanter"],
    "docs/flax": ["NNX", "Linen", "BatchNorm"],
    "docs/easydel": ["EasyDeL"],
    "docs/kauldron": ["Kauldron"],
    "docs/keras": ["Keras"],
    "docs/maxtext": ["MaxText"],
    "docs/tunix": ["Tunix"],
    "docs/recipes/losses": ["DPO", "loss scaling", "jax.checkpoint"],
    "docs/recipes/optimizers": ["clipping", "schedules", "lookahead", "NaN"],
    "docs/recipes/other_libraries": ["Equinox", "Haiku"],
}


class AddWords(SphinxTransform):
    """Adds the words of a page to the index, as main entries."""

    default_priority = 5

    def apply(self, **_: Any) -> None:
        words = WORDS.get(self.env.docname, [])
        entries = [("single", word, "", "main", None) for word in words]
        if entries:
            self.document.insert(0, addnodes.index(entries=entries))


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_transform(AddWords)
    return {"parallel_read_safe": True}
