"""Rows of docs/bad_input.md: Flax."""

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from mistakes import (
    GRADS,
    OPTIMIZERS,
    PARAMS,
    SGD,
    SKIPS,
    Mistake,
    Row,
    train_step,
    window_step,
    with_full_disk,
)

from optax_tokenaccum import MultiSteps, token_accumulation, window_value_and_grad
from optax_tokenaccum.linen import TrainState
from optax_tokenaccum.nnx import make_train_step, make_window_step

OURS, OURS_AS_CLASS = token_accumulation(SGD, 2), MultiSteps(SGD, 2)
SEEN = np.ones((1, 3), np.float32)
LABELS = {"w": "one", "deep": "other"}
ON_MESH = {"mesh": jax.sharding.Mesh(jax.devices(), "data"), "data_axes": "data"}


def loss_fn(model: Any, batch: Any) -> Any:
    return jnp.sum(model(batch)), len(batch)


def growing_loss_fn(model: Any, batch: Any) -> Any:
    model.seen.set_value(jnp.concatenate([model.seen[...], batch]))
    return loss_fn(model, batch)


def assigning_loss_fn(model: Any, batch: Any) -> Any:
    model.kernel.set_value(jnp.clip(model.kernel[...], -0.01, 0.01))
    return loss_fn(model, batch)


def carrying_loss_fn(model: Any, batch: Any) -> Any:
    """Twice in a row, the parameter takes the value that the batch gives it."""

    def body(model: Any, row: Any) -> tuple[Any, Any]:
        model.kernel.set_value(row[:, None])
        return model, 0.0

    model, _ = nnx.scan(body)(model, batch[:2])
    return loss_fn(model, batch)


def failed_while_it_ran(make: Any, tx: Any, then: str) -> None:
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    step = make(with_full_disk(loss_fn))
    batch = [jnp.ones((2, 8, 3))] * (then != "init")
    with pytest.raises(Exception, match="disk full"):
        step(model, optimizer, jnp.ones((2, 8, 3)))
    getattr(step, then)(model, optimizer, *batch)


def counting_loss_fn(model: Any, batch: Any) -> Any:
    model.seen.set_value(model.seen[...] + jnp.sum(batch > 0))
    return loss_fn(model, batch)


def nnx_stepped(
    *transformations: Any,
    loss_fn: Callable[..., Any] = loss_fn,
    make: Callable[..., Any] = make_train_step,
    seen: Any = SEEN,
    batch: tuple[int, ...] = (8, 3),
    **options: Any,
) -> list[Mistake]:
    def mistake(keep: Any, tx: Any) -> None:
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        model.seen = nnx.Variable(jnp.asarray(seen))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        keep(nnx.state((model, optimizer)))
        make(loss_fn, **options)(model, optimizer, jnp.ones(batch))

    return [lambda keep, tx=tx: mistake(keep, tx) for tx in transformations]


def opened_elsewhere(keep: Any) -> None:
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, OURS, wrt=nnx.Param)
    make_train_step(loss_fn, **ON_MESH)(model, optimizer, jnp.ones((8, 3)))
    keep(nnx.state((model, optimizer)))
    make_train_step(loss_fn)(model, optimizer, jnp.ones((8, 3)))


def linen_applied(*transformations: Any, **arguments: Any) -> list[Mistake]:
    def mistake(keep: Any, tx: Any) -> None:
        state = TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
        keep(state).apply_gradients(grads=GRADS, **arguments)

    return [lambda keep, tx=tx: mistake(keep, tx) for tx in transformations]


def read_after_a_step(read: Callable[[Any, Any], Any]) -> list[Mistake]:
    def mistake(keep: Any) -> None:
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        optimizer, clone = nnx.Optimizer(model, OURS, wrt=nnx.Param), nnx.clone(model)
        step = make_train_step(loss_fn)
        for _ in range(2):  # the close donates the parameters
            step(model, optimizer, jnp.ones((2, 3)))
        keep(nnx.state((model, optimizer)))
        read(clone, optimizer)

    return [mistake]


def trains_nothing(make: Any, tx: Any) -> Mistake:
    def mistake(keep: Any) -> None:
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)
        keep(nnx.state((model, optimizer)))
        make(loss_fn).init(model, optimizer)

    return mistake


