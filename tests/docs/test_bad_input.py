"""What raises an error: the code of each mistake, and the message below it."""

import re
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
by_value = member(lambda u, state, params=None, *, value=None, **_: (u, state))
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


# Mistakes, and below them what they raise; "…" stands for any text.
ERRORS = """
    updated(token_accumulation(token_accumulation(sgd, 2), 2))
    make_train_step(loss_fn, optax.MultiSteps(sgd, 2), 2)
    make_window_step(loss_fn, optax.MultiSteps(sgd, 2).gradient_transformation())
    MultiSteps(optax.chain(optax.clip(1.0), MultiSteps(sgd,
        2).gradient_transformation()), 2).init(params)
      ValueError: The inner optimizer already accumulates: a micro-batch would be
      counted by two windows. Pass the plain optimizer.
    token_accumulation(sgd, lambda step: 0).update(params, state, num_tokens=1)
      ValueError: The function given as every_k_schedule must return at least 1: got 0….
    update(params, sgd.init(params), params, num_tokens=1)
    update(params, old, params, num_tokens=1)
    update(params, state._asdict(), params, num_tokens=1)
      TypeError: The state must be the TokenAccumulationState that init or the last call
      returned: got …. Restore a checkpoint into jax.eval_shape(init, params); take a
      run of optax.MultiSteps over with from_multi_steps_state.
    token_accumulation(sgd, 2, **skips).update(params, state, num_tokens=1)
      ValueError: skip_state must come from this should_skip_update_fn (keep the
      function that the run began with, or take skip_state from a new init): at
      ['num_not_finite'] expected shape (), got no leaf.
    has_updated(old)
    has_updated((state, state))
      ValueError: has_updated needs a state that holds exactly one
      TokenAccumulationState: got … in a ….
    close_window(adam, adam.init(params), params)
    close_window(theirs, old, params)
      ValueError: close_window needs an optimizer that accumulates, and its state: got a
      … without a TokenAccumulationState. Any other optimizer would take a step on a
      gradient of zeros.
    close_window(ours, jax.tree.map(lambda x: x[None], state), params)
      ValueError: close_window needs the state of one accumulation: got mini_step of
      shape (1,), of several. Call it in the function that is mapped over them, in pmap,
      shard_map or vmap.
    close_window(ours, trained_by(ours).opt_state, nnx.state(model, nnx.Param))
      TypeError: close_window needs a state of arrays: got the variables of an
      nnx.Optimizer. Write optimizer.update(model, zeros, num_tokens=0,
      close_window=True), with zeros like nnx.state(model, nnx.Param).
    from_multi_steps_state(ours, old._replace(mini_step=jnp.int32(1)), params)
      ValueError: An optax.MultiSteps state can be taken over only at a window boundary:
      got mini_step 1. It holds a mean of means, whose token counts are lost. Take a
      checkpoint whose mini_step is 0, or give up the open window:
      state._replace(mini_step=0).
    from_multi_steps_state(ours, old._asdict(), params)
    from_multi_steps_state(ours, adam.init(params), params)
      ValueError: The old state must be that of the same optimizer with optax.MultiSteps
      where tx accumulates: expected …, got …. A checkpoint read without a target holds
      dicts: restore it into optax.MultiSteps(...).init(params).
    from_multi_steps_state(ours, optax.MultiSteps(adam, 2).init(params), params)
      ValueError: The old inner state must be one of tx's inner optimizer …: at [0]….
    from_multi_steps_state(ours, trained_by(theirs).opt_state, nnx.state(model))
      TypeError: The old state must hold arrays: got the variables of an nnx.Optimizer.
      Give nnx.pure(optimizer.opt_state) as the state and nnx.pure(nnx.state(model,
      nnx.Param)) as the parameters; newer Flax calls it nnx.as_pure.
    from_multi_steps_state(sgd, old, params)
      ValueError: tx must accumulate with optax_tokenaccum: its state holds no ….
    token_accumulation(sgd, 0)
    MultiSteps(sgd, 2.0)
      …Error: every_k_schedule must be an integer of at least 1 or a function of …
    token_accumulation(optax.adamw, 2)
      TypeError: The inner optimizer must be an optax optimizer with init and update,
      such as optax.adamw(learning_rate): got function.
    make_train_step(sgd, loss_fn, 2)
    accumulate_over_window(jax.grad(loss_fn, has_aux=True))(params, window)
    token_accumulation(sgd, 2, should_skip_update_fn=True)
      TypeError: …_fn must …: got …
    updated(token_accumulation(optax.chain(by_tokens, strict), 2))
    train(tx=optax.chain(strict, optax.masked(by_tokens, True)))
    train(tx=optax.chain(optax.apply_if_finite(strict, 2), by_value))
      TypeError: All transformations of a chain must accept …, because one of them uses
      it: got one that does not, <lambda>() got an unexpected keyword argument '…'. Put
      in its place one that drops it: optax.GradientTransformationExtraArgs(tx.init,
      lambda updates, state, params=None, *, …=None, **extra: tx.update(updates, state,
      params, **extra)).
    updated(token_accumulation(wrong, 2))
      TypeError: <lambda>() missing 1 required positional argument: 'state'
    MultiSteps(sgd, 2, accumulator_dtype=jnp.int32)
      ValueError: accumulator_dtype must be a floating dtype, …: got int32.
    accumulate_over_window(loss_fn, gradients="total")
      ValueError: gradients must be 'sum' or 'mean', what they are of: got 'total'.
    updated(token_accumulation(sgd, 2, should_skip_update_fn=lambda *_: (mask[0], ())))
      ValueError: should_skip_update_fn must return (a bool scalar, …): got bool of …
    MultiSteps(sgd, None)
      TypeError: MultiSteps needs every_k_schedule: got None.
    token_accumulation(sgd, 2, axis_name="data")
      TypeError: token_accumulation() has no keywords ['axis_name']. In place of ….
    token_accumulation(sgd, 2, every_n_token=8)
      TypeError: token_accumulation() has no keywords ['every_n_token'].
    state.acc_grads
      AttributeError: TokenAccumulationState has no acc_grads, a running mean in optax.
      Write optax_tokenaccum.window_gradient(state) for the token mean of the open …
    MultiSteps(sgd, 2).close_window(state, params)
    MultiSteps(sgd, 2)._every_k_schedule
      AttributeError: optax_tokenaccum.MultiSteps has no attribute …. To close a window,
      write optax_tokenaccum.close_window(optimizer, state, params); keep
      every_k_schedule in a variable of your own.
    ours.init({"w": params["w"], "act": jnp.tanh})
    MultiSteps(sgd, 2).init({"act": "relu"})
      TypeError: Parameters must be arrays or numbers: at ['act'] got …. Keep other ….
    token_accumulation(sgd, 2).init({"_overwrite_with_gradient": 1.0})
      ValueError: Scales of 8-bit floats cannot be summed: …
    train_step.init({"w": params, "key": jax.random.key(0)})
      TypeError: Parameters must be arrays of numbers: at ['key'] got key<fry>. Hand ….
    with_num_tokens(optax.GradientTransformation(*sgd), 3)
      TypeError: tx must take extra arguments, to be given num_tokens: got a ….
    with_num_tokens(sgd, 3).update(params, sgd.init(params), params)
      ValueError: tx must accumulate, or num_tokens would be dropped: got a state ….
    update(params, state, params)
    applied_by_flax(tx=ours).apply_gradients(grads=params, num_tokens=1)
      TypeError: update() needs num_tokens, …: got None. Write … If you did, something
      in between …; or flax's linen TrainState (use optax_tokenaccum.linen.TrainState).
    update(params, state, params, n_tokens=8)
      TypeError: …: got None next to the keywords ['n_tokens']. Write …
    slow.update(both, slow.init(both), both)
      TypeError: … a wrapper whose update has three arguments, such as
      optax.lookahead(tx, 5, 0.5) (build it where n is known, as
      optax.lookahead(with_num_tokens(tx, n), 5, 0.5)); …
    update(params, state, params, num_tokens=mask)
      TypeError: num_tokens must be a real scalar, one number for the whole micro-batch
      such as mask.sum(): got bool of shape (2, 3).
    update(params, state, params, num_tokens=[1])
      TypeError: num_tokens must be a real scalar, …: got list.
    update(params, state, params, num_tokens=jnp.ones(8))
      ValueError: num_tokens must be a real scalar, …: got float32 of shape (8,).
    ours.update(params, state, params, num_tokens=True)
    ours.update(params, state, params, num_tokens=-1)
    update(params, state, params, num_tokens=1, close_window=1)
      …Error: … must be …: got …
    update({"w": jnp.ones(4)}, state, params, num_tokens=1)
    ours.update((batch,), ours.init([batch]), [batch], num_tokens=1)
      ValueError: Gradients must have the tree and shapes of the parameters …, got …
    token_accumulation(adam, 2).update(params, state, params, num_tokens=1)
    train_step(train_state._replace(opt_state=token_accumulation(adam, 2).init(params)),
        batch)
      ValueError: The inner optimizer's state must come from its own init …, got …

    train(lambda params, x: (jnp.sum(x), jnp.ones(4)))
    train_window(lambda params, x: (jnp.sum(x), -1))
      ValueError: num_tokens must be …
    make_train_step(loss_fn, sgd)(train_state, batch)
      ValueError: This step has no schedule, so nothing says when its window closes: …
      Give one to make_train_step (with NNX, to token_accumulation), or call
      step.accumulate(state, batch) for each micro-batch and step.close_window(state) at
      the end of the window.
    train_step.init({"act": jnp.tanh})
      TypeError: Parameters and the optimizer's state must be pytrees of arrays: at
      ['act'] got …. Keep other leaves out of the parameters, with equinox.partition for
      example, and give them to loss_fn as a keyword.
    train_step(train_state, batch, names=np.array(["a", "b"]))
      TypeError: Arrays in the keywords of loss_fn must hold numbers: got a NumPy array
      of dtype <U1. Pass strings as a tuple, which is static: tuple(array.tolist()).
    train_step(train_state._asdict(), batch)
    train_step.accumulate(train_state._asdict(), batch)
    window_step(window_state._asdict(), window)
    train_step(params, batch)
      TypeError: The state must be the StepState that step.init or the last call
      returned: got dict. Begin with state = step.init(params), and write state, metrics
      = step(state, batch). Restore a checkpoint with jax.eval_shape(step.init, params)
      as its target; take one that was restored without a target over with
      regroup_sums(state, step.init(params)).
    twice(lambda state, returned: returned)
      TypeError: … got tuple. Begin with …, and write state, metrics = step(state,
      batch). …
    with_rows({})
    with_rows({"rows": jnp.ones(2)})
    with_rows({"rows": 0.5})
      ValueError: loss_fn must return the model state with the tree, shapes and kinds of
      numbers that it was given: at ['rows'] expected …, got ….
    twice()
      ValueError: The state must not have been given to an earlier call: its buffers
      were donated to that call and are gone. Continue with the state that it returned;
      if it failed while it ran, restore a checkpoint. Build the step with donate=False
      to keep old states.
    split_batch({"x": jnp.ones(6)}, 4)
      ValueError: k must divide the rows of the batch: got k = 4 and 6 rows at ['x'].
      Give pad_values, for rows without tokens, or drop some rows.
    window_step(window_state, window, num_micro_batches=5)
      ValueError: num_micro_batches must be at most the 2 micro-batches there are: got
      5.
    train(lambda params, x: jnp.sum(x))
    train(lambda params, x: (jnp.sum(x), None))
    train_window(lambda params, x: (x, 8))
      …Error: With has_aux=False, loss_fn must return (loss_sum, num_tokens), loss_sum
      summed over tokens, never divided: got …
    train(lambda params, x: (jnp.sum(x), (8, {})))
    train_window(lambda params, x: (jnp.sum(x), 8, {}))
    check_loss_fn(lambda params, x: (jnp.sum(x), (8, {})), params, [batch], mask=None)
      TypeError: With has_aux=False, loss_fn must return (loss_sum, num_tokens), …: got
      …. For (loss_sum, (num_tokens, aux)), pass has_aux=True; check_loss_fn and audit
      take a loss_fn without aux.
    train(loss_fn, has_aux=True)
      TypeError: With has_aux=True, loss_fn must return (loss_sum, (num_tokens, aux)), …
    train(loss_fn, tx=optax.lbfgs())
      TypeError: The optimizer of a step must need nothing but gradients, … linesearch…
    window_step(train_state, window)
      ValueError: The state must be of a … step: got that of a … step. …
    stateful(loss_fn).init(params)
    train_step.init(params, {"rows": 0})
    stateful(lambda p, s, x: loss_fn(p, x))(stateful(loss_fn).init(params, {}), batch)
      TypeError: …has_model_state=…: got …
    regroup_sums(make_train_step(loss_fn, adam).init(params), train_state)
      ValueError: The states must be of the same training: …
    softmax_cross_entropy_sum(mask.astype(int), losses[..., None])
      TypeError: labels, which follow logits, must be integers, class ids: got float32
      of shape (2, 3, 1).
    reduce_loss(losses, mask, "seq-mean-token-sum-norm")
    reduce_loss(losses, mask, max_length=3)
      ValueError: max_length goes with reduction='seq-mean-token-sum-norm', which
      divides by it, and with no other: got max_length=… and …. Take a constant of the
      run, such as the most tokens of a completion, never the padded length.
    reduce_loss(losses, mask, "seq-mean-token-sum-norm", max_length=-5)
    reduce_loss(losses, mask, "seq-mean-token-sum-norm", max_length=np.ones(2))
      ValueError: max_length must be a finite number > 0: got ….
    linear_cross_entropy_sum(losses, batch.T, mask[0].astype(int)[:2], logit_cap=0)
      ValueError: logit_cap must be a finite number > 0: got 0.
    softmax_cross_entropy_sum(losses, mask[:, 0].astype(int), z_loss=-1)
      ValueError: z_loss must be a finite number >= 0: got -1.
    softmax_cross_entropy_sum(losses, mask[:, 0].astype(int), label_smoothing=1)
      ValueError: label_smoothing must be a number from 0 to less than 1: got 1.
    reduce_loss(losses, mask, "mean")
      ValueError: reduction must be one of token-mean, …-sum-norm: got 'mean'.
    reduce_loss(losses, mask[0])
      ValueError: losses and mask must both be [rows, length]: got losses … and mask ….
    reduce_loss(losses, mask, segment_ids=mask[0].astype(int))
      ValueError: segment_ids must be integers of the shape of mask: got … and mask ….
    reduce_loss(losses, mask, count_empty=True, segment_ids=mask.astype(int))
      ValueError: count_empty needs segment_ids, …: got … segment_ids and …. Leave it ….
    check_loss_fn(loss_fn, params, [batch], mask=None, per="row")
      ValueError: per must be 'token' or 'sequence': got 'row'.
    audit(print, loss_fn, params, [batch], rtol=1)
      ValueError: rtol must be between 0 and 1, or None: got ….
    audit(None, loss_fn, params, [batch])
    audit(print, None, params, [batch])
      TypeError: … must be a function: got a NoneType.
    check_loss_fn(params, loss_fn, [batch], mask=None)
      TypeError: loss_fn must be a function: got a dict.
    check_loss_fn(loss_fn, params, [batch])
      TypeError: check_loss_fn() missing 1 required keyword-only argument: 'mask'
    audit(loss_fn, lambda optimizer, params, x: params, params, [batch])
      TypeError: run must be a function of (optimizer, params, micro_batches): got one
      of …. Give audit run first, and then loss_fn.
    audit(print, lambda batch: (0.0, 1), params, [batch])
      TypeError: loss_fn must be a function of (params, micro_batch): got one of ….
    audit(print, loss_fn, params, [])
    audit(print, lambda params, x: (0 * loss_fn(params, x)[0], 8), params, [batch])
      ValueError: A window must have tokens, and a gradient that is finite and not 0:
      got […] tokens and a gradient of norm ….
    audit(lambda *_: {}, loss_fn, params, [batch])
      ValueError: run must return the parameters, moved…
    audit(print, loss_fn, params, {"x": batch})
      TypeError: micro_batches must be a sequence of micro-batches: got a dict. Put ….
    audit(print, loss_fn, {"w": 1}, [batch])
      TypeError: params must hold arrays of floats: got {'w': 1}.
    check_loss_fn(loss_fn, params, [batch], mask="labels")
    check_loss_fn(loss_fn, params, [batch], mask=["labels"])
      ValueError: mask must be one of ['the root']: got 'labels'.

    pad(sequences[0])
    pad([])
    pad([[1, 2, 3], [4, 5, 6]])
    pad([np.arange(2), np.ones((4, 1))])
      …Error: …equence… must …got …
    pad(sequences, pad_values="0")
      TypeError: A pad value must be a number: got '0' for ['ids']. What weighs ….
    pad([{"ids": np.array(["ab"])}])
      TypeError: The leaves of a sequence must be numbers: got <U2 at ['ids'] of the ….
    pad(sequences, plan=plan._replace(length=3))
      ValueError: The plan must be one of these sequences: got one of 4 tokens at ….
    pad(sequences[:1])
    pad(sequences, plan=plan._replace(indices=np.array([-1])))
      ValueError: The plan must be one of these sequences: got index … for … of them.
      Give all of the window's, in the order of the lengths that were planned.
    pad([np.full(4, 2**40 + 7), np.arange(4)])
      ValueError: Values must fit the dtype that jax keeps, int32: at the root got
      int64 that does not at index 0. Enable x64, or give smaller numbers.

    step.init(jax.device_put(params, NamedSharding(meshes.make_mesh((8,), "explicit"),
        P())))
      ValueError: The parameters must be on the mesh given to the step, or on a single
      device: at ['w'] got …, the step has …. Make one mesh, and use it for both.
    step(step_state, batch[:7])
      ValueError: The rows of a micro-batch must be a multiple of the 8 devices of
      data_axes ('data',): got 7 in an array of shape … at …. Add rows without tokens,
      for example by planning with batch_multiple=8.
    step(step_state, {"classes": batch.repeat(2, 0), "x": batch})
    step(step_state, {"classes": jax.device_put(batch, everywhere), "x": batch})
      ValueError: All arrays of a micro-batch must have the same number of rows, which
      are spread over the 8 devices of data_axes ('data',), and arrays that are whole on
      every device another number: got shape … at ['…'] and … at ['…']…. Spread all
      rows; give loss_fn what has no rows as a keyword, step(state, batch, name=array),
      or place it on every device with NamedSharding(mesh, PartitionSpec()).
    train(lambda *args: jax.lax.psum(loss_fn(*args), "data"), **over)
    train(lambda p, x: (jnp.sum(x @ synchronized(p["w"])), len(x)), **over)
      ValueError: loss_fn must not name the data axes: it is given the rows of one
      device, and the sums of all are added up after it. Got a psum… over ['data']…
      Return this device's sums.
    train(lambda p, b: (jnp.sum(b[0] @ p["w"]), b[1]), (batch, jnp.int32(8)), **over)
    train_window(lambda p, b: (jnp.sum(b[0] @ p["w"]), b[1]), (window, jnp.full(2, 8)),
        **over)
      ValueError: … must be a count of the rows that loss_fn is given, those of one
      device, because the counts of all devices are added up: got a number that does not
      depend on these rows and would be added 8 times. Sum their mask in loss_fn;
      multiply a weight that all rows share by mask.sum().
    new_step(mesh=mesh)
    new_step(reduce_every="micro_batch")
    new_step(mesh=mesh, data_axes=("data", "fsdp"))
      ValueError: …data_axes…: got …
    new_step(mesh="data", data_axes="data")
      TypeError: mesh must be a jax.sharding.Mesh: got 'data'.
    new_step(mesh=mesh, data_axes=("data", 0))
    new_step(mesh=mesh, data_axes=())
    new_step(mesh=mesh, data_axes=("data", "data"))
      …Error: data_axes must be the name of a mesh axis or several …: got ….
    new_step(reduce_every="step", **over)
      ValueError: reduce_every must be 'window' or 'micro_batch', …: got 'step'.

    applied(tx=sgd).apply_gradients(grads=params, num_tokens=1)
    applied(tx=theirs).apply_gradients(grads=params, num_tokens=1)
    applied(tx=optax.chain(ours, ours)).apply_gradients(grads=params, num_tokens=1)
      ValueError: The tx of this TrainState must accumulate exactly once, since step
      counts its updates: got … accumulations. Write tx=token_accumulation(optimizer, k)
      around the whole optimizer, or optax_tokenaccum.MultiSteps in place of optax's.
    nnx_train(token_accumulation(sgd, 2, **skips), growing)
    nnx_train(ours, growing, **over)
    nnx_train(sgd, growing)
      ValueError: loss_fn must keep the model's variables and their shapes, and return
      other values as aux, or take them out with nnx.pop: at ['seen'] expected shape (),
      got shape …
    opened_elsewhere()
      ValueError: The optimizer must be of this model, …, and its open window laid out
      for the devices of this step (call close_window of the step that began it, or
      restore the checkpoint after step.init): at .opt_state.grad_sums['bias'] expected
      shape …, got shape …
    with_an_old_clone()
      ValueError: The arrays of the model and its optimizer must not have been donated:
      got some that are gone, because an earlier call failed while it ran, or because
      they are older than the last call. Restore a checkpoint, nnx.update((model,
      optimizer), checkpoint); or, if the parameters are still there, begin with a new
      nnx.Optimizer and step.init. Build the step with donate=False to lose nothing.
    token_accumulation(sgd, 2).init(nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    window_step.init([model, model])
      TypeError: Parameters must be variables that are trained, each once: at … got …
    of_steps.make_train_step(sum_and_rows)(model, trained_by(sgd), batch)
    of_steps.make_train_step(sum_and_rows).init(model, trained_by(ours,
        wrt=nnx.LoRAParam))
    of_steps.make_train_step(sum_and_rows)(model, trained_by(MultiSteps(sgd, 2)), batch)
    of_steps.make_window_step(sum_and_rows)(model, trained_by(ours), window)
      …Error: … optimizer …must …: got …
    nnx_train(ours, clipping, **over)
      ValueError: loss_fn must not assign parameters, …: got a change at kernel. …
    nnx_train(ours, counting, **over)
      ValueError: ['seen'] must be the same on all devices, …
"""


