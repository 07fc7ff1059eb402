"""A loop of one's own over devices: the page's lines are exact, a mean of means is not.

The loss is divided by a device's own tokens. Device 2 has none in micro-batch 0.
"""

import functools
import re
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import problems
import pytest
from helpers import RTOL, cut, relative_error
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from problems import PARAMS

import optax_tokenaccum
from optax_tokenaccum._core.trees import as_varying

PAGE = (Path(__file__).parents[2] / "docs/swap.md").read_text()
[BLOCK] = re.findall(r"^@@ in pmap .*?```", PAGE, re.DOTALL | re.MULTILINE)
LINES = {sign: re.findall(rf"^\{sign}(.*\n)", BLOCK, re.MULTILINE) for sign in "-+"}
N, AXIS = 4, "devices"
MASK = np.arange(3) < np.array([[1, 3, 0, 2], [3, 1, 2, 1]])[..., None]
BATCHES = [problems.batch_of(i, mask.ravel()) for i, mask in enumerate(MASK)]
GRADIENT = jax.tree.map(jnp.float32, problems.exact(PARAMS, *BATCHES))
EXACT = jax.tree.map(jnp.subtract, PARAMS, GRADIENT)
# Closed by hand, after two micro-batches.
OPTIMIZER = optax_tokenaccum.MultiSteps(optax.sgd(1.0), 3)


def mean_loss(params: Any, batch: Any) -> jax.Array:
    loss_sum, n = problems.linear_loss(params, batch)
    return loss_sum / jnp.where(n > 0, n, 1)


def loop(sign: str, params: Any, opt_state: Any, batch: Any) -> Any:
    """Add a micro-batch with the page's lines; those for optax get our own count."""
    each = jax.tree.map(lambda x: as_varying(x, [AXIS]), params)
    grads = jax.grad(mean_loss)(each, batch)
    names = dict(globals(), grads=grads, params=params, opt_state=opt_state)
    names |= {"n": jnp.sum(batch["weights"]), "optimizer": OPTIMIZER}
    exec(textwrap.dedent("".join(LINES[sign])), names)
    if sign == "-":
        update = OPTIMIZER.update
        names["updates"], names["opt_state"] = update(
            names["grads"], opt_state, params, num_tokens=names["n"]
        )
    return optax.apply_updates(params, names["updates"]), names["opt_state"]


def close(params: Any, opt_state: Any) -> Any:
    updates, _ = optax_tokenaccum.close_window(OPTIMIZER, opt_state, params)
    return optax.apply_updates(params, updates)


def in_pmap(sign: str) -> list[Any]:
    """The parameters of each device."""
    over = functools.partial(jax.pmap, axis_name=AXIS, devices=jax.devices()[:N])
    step = over(functools.partial(loop, sign))
    start = PARAMS, OPTIMIZER.init(PARAMS)
    carry = jax.tree.map(lambda x: jnp.stack([x] * N), start)
    for batch in BATCHES:
        rows = jax.tree.map(lambda *x: np.stack(x), *cut(batch, N))
        carry = step(*carry, rows)
    return [{"w": x} for x in over(close)(*carry)["w"]]


def in_shard_map(sign: str, check_vma: bool) -> list[Any]:
    mesh = jax.make_mesh((N,), (AXIS,), (AxisType.Auto,), devices=jax.devices()[:N])

    def over(f: Any, *in_specs: P) -> Any:
        specs = {"in_specs": in_specs, "out_specs": P()}
        return jax.jit(jax.shard_map(f, mesh=mesh, check_vma=check_vma, **specs))

    step = over(functools.partial(loop, sign), P(), P(), P(AXIS))
    carry = PARAMS, OPTIMIZER.init(PARAMS)
    for batch in BATCHES:
        carry = step(*carry, batch)
    shards = over(close, P(), P())(*carry)["w"].addressable_shards
    return [{"w": shard.data} for shard in shards]


WITHOUT_TYPES = {
    "pmap": in_pmap,
    "shard_map": functools.partial(in_shard_map, check_vma=False),
}
WITH_TYPES = functools.partial(in_shard_map, check_vma=True)


@pytest.mark.parametrize("run", [*WITHOUT_TYPES.values(), WITH_TYPES])
def test_readme_gives_every_device_the_update_of_all_tokens(run: Any):
    for params in run("+"):
        assert relative_error(params, EXACT) < RTOL["float32"]


@pytest.mark.parametrize("run", WITHOUT_TYPES.values(), ids=WITHOUT_TYPES)
def test_a_mean_over_devices_with_their_own_counts_makes_replicas_differ(run: Any):
    first, *others = run("-")
    assert relative_error(first, EXACT) > 0.1
    assert all(relative_error(params, first) > 0.1 for params in others)


def test_where_types_are_checked_it_raises_and_says_psum():
    with pytest.raises(ValueError, match=r"along \['devices'\].*jax\.lax\.psum\(n"):
        WITH_TYPES("-")