class Tied(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(3, 2, rngs=rngs)
        self.out = self.embed


class Counting(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(3, 1, rngs=rngs)
        self.seen = nnx.Variable(jnp.zeros(()))


def in_the_core(*models: Callable[[], Any]) -> list[Mistake]:
    steps = train_step(SGD, 2), window_step(SGD)
    takes = [
        *(optimizer.init for optimizer in (*OPTIMIZERS, *steps)),
        lambda model: window_value_and_grad(loss_fn)(model, jnp.ones((2, 4, 3))),
    ]

    def mistake(keep: Any, take: Any, new_model: Any) -> None:
        model = new_model()
        keep(nnx.state(model))
        take(model)

    return [
        lambda keep, take=take, new_model=new_model: mistake(keep, take, new_model)
        for take in takes
        for new_model in models
    ]


def trained_by_two_threads(keep: Any) -> None:
    """The other thread reads the model first, and writes last."""
    is_read, may_go_on = threading.Event(), threading.Event()

    def slow_loss_fn(model: Any, batch: Any) -> Any:
        if threading.current_thread() is other:
            is_read.set()
            assert may_go_on.wait(60)
        return loss_fn(model, batch)

    model = nnx.Linear(3, 1, use_bias=False, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, OURS, wrt=nnx.Param)
    step = make_train_step(slow_loss_fn, donate=False)
    other = threading.Thread(target=step, args=(model, optimizer, jnp.ones((1, 3))))
    other.start()
    assert is_read.wait(60)
    assert step(model, optimizer, jnp.ones((5, 3))).mini_step == 1
    may_go_on.set()
    other.join()
    assert optimizer.opt_state.mini_step[...] == 1  # of two
    assert optimizer.opt_state.acc_tokens[...] == 1  # of six


WITH_FLAX: list[Row] = [
    (
        "an NNX model with batch statistics, random states or variables of your own, "
        "in the core",
        TypeError,
        in_the_core(
            lambda: nnx.BatchNorm(3, rngs=nnx.Rngs(0)),
            lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(0)),
            lambda: Counting(nnx.Rngs(0)),
            lambda: [Counting(nnx.Rngs(0))],
            lambda: nnx.state(nnx.BatchNorm(3, rngs=nnx.Rngs(0))),
            lambda: {"model": nnx.BatchNorm(3, rngs=nnx.Rngs(0))},
        ),
    ),
    (
        "an NNX model with a variable in two places, in the core",
        TypeError,
        in_the_core(lambda: Tied(nnx.Rngs(0)), lambda: [Tied(nnx.Rngs(0))]),
    ),
    (
        "no `num_tokens` for `linen.TrainState`",
        TypeError,
        linen_applied(OURS, OURS_AS_CLASS),
    ),
    (
        "a `linen.TrainState` around an optimizer that does not accumulate, or twice",
        ValueError,
        linen_applied(
            optax.adam(0.1),
            optax.MultiSteps(SGD, 2),
            optax.MultiSteps(SGD, 2).gradient_transformation(),
            optax.partition({"one": OURS, "other": OURS}, LABELS),
            num_tokens=1,
        ),
    ),
    (
        "an `nnx.Optimizer` around something else, in the `nnx` step",
        TypeError,
        nnx_stepped(
            SGD,
            optax.chain(OURS),
            optax.chain(OURS_AS_CLASS.gradient_transformation()),
            optax.MultiSteps(SGD, 2),
            optax.MultiSteps(SGD, 2).gradient_transformation(),
        )
        + [lambda keep: make_train_step(loss_fn)(keep(PARAMS), OURS, PARAMS["w"])],
    ),
    (
        "an `nnx.Optimizer` whose `wrt` matches no variable of the model",
        ValueError,
        [trains_nothing(make_train_step, OURS), trains_nothing(make_window_step, SGD)],
    ),
    (
        "gradients of a mean in the `nnx` step",
        ValueError,
        nnx_stepped(
            token_accumulation(SGD, 2, gradients="mean"),
            OURS_AS_CLASS,
            OURS_AS_CLASS.gradient_transformation(),
        ),
    ),
    (
        "a variable of another shape after the loss, with a skip function, over a "
        "mesh, or in a window step",
        ValueError,
        nnx_stepped(token_accumulation(SGD, 2, **SKIPS), loss_fn=growing_loss_fn)
        + nnx_stepped(OURS, loss_fn=growing_loss_fn, **ON_MESH)
        + nnx_stepped(
            SGD, loss_fn=growing_loss_fn, make=make_window_step, batch=(2, 8, 3)
        ),
    ),
    (
        "assigning a parameter in the loss of an `nnx` step",
        ValueError,
        nnx_stepped(OURS, loss_fn=assigning_loss_fn)
        + nnx_stepped(OURS, loss_fn=nnx.remat(assigning_loss_fn))
        + nnx_stepped(OURS, loss_fn=nnx.remat(carrying_loss_fn))
        + nnx_stepped(OURS, loss_fn=assigning_loss_fn, **ON_MESH),
    ),
    (
        "a variable of whole numbers that counts the rows of a device",
        ValueError,
        nnx_stepped(OURS, loss_fn=counting_loss_fn, seen=0, **ON_MESH)
        + nnx_stepped(
            SGD,
            loss_fn=counting_loss_fn,
            seen=0,
            make=make_window_step,
            batch=(2, 8, 3),
            **ON_MESH,
        ),
    ),
    (
        "an open window of an `nnx` step on other devices",
        ValueError,
        [opened_elsewhere],
    ),
    (
        "an optimizer that accumulates, in an `nnx` window step",
        ValueError,
        nnx_stepped(
            OURS,
            optax.MultiSteps(SGD, 2),
            optax.chain(OURS),
            make=make_window_step,
            batch=(2, 8, 3),
        ),
    ),
    (
        "an `axis_name` of the accumulation, in the `nnx` step",
        ValueError,
        nnx_stepped(token_accumulation(SGD, 2, axis_name="data"), **ON_MESH),
    ),
    (
        "a model or an optimizer that the `nnx` step has donated, to a call that "
        "failed while it ran or through a clone",
        ValueError,
        [
            lambda _: failed_while_it_ran(make_train_step, OURS, "__call__"),
            lambda _: failed_while_it_ran(make_window_step, SGD, "__call__"),
            lambda _: failed_while_it_ran(make_window_step, SGD, "init"),
        ]
        + read_after_a_step(
            lambda clone, optimizer: make_train_step(loss_fn)(
                clone, optimizer, jnp.ones((2, 3))
            )
        ),
    ),
    (
        "using a clone of a model that the `nnx` step has donated",
        RuntimeError,
        read_after_a_step(lambda clone, _: np.asarray(clone.kernel[...]))
        + read_after_a_step(lambda clone, _: clone(jnp.ones((2, 3)))),
    ),
    (
        "one NNX model that two threads train at once, with `donate=False`",
        None,
        [trained_by_two_threads],
    ),
]
