"""Words that readers search for, and the page that the search must show first."""

from typing import Any

from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

WORDS = {
    "docs/swap": [
        *("MultiSteps", "optax.MultiSteps", "pmap", "pmean"),
        *("MultiStepsState", "acc_grads", "mini_step"),
    ],
    "docs/devices": [
        *("FSDP", "ZeRO", "HSDP", "tensor parallelism", "data parallelism"),
        *("sequence parallelism", "multi-host", "jax.distributed"),
        *("shard_map", "check_vma", "pspec", "manual axes"),
        *("pipeline", "pipeline parallelism", "elastic", "global batch"),
    ],
    "docs/performance": [
        *("memory", "speed", "GPU", "TPU", "remat", "whole gradients"),
        *("out of memory", "OOM", "RESOURCE_EXHAUSTED", "compilation cache"),
        *("batch size", "gradient noise scale"),
    ],
    "docs/ragged": ["padding", "ragged", "length buckets"],
    "docs/losses": [
        *("GRPO", "DAPO", "Dr. GRPO", "RL", "PPO", "RLHF", "policy gradient"),
        *("contrastive", "CLIP", "SimCLR", "InfoNCE", "GradCache", "negatives"),
        *("MoE", "mixture of experts", "load balancing"),
        *("KL", "entropy bonus", "auxiliary loss", "denominators"),
        *("classifier", "images", "examples", "MTP", "multi-token prediction"),
    ],
    "docs/training_loop": [
        *("checkpoint", "resume", "Orbax", "progress bar", "tqdm", "wandb"),
        *("TensorBoard", "logging", "evaluation", "LoRA", "dropout"),
        *("requests", "forward_backward", "optim_step", "Tinker"),
    ],
    "docs/support": [
        *("bf16", "bfloat16", "fp16", "float16", "dtype", "versions"),
        *("gradient accumulation", "micro-batch", "window"),
    ],
    "docs/flax": ["NNX", "Linen", "BatchNorm", "axis_rules"],
    "docs/recipes": ["DPO", "DP-SGD", "loss scaling", "jax.checkpoint"],
    "docs/optimizers": [
        *("clipping", "schedules", "lookahead", "NaN"),
        *("EMA", "float32 masters", "master weights"),
    ],
    "docs/trainers": [
        *("EasyDeL", "Kauldron", "Keras", "Tunix", "axlearn", "levanter"),
        *("Equinox", "Haiku", "MaxText"),
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
