"""What raises an error: the code of each mistake, and the message below it."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_tokenaccum.debug
import optax_tokenaccum.losses
import optax_tokenaccum.nnx
from optax_tokenaccum import make_train_step, make_window_step, token_accumulation
from optax_tokenaccum.linen import TrainState as OurTrainState
from optax_tokenaccum.ragged import MicroBatchPlan, pad_micro_batch

# What the mistakes below use.

sgd, adam = optax.sgd(0.1), optax.adam(0.1)
params, batch, window = {"w": jnp.ones(3)}, jnp.ones((8, 3)), jnp.ones((2, 8, 3))
losses, mask = jnp.ones((2, 3)), jnp.ones((2, 3), bool)
skips = {"should_skip_update_fn": optax.skip_not_finite}
ours, theirs = token_accumulation(sgd, 2), optax.MultiSteps(sgd, 2)
state, old = ours.init(params), theirs.init(params)
update = jax.jit(ours.update)
slow, both = optax.lookahead(ours, 5, 0.5), optax.LookaheadParams(params, params)


def loss_fn(params: Any, batch: Any) -> Any:
    return jnp.sum(batch @ params["w"]), len(batch)


train_step = make_train_step(loss_fn, sgd, 2)
window_step = make_window_step(loss_fn, sgd)
train_state, window_state = train_step.init(params), window_step.init(params)
new_step = partial(make_train_step, loss_fn, sgd, 2)


class OnMesh(dict[str, Any]):
    """Names of a step over 8 devices, which is made when one of them is used."""

    def __missing__(self, name: str) -> Any:
        if name not in ("mesh", "over", "everywhere", "step", "step_state"):
            raise KeyError(name)
        over = meshes.over("8")
        mesh, step = over["mesh"], new_step(**over)
        self.update(mesh=mesh, over=over, everywhere=NamedSharding(mesh, P()))
        self.update(step=step, step_state=step.init(params))
        return self[name]


on_mesh = OnMesh()
stateful = partial(
    make_train_step, optimizer=sgd, every_k_schedule=2, has_model_state=True
)
sequences = [{"ids": np.arange(n), "mask": np.ones(n, bool)} for n in (2, 4)]
plan = MicroBatchPlan(indices=np.array([1, 0]), num_rows=2, length=4)
pad = partial(pad_micro_batch, plan=plan, pad_values=0)
of_steps = optax_tokenaccum.nnx
model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
trained_by = partial(nnx.Optimizer, model, wrt=nnx.Param)
applied_by_flax = partial(TrainState.create, apply_fn=None, params=params)
applied = partial(OurTrainState.create, apply_fn=None, params=params)


def updated(optimizer: Any) -> Any:
    return optimizer.update(params, optimizer.init(params), params, num_tokens=1)


def train(loss_fn: Any = loss_fn, batch: Any = batch, tx: Any = sgd, **kwargs: Any):
    step = make_train_step(loss_fn, tx, 2, **kwargs)
    return step(step.init(params), batch)


def train_window(loss_fn: Any, batch: Any = window, **kwargs: Any) -> Any:
    step = make_window_step(loss_fn, sgd, **kwargs)
    return step(step.init(params), batch)


def with_rows(new_rows: Any) -> Any:
    """A call of a step whose loss changes the model's state in this way."""
    step = stateful(lambda params, rows, batch: (loss_fn(params, batch), new_rows))
    return step(step.init(params, {"rows": 0}), batch)


def member(update: Any) -> Any:
    return optax.GradientTransformationExtraArgs(optax.identity().init, update)


strict = member(lambda updates, state, params=None, *, rho=1.0: (updates, state))
by_tokens = member(lambda u, state, params=None, *, num_tokens: (u, state))
wrong = member(lambda u, state, params=None, **extra: by_tokens.update(u, **extra))


@jax.custom_vjp
def synchronized(w: Any) -> Any:
    """As a loop for pmap has it: the gradient is reduced in the backward pass."""
    return w


synchronized.defvjp(lambda w: (w, None), lambda _, g: (jax.lax.psum(g, "data"),))


def sum_and_rows(model: Any, batch: Any) -> Any:
    return jnp.sum(model(batch)), len(batch)


def assigning(name: str, value: Any) -> Any:
    """A loss that assigns `value(old, batch)` to a variable of the model."""

    def nnx_loss_fn(model: Any, batch: Any) -> Any:
        variable = getattr(model, name)
        variable.set_value(value(variable[...], batch))
        return sum_and_rows(model, batch)

    return nnx_loss_fn