NAMES = {**vars(optax_tokenaccum), **globals()}


def mistakes() -> Iterator[Any]:
    """Yield code and message of every mistake."""
    codes: list[str] = []
    for entry in re.findall(r"^ {4}\S.*\n(?: {5,}.*\n)*", ERRORS, re.MULTILINE):
        code, *more = re.split(r"^ {6}(?=\S)", entry, flags=re.MULTILINE)
        codes.append(" ".join(code.split()))
        if more:
            seen = " ".join("".join(more).split())
            yield from (pytest.param(code, seen, id=code) for code in codes)
            codes = []
    assert not codes


@pytest.mark.parametrize(("code", "seen"), [*mistakes()])
def test_a_mistake_raises_its_error_and_loses_nothing(code: str, seen: str):
    with pytest.raises(Exception) as raised:
        eval(code, NAMES, on_mesh)
    message = f"{raised.type.__name__}: {raised.value}"
    pattern = ".*".join(map(re.escape, seen.split("…")))
    assert re.fullmatch(pattern, message, re.DOTALL), message
    over_8 = on_mesh.get("step_state")
    states = state, train_state, window_state, over_8, nnx.state(model)
    arrays = [x for x in jax.tree.leaves(states) if isinstance(x, jax.Array)]
    assert not any(x.is_deleted() for x in arrays)


def test_an_init_that_reads_values_is_no_reason_to_refuse_its_state():
    def init(params: Any) -> Any:
        return {"sign": jnp.sign(float(params["w"][0]))}

    inner = sgd._replace(init=init, update=lambda g, state, params=None: (g, state))
    chex.assert_trees_all_equal(updated(token_accumulation(inner, 1))[0], params)
