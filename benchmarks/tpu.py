"""Memory of programs for a TPU, which are compiled without one."""

import functools
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies

from benchmarks.settings import Settings
from benchmarks.ways import CONTENDERS
from benchmarks.workloads import Workload, stacked_layers, window_of

BASE = "gradients alone"
WAYS = (BASE, "pair by hand", "scan by hand", "train step", "window step")

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
        rows += measure(name, _shapes_alone(make), settings.k)
    return rows


def is_available() -> bool:
    return importlib.util.find_spec("libtpu") is not None


def measure(name: str, workload: Workload, k: int) -> list[dict[str, Any]]:
    """Compiles the program of a micro-batch or a window for one chip of a TPU v5e."""
    place = on_a_chip()
    window, peaks = place(window_of(workload, k)), {}
    for way in WAYS:
        loop = CONTENDERS[way].build(workload, optax.sgd(1e-4), k)
        state = place(jax.eval_shape(loop.init, workload.params))
        adds, *_ = loop.lower(state, window).values()
        peaks[way] = adds.peak()
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


def _shapes_alone(make: Callable[[], Workload]) -> Workload:
    """The workload with the shapes of its parameters instead of arrays."""
    made = []

    def params() -> Any:
        made.append(make())
        return made[0].params

    shapes = jax.eval_shape(params)
    return made[0]._replace(params=shapes)