growing = assigning("seen", lambda seen, batch: batch)
counting = assigning("seen", lambda seen, batch: seen + jnp.sum(batch > 0))
clipping = assigning("kernel", lambda kernel, batch: jnp.clip(kernel, -0.01, 0.01))


def nnx_pair(tx: Any) -> Any:
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    model.seen = nnx.Variable(jnp.int32(0))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def nnx_train(tx: Any, loss_fn: Any = sum_and_rows, **options: Any) -> None:
    """Call a train step for NNX; or a window step, if `tx` does not accumulate."""
    of_window = tx is sgd
    make = of_steps.make_window_step if of_window else of_steps.make_train_step
    make(loss_fn, **options)(*nnx_pair(tx), window if of_window else batch)


def opened_elsewhere() -> None:
    pair = nnx_pair(ours)
    for options in (on_mesh["over"], {}):
        of_steps.make_train_step(sum_and_rows, **options)(*pair, batch)


def with_an_old_clone() -> None:
    """Use a clone of a model whose arrays a step has taken along."""
    model, optimizer = nnx_pair(sgd)
    clone, step = nnx.clone(model), of_steps.make_window_step(sum_and_rows)
    step(model, optimizer, window)
    step(clone, optimizer, window)


def twice(next_state: Any = lambda state, returned: state) -> None:
    step = new_step()
    state = step.init(params)
    step(next_state(state, step(state, batch)), batch)


