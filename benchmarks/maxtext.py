"""MaxText's own train step, with its accumulation and with that of maxtext_glue.py.

It needs an environment of its own, with Python 3.12:

    pip install --no-deps -r benchmarks/maxtext_requirements.txt
    export DECOUPLE_GCLOUD=TRUE JAX_PLATFORMS=cpu
    python -m benchmarks.maxtext           # memory on TPUs v5e, without one
    python -m benchmarks.maxtext --check   # exactness and speed on a CPU
"""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import maxtext  # pyrefly: ignore[missing-import]
import numpy as np
import optax
from flax import nnx
from flax.core.spmd import logical_axis_rules
from maxtext.common.train_state_nnx import TrainStateNNX  # pyrefly: ignore[missing-import]
from maxtext.configs import pyconfig  # pyrefly: ignore[missing-import]
from maxtext.trainers.pre_train import train, train_compile  # pyrefly: ignore[missing-import]
from maxtext.utils import maxtext_utils, model_creation_utils, sharding  # pyrefly: ignore[missing-import]

from benchmarks import maxtext_glue
from benchmarks.chips import ENVIRONMENT
from benchmarks.compiled_text import bytes_sent
from benchmarks.measure import interleaved, ratios, relative_error
from benchmarks.report import table

K = 4
OPTIONS = {
    "run_name": "benchmark",
    "enable_checkpointing": False,
    "skip_jax_distributed_system": True,
    "jax_cache_dir": "",
    "dataset_type": "synthetic",
    "compile_topology_num_slices": 1,
}
SMALL = {
    "base_emb_dim": 512,
    "base_num_decoder_layers": 8,
    "base_num_query_heads": 8,
    "base_num_kv_heads": 8,
    "head_dim": 64,
    "attention": "dot_product",
}
WORDS = SMALL | {
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
EXPERTS = FEW_WORDS | {
    "decoder_block": "mixtral",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "base_moe_mlp_dim": 1024,
    "ici_fsdp_parallelism": 4,
    "ici_expert_parallelism": 2,
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
    "experts, FSDP 4 x expert parallel 2": EXPERTS,
    "ZeRO-1 over 8": ZERO_1,
}

TINY = SMALL | {
    "base_num_decoder_layers": 2,
    "base_mlp_dim": 1024,
    "vocab_size": 512,
    "max_target_length": 64,
    "per_device_batch_size": 4,
    "dtype": "float32",
    "dropout_rate": 0.0,
}

shipped = train.gradient_accumulation_loss_and_grad
ours = maxtext_glue.gradient_accumulation_loss_and_grad
WAYS: dict[str, tuple[int, Callable[..., Any]]] = {
    "one micro-batch": (1, shipped),
    "MaxText's": (K, shipped),
    "ours": (K, ours),
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


def print_memory() -> None:
    """Prints peaks less arguments, with all temporaries in brackets, and sent bytes."""
    rows = []
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


def print_check() -> None:
    """Compares packed rows, of which many are short, with the same in one batch."""
    whole = TINY | {"per_device_batch_size": K * TINY["per_device_batch_size"]}
    runs = {
        "one batch": Run(configured(1, whole), shipped),
        "MaxText's": Run(configured(K, TINY), shipped),
        "ours": Run(configured(K, TINY), ours),
    }
    steps = {name: run() for name, run in runs.items()}
    for name, (gradient, loss) in steps.items():
        error = relative_error(gradient, steps["one batch"][0])
        print(f"{name}: loss {loss:.6f}, gradient off by {error:.1e}")
    times = interleaved(runs, rounds=20)
    print("time over MaxText's:", ratios(times, "MaxText's")["ours"])


class Run:
    """MaxText's train step with plain SGD, on one CPU device."""

    def __init__(self, config: Any, accumulate: Callable[..., Any]):
        mesh = maxtext_utils.get_mesh_from_config(config, jax.devices()[:1])
        with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
            make, _ = model_creation_utils.create_nnx_abstract_model(
                config, mesh, rng_key=jax.random.key(0)
            )
            model = make()
            optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
            graphdef, self.state = nnx.split(TrainStateNNX(model, optimizer))
            shardings = jax.tree.map(lambda x: x.sharding, nnx.state(model, nnx.Param))
            step = functools.partial(
                train.train_step, graphdef, config, None, shardings
            )
            train.gradient_accumulation_loss_and_grad = accumulate
            args = self.state, ragged_batch(config)
            self.step = jax.jit(step).lower(*args).compile()
        self.args = args

    def __call__(self) -> tuple[Any, float]:
        """Returns the gradient and the loss."""
        state, metrics = self.step(*self.args)
        old, new = (nnx.state(x.model, nnx.Param) for x in (self.state, state))
        gradient = jax.tree.map(np.subtract, jax.device_get(old), jax.device_get(new))
        return gradient, float(metrics["scalar"]["learning/loss"])


def ragged_batch(config: Any) -> dict[str, np.ndarray]:
    """Rows of 1 to all tokens, each row of up to two packed sequences."""
    rows, length = config.global_batch_size_to_load, config.max_target_length
    rng, place = np.random.default_rng(0), np.arange(length)
    tokens = rng.integers(0, config.vocab_size, (rows, length + 1))
    ends = np.geomspace(1, length, rows).astype(int)[:, None]
    starts = ends // 2  # of the second sequence
    segments = np.where(place < ends, 1 + (place >= starts), 0)
    positions = np.where(place >= starts, place - starts, place)
    return {
        "inputs": tokens[:, :-1],
        "inputs_position": positions,
        "inputs_segmentation": segments,
        "targets": tokens[:, 1:],
        "targets_position": positions,
        "targets_segmentation": segments,
    }


if __name__ == "__main__":
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    print_check() if sys.argv[1:] == ["--check"] else print_memory()
