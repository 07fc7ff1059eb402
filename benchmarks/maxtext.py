"""Memory of MaxText's train step on TPUs v5e, which is compiled without one.

Its own accumulation is compared with that of examples/trainers/maxtext_glue.py.

It needs an environment of its own, with Python 3.12:

    pip install --no-deps -r benchmarks/maxtext_requirements.txt
    export DECOUPLE_GCLOUD=TRUE JAX_PLATFORMS=cpu
    python -m benchmarks.maxtext
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import maxtext
from flax.core.spmd import logical_axis_rules
from maxtext.configs import pyconfig
from maxtext.trainers.pre_train import train, train_compile
from maxtext.utils import maxtext_utils, sharding

from benchmarks import chips
from benchmarks.compiled_text import bytes_sent
from benchmarks.report import table
from examples.trainers import maxtext_glue

K = 4
OPTIONS = {
    "run_name": "benchmark",
    "enable_checkpointing": False,
    "skip_jax_distributed_system": True,
    "jax_cache_dir": "",
    "dataset_type": "synthetic",
    "compile_topology_num_slices": 1,
}
WORDS = {
    "base_emb_dim": 512,
    "base_num_decoder_layers": 8,
    "base_num_query_heads": 8,
    "base_num_kv_heads": 8,
    "head_dim": 64,
    "attention": "dot_product",
    "compile_topology": "v5e-8",
    "base_mlp_dim": 2048,
    "vocab_size": 32000,
    "max_target_length": 2048,
    "per_device_batch_size": 2,
}
FEW_WORDS = WORDS | {
    "base_num_decoder_layers": 4,
    "base_mlp_dim": 1024,
    "vocab_size": 8192,
    "max_target_length": 1024,
    "per_device_batch_size": 1,
}
ZERO_1 = FEW_WORDS | {
    "ici_data_parallelism": 8,
    "ici_fsdp_parallelism": 1,
    "shard_optimizer_over_data": True,
}
LLAMA_7B = {
    "compile_topology": "v5e-16",
    "model_name": "llama2-7b",
    "max_target_length": 2048,
    "per_device_batch_size": 1,
}
LAYOUTS = {
    "7B, FSDP 16": LLAMA_7B,
    "7B, FSDP 4 x tensor parallel 4": LLAMA_7B
    | {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 4},
    "32,000 words, FSDP 8": WORDS,
    "ZeRO-1 over 8": ZERO_1,
}

shipped = train.gradient_accumulation_loss_and_grad
WAYS: dict[str, tuple[int, Callable[..., Any]]] = {
    "one micro-batch": (1, shipped),
    "MaxText's": (K, shipped),
    "ours": (K, maxtext_glue.gradient_accumulation_loss_and_grad),
}


def configured(k: int, options: dict[str, Any]) -> Any:
    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    options = OPTIONS | {"gradient_accumulation_steps": k} | options
    return pyconfig.initialize(["", str(base)], **options)


def compiled_step(config: Any) -> Any:
    """Compiles MaxText's train step as its `train_loop` does, for a topology."""
    mesh = train_compile.get_topology_mesh(config)
    args, _, state, _, model = train_compile.get_shaped_inputs(mesh, config)
    params, state = sharding.maybe_update_params_sharding_with_opt(config, state)
    placed = jax.tree.map(lambda x, s: x.update(sharding=s), args[0], state)
    data = sharding.get_input_data_sharding(config, mesh)
    step, *signature = maxtext_utils.get_functional_train_with_signature(
        train.train_step, data, state, model, config, params
    )
    names = "in_shardings", "out_shardings", "static_argnums", "donate_argnums"
    jitted = jax.jit(step, **dict(zip(names, signature, strict=True)))
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        return jitted.lower(placed, *args[1:]).compile()


if __name__ == "__main__":
    chips.prepare()
    rows = []  # peaks less arguments, and all temporaries in brackets
    for name, options in LAYOUTS.items():
        row = {"MB": name}
        for way, (k, accumulate) in WAYS.items():
            train.gradient_accumulation_loss_and_grad = accumulate
            step = compiled_step(configured(k, options))
            memory = step.memory_analysis()
            peak = memory.peak_memory_in_bytes - memory.argument_size_in_bytes
            row[way] = f"{peak / 1e6:,.0f} ({memory.temp_size_in_bytes / 1e6:,.0f})"
            size = bytes_sent(step.as_text())
            print(f"{name}, {way}: {row[way]}, sends {size:,} bytes", flush=True)
        rows.append(row)
    print(table(rows))