# The first clause of each error, and below it the mistakes that raise it.
ERRORS = """
    ValueError: The inner optimizer already accumulates
      updated(token_accumulation(token_accumulation(sgd, 2), 2))
      make_train_step(loss_fn, optax.MultiSteps(sgd, 2), 2)
      make_window_step(loss_fn, optax.MultiSteps(sgd, 2).gradient_transformation())
      MultiSteps(optax.chain(optax.clip(1.0), MultiSteps(sgd,
        2).gradient_transformation()), 2).init(params)
    TypeError: The state must be the TokenAccumulationState that init or the last
      update(params, sgd.init(params), params, num_tokens=1)
      update(params, old, params, num_tokens=1)
      update(params, state._asdict(), params, num_tokens=1)
    ValueError: skip_state must come from this should_skip_update_fn (keep the
      token_accumulation(sgd, 2, **skips).update(params, state, num_tokens=1)
    ValueError: has_updated takes a state that holds one TokenAccumulationState
      has_updated(old)
      has_updated((state, state))
      applied(tx=sgd).apply_gradients(grads=params, num_tokens=1)
      applied(tx=theirs).apply_gradients(grads=params, num_tokens=1)
      applied(tx=optax.chain(ours, ours)).apply_gradients(grads=params, num_tokens=1)
    ValueError: close_window takes an optimizer that accumulates, and its state
      close_window(adam, adam.init(params), params)
      close_window(theirs, old, params)
    ValueError: close_window takes the state of one accumulation
      close_window(ours, jax.tree.map(lambda x: x[None], state), params)
    ValueError: Gradients (of value_and_grad, the second result) must have the
      close_window(ours, trained_by(ours).opt_state, nnx.state(model, nnx.Param))
      update({"w": jnp.ones(4)}, state, params, num_tokens=1)
      ours.update((batch,), ours.init([batch]), [batch], num_tokens=1)
      update((jnp.ones(()), params), state, params, num_tokens=1)
    ValueError: A state of optax.MultiSteps can be taken over between two windows
      from_multi_steps_state(ours, old._replace(mini_step=jnp.int32(1)), params)
    ValueError: The old state must be that of the same optimizer with
      from_multi_steps_state(ours, old._asdict(), params)
      from_multi_steps_state(ours, adam.init(params), params)
    ValueError: The old inner state must be one of tx's inner optimizer and
      from_multi_steps_state(ours, optax.MultiSteps(adam, 2).init(params), params)
    ValueError: tx must accumulate, with an optimizer of optax_tokenaccum
      from_multi_steps_state(sgd, old, params)
    ValueError: every_k_schedule must be an integer of at least 1 or a function of
      token_accumulation(sgd, 0)
    TypeError: every_k_schedule must be an integer of at least 1 or a function of
      MultiSteps(sgd, 2.0)
    TypeError: The inner optimizer must be one of optax, such as optax.adamw(1e-3)
      token_accumulation(optax.adamw, 2)
    TypeError: loss_fn must be a function
      make_train_step(sgd, loss_fn, 2)
      audit(print, None, params, [batch])
      check_loss_fn(None, params, [batch], mask=None)
      audit(print, params, loss_fn, [batch])
      check_loss_fn(params, loss_fn, [batch], mask=None)
    TypeError: value_and_grad_fn must return ((value, num_tokens), grads), as
      accumulate_over_window(jax.grad(loss_fn, has_aux=True))(params, window)
    TypeError: should_skip_update_fn must be a function
      token_accumulation(sgd, 2, should_skip_update_fn=True)
    ValueError: accumulator_dtype must be floating
      MultiSteps(sgd, 2, accumulator_dtype=jnp.int32)
    ValueError: gradients must be 'sum' or 'mean', what they are of
      accumulate_over_window(loss_fn, gradients="total")
    TypeError: should_skip_update_fn must return (a bool, a tree)
      token_accumulation(sgd, 2, should_skip_update_fn=lambda *_: True).init(params)
      updated(token_accumulation(sgd, 2, should_skip_update_fn=lambda *_: (mask[0],
        ())))
    TypeError: MultiSteps needs every_k_schedule
      MultiSteps(sgd, None)
    AttributeError: acc_grads, in optax a running mean, is grad_sums
      state.acc_grads
    TypeError: Parameters must be arrays of numbers
      ours.init({"w": params["w"], "act": jnp.tanh})
      MultiSteps(sgd, 2).init({"act": "relu"})
      train_step.init({"w": params, "key": jax.random.key(0)})
      train_step.init({"act": jnp.tanh})
    ValueError: Scales of 8-bit floats cannot be summed
      token_accumulation(sgd, 2).init({"_overwrite_with_gradient": 1.0})
    TypeError: tx takes no num_tokens
      with_num_tokens(optax.GradientTransformation(*sgd), 3)
    ValueError: tx must accumulate, or num_tokens would be dropped
      with_num_tokens(sgd, 3).update(params, sgd.init(params), params)
    TypeError: update() needs num_tokens, the number of loss tokens (or the sum of
      update(params, state, params)
      applied_by_flax(tx=ours).apply_gradients(grads=params, num_tokens=1)
      update(params, state, params, n_tokens=8)
      slow.update(both, slow.init(both), both)
    TypeError: num_tokens must be a real scalar, one number for the whole
      update(params, state, params, num_tokens=mask)
      update(params, state, params, num_tokens=[1])
      ours.update(params, state, params, num_tokens=True)
    ValueError: num_tokens must be a real scalar, one number for the whole
      update(params, state, params, num_tokens=jnp.ones(8))
      train(lambda params, x: (jnp.sum(x), jnp.ones(4)))
    ValueError: num_tokens must be finite and >= 0
      ours.update(params, state, params, num_tokens=-1)
      train_window(lambda params, x: (jnp.sum(x), -1))
    ValueError: This step has no schedule that closes its windows
      make_train_step(loss_fn, sgd)(train_state, batch)
    TypeError: The state must be the StepState that step.init or the last call
      train_step(train_state._asdict(), batch)
      train_step.accumulate(train_state._asdict(), batch)
      window_step(window_state._asdict(), window)
      train_step(params, batch)
      twice(lambda state, returned: returned)
    ValueError: loss_fn must return the model state with the tree, shapes and
      with_rows({})
      with_rows({"rows": jnp.ones(2)})
      with_rows({"rows": 0.5})
    ValueError: The state was given to an earlier call, which donated its buffers
      twice()
    ValueError: k must divide the rows of the batch
      split_batch({"x": jnp.ones(6)}, 4)
    ValueError: num_micro_batches must be from 0 to 2
      window_step(window_state, window, num_micro_batches=5)
    TypeError: With has_aux=False, loss_fn must return (loss_sum, num_tokens)
      train(lambda params, x: jnp.sum(x))
      train(lambda params, x: (jnp.sum(x), None))
      train(lambda params, x: (jnp.sum(x), (8, {})))
      train_window(lambda params, x: (jnp.sum(x), 8, {}))
      check_loss_fn(lambda params, x: (jnp.sum(x), (8, {})), params, [batch],
        mask=None)
    ValueError: With has_aux=False, loss_fn must return (loss_sum, num_tokens)
      train_window(lambda params, x: (x, 8))
    TypeError: With has_aux=True, loss_fn must return (loss_sum, (num_tokens,
      train(loss_fn, has_aux=True)
    TypeError: The opt_state must be a WindowOptState
      window_step(train_state, window)
    TypeError: has_model_state=True
      stateful(loss_fn).init(params)
    TypeError: has_model_state=False
      train_step.init(params, {"rows": 0})
    TypeError: With has_model_state=True, loss_fn must return ((loss_sum,
      stateful(lambda p, s, x: loss_fn(p, x))(stateful(loss_fn).init(params, {}), batch)
    ValueError: The states must be of the same training
      reshard_state(make_train_step(loss_fn, adam).init(params), train_state)
    TypeError: labels, after logits, must be integers
      softmax_cross_entropy_sum(mask.astype(int), losses[..., None])
    ValueError: max_length, a constant of the run, goes with
      reduce_loss(losses, mask, "seq-mean-token-sum-norm")
      reduce_loss(losses, mask, max_length=3)
    ValueError: reduction must be one of ('token-mean', 'seq-mean-token-mean',
      reduce_loss(losses, mask, "mean")
    ValueError: losses and mask must both be [rows, length]
      reduce_loss(losses, mask[0])
    ValueError: segment_ids must be integers of the shape of mask
      reduce_loss(losses, mask, segment_ids=mask[0].astype(int))
    ValueError: count_empty needs segment_ids, and a mean over sequences
      reduce_loss(losses, mask, count_empty=True, segment_ids=mask.astype(int))
    ValueError: per must be 'token' or 'sequence'
      check_loss_fn(loss_fn, params, [batch], mask=None, per="row")
    ValueError: rtol must be between 0 and 1, or None
      audit(print, loss_fn, params, [batch], rtol=1)
    TypeError: run must be a function
      audit(None, loss_fn, params, [batch])
    TypeError: run must be a function of (optimizer, params, micro_batches)
      audit(loss_fn, lambda optimizer, params, x: params, params, [batch])
      audit(partial(loss_fn, batch=batch), print, params, [batch])
    TypeError: loss_fn must be a function of (params, micro_batch)
      audit(print, lambda batch: (0.0, 1), params, [batch])
    ValueError: A window must have tokens, and a gradient that is finite and not 0
      audit(print, loss_fn, params, [])
      audit(print, lambda params, x: (0 * loss_fn(params, x)[0], 8), params, [batch])
    ValueError: run must return the parameters, moved
      audit(lambda *_: {}, loss_fn, params, [batch])
    TypeError: micro_batches must be a list
      audit(print, loss_fn, params, {"x": batch})
    TypeError: params must hold arrays of floats
      audit(print, loss_fn, {"w": 1}, [batch])
      audit(print, loss_fn, [np.arange(1000)], [batch])
    ValueError: mask must be one of ['the root']
      check_loss_fn(loss_fn, params, [batch], mask="labels")
    ValueError: A sequence must have a leaf with an axis, its tokens
      pad([[1, 2, 3], [4, 5, 6]])
    ValueError: The leaves of a sequence must have one length
      pad([{"ids": np.arange(2), "mask": np.ones(2)}, {"ids": np.arange(4), "mask":
        np.ones(1)}])
    ValueError: The leaf the root of sequence 0 must fit its dtype, int32
      pad([np.full(2, 2**40 + 7), np.arange(4)])
    ValueError: The leaf the root of sequence 1 must fit its dtype, int32
      pad([np.arange(2), np.full(4, 0.5)])
    ValueError: Parameters must be on the mesh of the step, or on one device
      step.init(jax.device_put(params, NamedSharding(meshes.make_mesh((8,), "explicit"),
        P())))
    ValueError: The rows of a micro-batch must be a multiple of 8, the devices
      step(step_state, batch[:7])
    TypeError: A batch must be a pytree of arrays: at ['text'][0] got a str
      train_step(train_state, {"x": batch, "text": ["a"] * 8})
    TypeError: A batch must be a pytree of arrays: at the root got a
      train_step(train_state, object())
    TypeError: micro_batches must be a pytree of arrays: at [0] got a
      window_step(window_state, [object()])
    ValueError: All arrays of a micro-batch must have the same number of rows, and
      step(step_state, {"classes": batch.repeat(2, 0), "x": batch})
      step(step_state, {"classes": jax.device_put(batch, everywhere), "x": batch})
    ValueError: loss_fn must not name the data axes, because the sums of all
      train(lambda *args: jax.lax.psum(loss_fn(*args), "data"), **over)
      train(lambda p, x: (jnp.sum(x @ synchronized(p["w"])), len(x)), **over)
    ValueError: num_tokens must count the rows that loss_fn is given, those of one
      train(lambda p, b: (jnp.sum(b[0] @ p["w"]), b[1]), (batch, jnp.int32(8)), **over)
      train_window(lambda p, b: (jnp.sum(b[0] @ p["w"]), b[1]), (window, jnp.full(2,
        8)), **over)
    ValueError: mesh and data_axes go together, and reduce_every needs both
      new_step(mesh=mesh)
      new_step(reduce_every="micro_batch")
    ValueError: data_axes must be of the mesh's ('data',)
      new_step(mesh=mesh, data_axes=("data", "fsdp"))
      new_step(mesh=mesh, data_axes=("data", 0))
      new_step(mesh=mesh, data_axes=())
    AttributeError: 'str' object has no attribute 'axis_names'
      new_step(mesh="data", data_axes="data")
    ValueError: reduce_every must be 'window' or 'micro_batch'
      new_step(reduce_every="step", **over)
    ValueError: loss_fn must keep the model's variables and their shapes, and
      nnx_train(token_accumulation(sgd, 2, **skips), growing)
      nnx_train(ours, growing, **over)
      nnx_train(sgd, growing)
    ValueError: The optimizer must be of this model, nnx.Optimizer(model, tx,
      opened_elsewhere()
    ValueError: Arrays of the model or its optimizer are gone
      with_an_old_clone()
    TypeError: Parameters must be variables that are trained, each once
      token_accumulation(sgd, 2).init(nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
      window_step.init([model, model])
    TypeError: An NNX step takes (model, nnx.Optimizer(model, tx, wrt=...), batch)
      of_steps.make_train_step(sum_and_rows)(trained_by(ours), model, batch)
      of_steps.make_train_step(sum_and_rows)(model, ours, batch)
    TypeError: An open window lives in the optimizer
      of_steps.make_train_step(sum_and_rows)(model, trained_by(sgd), batch)
      of_steps.make_train_step(sum_and_rows)(model, trained_by(MultiSteps(sgd, 2)),
        batch)
    ValueError: wrt must match variables of the model
      of_steps.make_train_step(sum_and_rows).init(model, trained_by(ours,
        wrt=nnx.LoRAParam))
    TypeError: An open window lives in the optimizer
      of_steps.make_window_step(sum_and_rows)(model, trained_by(ours), window)
    ValueError: loss_fn must not assign parameters
      nnx_train(ours, clipping, **over)
    ValueError: variables['seen'] must be the same on all devices, because the
      nnx_train(ours, counting, **over)
    TypeError: k must be an integer of at least 1
      split_batch(4, {"x": batch})
"""


