"""Memory of programs for a TPU, which are compiled without one."""

import functools
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies

from benchmarks.loops import add, apply_sums, empty_sums, size_in_bytes
from benchmarks.measure import net_memory
from benchmarks.settings import Settings
from benchmarks.workloads import Workload, stacked_layers
from optax_tokenaccum import make_train_step, make_window_step, window_value_and_grad

K = 8
BASE = "gradients alone"

# Otherwise libtpu asks the network what machine this is.
ENVIRONMENT = {
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}


def run(settings: Settings) -> list[dict[str, Any]]:
    """Returns a row for every model and way; none if `libtpu` is missing.

    The model is float32 parameters in stacked layers that compute in bfloat16, with
    activations computed again in the backward pass. Its parameters exist as shapes
    only. The optimizer is SGD, which has no state.
    """
    if not is_available():
        settings.say("tpu: skipped, libtpu is not installed (pip install libtpu)")
        return []
    rows = []
    for name, vocabulary in {
        "stacked": 0,
        "stacked, tied embedding": settings.tpu_vocabulary,
    }.items():
        settings.say(f"tpu: {name}")
        layers, width, length = settings.tpu_layers
        make = functools.partial(
            stacked_layers, width, layers, 1, length, vocabulary, jnp.bfloat16
        )
        rows += measure(name, make)
    return rows


def is_available() -> bool:
    return importlib.util.find_spec("libtpu") is not None


def measure(name: str, make: Callable[[], Workload]) -> list[dict[str, Any]]:
    """Compiles every way for one chip of a TPU v5e."""
    place = on_a_chip()
    peaks = {}
    for way, (lowered, held) in _programs(shapes_alone(make), place).items():
        peaks[way] = net_memory(lowered.compile()) + held
    return [
        {
            "model": name,
            "way": way,
            "peak / gradients alone": peak / peaks[BASE],
            "peak MB": round(peak / 1e6),
            "compiled for": f"TPU v5e, libtpu {importlib.metadata.version('libtpu')}",
        }
        for way, peak in peaks.items()
    ]


def on_a_chip() -> Callable[[Any], Any]:
    """A function that places shapes on a TPU v5e, for which programs then compile."""
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    topology = topologies.get_topology_desc("v5e:2x2", platform="tpu")
    chip = jax.sharding.SingleDeviceSharding(topology.devices[0])
    return functools.partial(
        jax.tree.map,
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=chip),
    )


def shapes_alone(make: Callable[[], Workload]) -> Workload:
    """The workload with the shapes of its parameters instead of arrays."""
    made = []

    def arrays() -> Any:
        made.append(make())
        return made[0].params, made[0].frozen

    params, frozen = jax.eval_shape(arrays)
    return made[0]._replace(params=params, frozen=frozen)


def _programs(
    workload: Workload, place: Callable[[Any], Any]
) -> dict[str, tuple[jax.stages.Lowered, int]]:
    """Every program, and the bytes of the sums among its arguments."""
    rng = np.random.default_rng(0)
    params = place(workload.params)
    batch = workload.micro_batch(rng)
    window = jax.tree.map(lambda x: jax.ShapeDtypeStruct((K, *x.shape), x.dtype), batch)
    batch, window = place(batch), place(window)
    loss_fn = functools.partial(workload.loss_fn, frozen=None)
    gradient = jax.value_and_grad(loss_fn, has_aux=True)

    def terms(params: Any, batch: Any) -> Any:
        (loss_sum, num_tokens), gradients = gradient(params, batch)
        return loss_sum, num_tokens, gradients

    def accumulate(sums: Any, params: Any, batch: Any) -> Any:
        return add(sums, terms(params, batch))

    def scan(params: Any, micro_batches: Any) -> Any:
        sums, _ = jax.lax.scan(
            lambda sums, batch: (add(sums, terms(params, batch)), None),
            empty_sums(params),
            micro_batches,
        )
        return apply_sums(sgd, params, sgd.init(params), sums)[0]

    sgd = optax.sgd(1e-4)
    sums = place(jax.eval_shape(empty_sums, params))
    train_step, window_step = (
        make_train_step(loss_fn, sgd),
        make_window_step(loss_fn, sgd),
    )
    state = place(jax.eval_shape(train_step.init, params))
    held = size_in_bytes(state.opt_state.acc_grads)
    window_state = place(jax.eval_shape(window_step.init, params))
    of_window = window_value_and_grad(loss_fn)
    return {
        BASE: (jax.jit(gradient).lower(params, batch), 0),
        "pair by hand": (
            jax.jit(accumulate, donate_argnums=0).lower(sums, params, batch),
            size_in_bytes(sums),
        ),
        "scan by hand": (
            jax.jit(scan, donate_argnums=0).lower(params, window),
            0,
        ),
        "train step": (train_step.accumulate.lower(state, batch), held),
        "window step": (window_step.lower(window_state, window), 0),
        "window_value_and_grad": (jax.jit(of_window).lower(params, window), 0),
    }
