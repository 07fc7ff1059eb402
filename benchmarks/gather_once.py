"""What FSDP sends in a window, and with one gather of a copy in bfloat16.

    python -m benchmarks.gather_once

Compiled for chips that need not be there, as in `benchmarks.ahead`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.ahead import LAYOUTS, Place, models
from benchmarks.chips import CHIPS, prepare
from benchmarks.compiled_text import bytes_sent
from optax_tokenaccum import make_window_step, window_value_and_grad

K, LAYERS, WIDTH, LENGTH = 4, 8, 1024, 512
ADAMW = optax.adamw(1e-4)


@jax.custom_vjp
def read(param: jax.Array, copy: jax.Array) -> jax.Array:
    """The value of the copy, and the gradient of the parameter."""
    return copy


read.defvjp(
    lambda param, copy: (copy, None), lambda _, g: (g.astype(jnp.float32), None)
)


def step_of_copy(
    loss_fn: Callable[..., Any], everywhere: NamedSharding
) -> Callable[..., Any]:
    def of_copy(params: Any, batch: Any, copy: Any, frozen: Any) -> Any:
        return loss_fn(jax.tree.map(read, params, copy), batch, frozen)

    def step(params: Any, opt_state: Any, window: Any, frozen: Any) -> Any:
        copy = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        copy = jax.lax.with_sharding_constraint(copy, everywhere)
        given = {"copy": copy, "frozen": frozen}
        value, gradient = window_value_and_grad(of_copy)(params, window, **given)
        updates, opt_state = ADAMW.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step


def main() -> None:
    prepare()
    for name, chip in CHIPS.items():
        place = Place(chip.devices(), LAYOUTS["FSDP"])
        workload = place.workload(models(LAYERS, WIDTH, LENGTH, 0)["float32"], True)
        window = place.window(workload, K).stacked
        options = {"mesh": place.mesh, "data_axes": "data"}
        options["reduce_every"] = "micro_batch"
        ours = make_window_step(workload.loss_fn, ADAMW, **options)
        state = ours.init(workload.params)
        of_copy = step_of_copy(workload.loss_fn, NamedSharding(place.mesh, P()))
        given = workload.params, place.state(workload.params, ADAMW.init)
        out = jax.tree.map(lambda x: x.sharding, given)
        jitted = jax.jit(of_copy, donate_argnums=(0, 1), out_shardings=(*out, None))
        lowered = {
            "in every micro-batch": ours.lower(state, window, frozen=workload.frozen),
            "once": jitted.lower(*given, window, workload.frozen),
        }
        for way, program in lowered.items():
            compiled: Any = program.compile()
            found = compiled.memory_analysis()
            made = found.output_size_in_bytes - found.alias_size_in_bytes
            held = (found.temp_size_in_bytes + made) / 1e6
            sent = bytes_sent(compiled.as_text() or "") / 1e9
            print(f"{name}, gathered {way}: sends {sent:.2f} GB, holds {held:.0f} MB")


if __name__ == "__main__":
    main()