NAMES = (
    vars(optax_tokenaccum)
    | vars(optax_tokenaccum.losses)
    | vars(optax_tokenaccum.debug)
)
NAMES |= globals()


def mistakes() -> Iterator[Any]:
    """Yield the code of each mistake, and how its error begins."""
    clause, code = "", ""
    for line in [*ERRORS.splitlines()[1:], "    "]:
        depth = len(line) - len(line.lstrip())
        if depth == 8:
            code += " " + line.strip()
            continue
        if code:
            yield pytest.param(code, clause, id=code)
        code = line.strip() if depth == 6 else ""
        clause = line.strip() if depth == 4 else clause


@pytest.mark.parametrize(("code", "clause"), [*mistakes()])
def test_a_mistake_raises_its_error_and_loses_nothing(code: str, clause: str):
    with pytest.raises(Exception) as raised:
        eval(code, NAMES, on_mesh)
    message = f"{raised.type.__name__}: {raised.value}"
    assert " ".join(message.split()).startswith(clause), message
    over_8 = on_mesh.get("step_state")
    states = state, train_state, window_state, over_8, nnx.state(model)
    arrays = [x for x in jax.tree.leaves(states) if isinstance(x, jax.Array)]
    assert not any(x.is_deleted() for x in arrays)


def test_an_init_that_reads_values_is_no_reason_to_refuse_its_state():
    def init(params: Any) -> Any:
        return {"sign": jnp.sign(float(params["w"][0]))}

    inner = sgd._replace(init=init, update=lambda g, state, params=None: (g, state))
    chex.assert_trees_all_equal(updated(token_accumulation(inner, 1))[0], params)


def test_an_error_names_a_container_that_looks_like_an_array():
    with pytest.raises(TypeError, match=r"got \(float32\[\], Param\)"):
        train(lambda params, x: (jnp.sum(x), nnx.Param(jnp.ones(()))))
