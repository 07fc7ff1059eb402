"""Words that readers search for, and the page that the search must show first."""

from typing import Any

from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

WORDS = {
    "docs/how_it_works": ["gradient accumulation", "micro-batch", "window"],
    "docs/fix_your_loop": ["MultiSteps", "optax.MultiSteps", "pmap", "pmean"],
    "docs/before_you_swap": ["MultiStepsState", "acc_grads", "mini_step"],
    "docs/devices": [
        *("FSDP", "ZeRO", "HSDP", "tensor parallelism", "data parallelism"),
        *("sequence parallelism", "multi-host", "jax.distributed"),
        *("shard_map", "check_vma", "pspec", "manual axes"),
    ],
    "docs/performance": ["memory", "speed", "GPU", "TPU", "remat", "whole gradients"],
    "docs/fit": [
        *("out of memory", "OOM", "RESOURCE_EXHAUSTED"),
        *("batch size", "gradient noise scale"),
    ],
    "docs/ragged": ["padding", "ragged", "length buckets"],
    "docs/reinforcement_learning": [
        *("GRPO", "DAPO", "Dr. GRPO", "RL", "PPO", "RLHF", "policy gradient"),
    ],
    "docs/training_loop": [
        *("checkpoint", "resume", "Orbax", "progress bar", "tqdm", "wandb"),
        *("TensorBoard", "logging", "evaluation"),
    ],
    "docs/coupled_losses": [
        *("contrastive", "CLIP", "SimCLR", "InfoNCE", "GradCache", "negatives"),
        *("MoE", "mixture of experts", "load balancing"),
    ],
    "docs/several_losses": ["KL", "entropy bonus", "auxiliary loss", "denominators"],
    "docs/questions": ["bf16", "bfloat16", "fp16", "float16", "dtype"],
    "docs/own_your_step": ["LoRA", "dropout"],
    "docs/flax": ["NNX", "Linen", "BatchNorm"],
    "docs/maxtext": ["MaxText"],
    "docs/recipes": ["DPO", "DP-SGD", "loss scaling", "jax.checkpoint"],
    "docs/optimizers": ["clipping", "schedules", "lookahead", "NaN"],
    "docs/trainers": [
        *("EasyDeL", "Kauldron", "Keras", "Tunix", "axlearn", "levanter"),
        *("Equinox", "Haiku"),
    ],
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
