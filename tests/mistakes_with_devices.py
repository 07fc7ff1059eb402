"""Rows of docs/bad_input.md: more than one device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from meshes import make_mesh
from mistakes import ADAM, SGD, Row

from optax_tokenaccum import (
    make_train_step,
    make_window_step,
    pad_window,
    regroup_sums,
    token_accumulation,
    window_value_and_grad,
)

W, BATCH, WHOLE = jnp.zeros(()), jnp.ones((9, 2)), PartitionSpec()
ROWS = BATCH[:8]


def nnx_state(size: int) -> Any:
    """As it is restored from a checkpoint without a target."""
    model = nnx.Linear(size, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, token_accumulation(SGD, 2), wrt=nnx.Param)
    return nnx.to_pure_dict(nnx.state({"model": model, "optimizer": optimizer}))


def loss_fn(w: Any, x: Any) -> Any:
    return jnp.sum(w * x), x.size


def spread(make: Any = make_train_step, **options: Any) -> Any:
    options = {"mesh": make_mesh((8,)), "data_axes": "data"} | options
    return make(loss_fn, SGD, **options)


def accumulated(keep: Any, step: Any, state: Any, batch: Any = BATCH) -> Any:
    return step.accumulate(keep(state), batch)


def ran(keep: Any, micro_batches: Any) -> Any:
    step = spread(make_window_step)
    return step(keep(step.init(W)), micro_batches)


def on_all(x: Any) -> Any:
    return jax.device_put(x, NamedSharding(make_mesh((8,)), PartitionSpec()))


def counted_for_all(w: Any, batch: Any) -> Any:
    return jnp.sum(w * batch["x"]), batch["n"]


def summed_over_devices(w: Any, x: Any) -> Any:
    return jax.lax.psum(loss_fn(w, x), "data")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def synchronized(reduce: Any, w: Any) -> Any:
    """As a loop for pmap has it: the gradient is reduced in the backward pass."""
    return w


synchronized.defvjp(lambda _, w: (w, None), lambda reduce, _, g: (reduce(g, "data"),))


def reduced_backward(w: Any, x: Any, reduce: Any = jax.lax.psum) -> Any:
    return loss_fn(synchronized(reduce, w), x)


def counted_where_known(w: Any, batch: Any, count: Any) -> Any:
    return jnp.sum(w * batch["x"]), count(batch)


def counts_that_look_own(_: Any) -> None:
    """Device by device the whole batch is counted: the update is an eighth."""
    counts = [
        lambda batch: jnp.where(jnp.sum(batch["x"]) > 0, batch["n"], 0),
        lambda batch: jnp.maximum(jnp.sum(batch["x"]), batch["n"]),
        lambda batch: jnp.mean(jnp.full(batch["x"].shape, batch["n"])),
    ]
    for count in counts:
        loss = functools.partial(counted_where_known, count=count)
        options = {"mesh": make_mesh((8,)), "data_axes": "data"}
        step = make_train_step(loss, SGD, 1, **options)
        state, _ = step(step.init(W), {"x": ROWS, "n": jnp.float32(16)})
        assert float(state.params) == -1 / 8


def averaged_in_a_loop(w: Any, x: Any) -> Any:
    def add(_: Any, total: Any) -> Any:
        return total + jax.lax.pmean(jnp.sum(w * x), "data")

    return jax.lax.fori_loop(0, 2, add, jnp.zeros(())), x.size


def named_axes(keep: Any, make: Any, loss_fn: Any, batch: Any) -> Any:
    step = make(loss_fn, SGD, mesh=make_mesh((8,)), data_axes="data")
    return getattr(step, "accumulate", step)(keep(step.init(W)), batch)


def under_shard_map(gradients: Any, gradient_and_tokens: Any) -> Any:
    """Trace an update over 8 devices."""
    optimizer = token_accumulation(SGD, 2, gradients=gradients, axis_name="data")

    def step(w: Any, x: Any) -> Any:
        gradient, n = gradient_and_tokens(w, x)
        return optimizer.update(gradient, optimizer.init(w), w, num_tokens=n)[0]

    spec = PartitionSpec
    over = jax.shard_map(
        step, mesh=make_mesh((8,)), in_specs=(spec(), spec("data")), out_specs=spec()
    )
    return jax.eval_shape(over, W, jnp.ones(8))


def window_under_shard_map(
    loss_fn: Any, params: Any = W, spec: Any = WHOLE, **options: Any
) -> Any:
    over = jax.shard_map(
        lambda *args: window_value_and_grad(loss_fn)(*args)[1],
        mesh=make_mesh((8,)),
        in_specs=(spec, PartitionSpec(None, "data")),
        out_specs=spec,
        **options,
    )
    return jax.jit(over)(params, jnp.ones((2, 16)))


def gathered(params: Any, x: Any) -> Any:
    whole = jax.lax.all_gather(params, "data", tiled=True)
    return jnp.sum(x) * jnp.sum(whole), x.size


def divided_by_own_tokens(_: Any) -> None:
    """The gradient of every parameter is the mean, 1, times the devices."""
    options = {"params": jnp.ones(8), "spec": PartitionSpec("data")}
    got = window_under_shard_map(gathered, check_vma=False, **options)
    np.testing.assert_array_equal(got, 8 * np.ones(8))


def mean_gradient(w: Any, x: Any) -> Any:
    return jax.grad(lambda w: jnp.mean(w * x))(w)


def whole_sums(_: Any) -> Any:
    optimizer = token_accumulation(SGD, 2, axis_name="data")
    state = optimizer.init(jnp.zeros(3))._replace(acc_grads=jnp.zeros((8, 3)))
    return jax.vmap(
        lambda x: optimizer.update(x, state, num_tokens=1)[0], axis_name="data"
    )(jnp.ones((8, 3)))


ON_DEVICES: list[Row] = [
    (
        "`mesh` without `data_axes`, or the other way round",
        ValueError,
        [
            lambda _: spread(data_axes=None),
            lambda _: spread(make_window_step, mesh=None),
        ],
    ),
    ("a `mesh` that is not a mesh", TypeError, [lambda _: spread(mesh="data")]),
    (
        "`data_axes` that the mesh does not have",
        ValueError,
        [lambda _: spread(data_axes=("data", "fsdp"))],
    ),
    (
        "`data_axes` that are not names",
        TypeError,
        [lambda _: spread(data_axes=0), lambda _: spread(data_axes=("data", 0))],
    ),
    (
        "an axis twice, or none",
        ValueError,
        [lambda _: spread(data_axes=("data", "data")), lambda _: spread(data_axes=())],
    ),
    (
        "another word in `reduce_every`",
        ValueError,
        [lambda _: spread(reduce_every="step")],
    ),
    (
        "`reduce_every` without a mesh",
        ValueError,
        [
            lambda _: make_train_step(loss_fn, SGD, reduce_every="micro_batch"),
            lambda _: make_window_step(loss_fn, SGD, reduce_every="micro_batch"),
        ],
    ),
    (
        "parameters on another mesh than the step",
        ValueError,
        [
            lambda _: spread().init(
                jax.device_put(
                    W, NamedSharding(make_mesh((4, 2), "explicit"), PartitionSpec())
                )
            )
        ],
    ),
    (
        "rows that the devices do not divide",
        ValueError,
        [
            lambda keep: accumulated(keep, spread(), spread().init(W)),
            lambda keep: ran(keep, jnp.ones((2, 9))),
        ],
    ),
    (
        "an array of the batch that is not rows",
        ValueError,
        [
            lambda keep: accumulated(
                keep, spread(), spread().init(W), {"classes": jnp.ones(16), "x": ROWS}
            ),
            lambda keep: ran(
                keep, {"classes": jnp.ones((2, 16)), "x": jnp.ones((2, 8))}
            ),
        ],
    ),
    (
        "an array on every device that has as many rows as the others",
        ValueError,
        [
            lambda keep: accumulated(
                keep, spread(), spread().init(W), {"classes": on_all(ROWS), "x": ROWS}
            ),
            lambda keep: ran(
                keep, {"classes": on_all(jnp.ones((2, 8))), "x": jnp.ones((2, 8))}
            ),
        ],
    ),
    (
        "a `loss_fn` that names the data axes",
        ValueError,
        [
            lambda keep: named_axes(keep, make_train_step, summed_over_devices, ROWS),
            lambda keep: named_axes(
                keep, make_window_step, averaged_in_a_loop, jnp.ones((2, 8))
            ),
        ],
    ),
    (
        "a `custom_vjp` that synchronizes gradients over the data axes",
        ValueError,
        [
            lambda keep: named_axes(keep, make_train_step, reduced_backward, ROWS),
            lambda keep: named_axes(
                keep,
                make_window_step,
                functools.partial(reduced_backward, reduce=jax.lax.pmean),
                jnp.ones((2, 8)),
            ),
        ],
    ),
    (
        "a count that is the same on all devices",
        ValueError,
        [
            lambda keep: named_axes(
                keep, make_train_step, counted_for_all, {"x": ROWS, "n": 16}
            ),
            lambda keep: named_axes(
                keep,
                make_window_step,
                counted_for_all,
                {"x": jnp.ones((2, 8)), "n": jnp.full(2, 8)},
            ),
            lambda keep: named_axes(
                keep,
                functools.partial(make_window_step, count_fn=lambda x: {"a": x["n"]}),
                lambda w, batch: {"a": jnp.sum(w * batch["x"])},
                {"x": jnp.ones((2, 8)), "n": jnp.full(2, 8)},
            ),
        ],
    ),
    (
        "a count of the whole batch that looks like the device's own",
        None,
        [counts_that_look_own],
    ),
    (
        "a `PlannedWindow` in too few parts",
        ValueError,
        [lambda keep: ran(keep, pad_window([np.ones(3)], pad_values=0, max_tokens=24))],
    ),
    (
        "a state of a run on other devices",
        ValueError,
        [
            lambda keep: accumulated(
                keep, spread(), make_train_step(loss_fn, SGD).init(W), ROWS
            )
        ],
    ),
    (
        "`regroup_sums` of states of different training",
        ValueError,
        [
            lambda keep: regroup_sums(
                keep(make_train_step(loss_fn, ADAM).init(W)),
                keep(make_train_step(loss_fn, SGD).init(W)),
            ),
            lambda keep: regroup_sums(keep(nnx_state(3)), keep(nnx_state(4))),
            lambda keep: regroup_sums(keep(nnx_state(3) | {"more": W}), nnx_state(3)),
            lambda keep: regroup_sums({}, keep(nnx_state(3))),
        ],
    ),
    (
        "`axis_name` outside of `shard_map`",
        ValueError,
        [
            lambda _: (tx := token_accumulation(SGD, 2, axis_name="data")).update(
                W, tx.init(W), num_tokens=1
            )
        ],
    ),
    (
        "sums that `shard_map` did not spread",
        ValueError,
        [whole_sums],
    ),
    (
        "a count that is the same on all devices, with gradients that are not",
        ValueError,
        [
            lambda _: under_shard_map(
                "sum", lambda w, x: (jax.grad(lambda w: loss_fn(w, x)[0])(w * x[0]), 8)
            )
        ],
    ),
    (
        "the loss of one device with a count of all, in a `shard_map`",
        ValueError,
        [
            lambda _: window_under_shard_map(
                lambda w, x: (jnp.sum(w * x), jax.lax.psum(jnp.sum(x), "data"))
            )
        ],
    ),
    (
        "a loss that reads parts of parameters from other devices, in a `shard_map`",
        ValueError,
        [
            lambda _: window_under_shard_map(
                gathered, jnp.ones(8), PartitionSpec("data")
            )
        ],
    ),
    ("the same with `check_vma=False`", None, [divided_by_own_tokens]),
    (
        "means that were reduced already",
        ValueError,
        [
            lambda _: under_shard_map(
                "mean", lambda w, x: (mean_gradient(w, x), jnp.sum(x))
            )
        ],
    ),
]
