"""What raises an error: the code of each mistake, and the message below it.

A section's mistakes run after the set-ups up to there; once more with each line that a
set-up names after `# or:`, where the mistake depends on it.
"""

import ast
import functools
import re
from collections.abc import Iterator
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_tokenaccum.nnx
from optax_tokenaccum import token_accumulation

SGD, PARAMS = optax.sgd(1.0), {"w": jnp.zeros(3)}
OURS = token_accumulation(SGD, 2)
OVER = {"mesh": jax.sharding.Mesh(np.array(jax.devices()), "data"), "data_axes": "data"}
LAST_LINE = "return jnp.sum(losses), n"  # of `loss_fn`: other `return` lines replace it
ROWS = (8, 3), (2, 8, 3)  # of a batch and of a window, for 8 devices
# A statement of a set-up, and what may follow it to make the mistakes another way.
Statement = tuple[str, ...]


def statements(lines: str) -> Iterator[Statement]:
    """Read the lines of a set-up."""
    for example in re.split(r"^>>> (?!#)", lines, flags=re.MULTILINE)[1:]:
        code, *instead = re.split(r"(?:^>>> )?# or: ", example, flags=re.MULTILINE)
        yield re.sub(r"^\.\.\. ", "", code, flags=re.MULTILINE), *instead


def names_in(code: str) -> set[str]:
    """Return all names that the code uses or defines."""
    nodes = [*ast.walk(ast.parse(code))]
    defined = [node.name for node in nodes if isinstance(node, ast.FunctionDef)]
    return {node.id for node in nodes if isinstance(node, ast.Name)} | {*defined}


def stored_by(code: str) -> set[str]:
    """Return the names that a statement defines, except those of imports."""
    node = ast.parse(code).body[0]
    if isinstance(node, ast.Assign):
        return names_in(", ".join(map(ast.unparse, node.targets)))
    return {getattr(node, "name", "")}


def programs(set_up: list[Statement], code: str) -> Iterator[str]:
    """Yield the set-up as it is, and with each alternative that the code depends on."""
    bases, needed = [base for base, *_ in set_up], names_in(code)
    yield "\n".join(bases)
    for i, (base, *others) in reversed([*enumerate(set_up, 1)]):
        if stored_by(base) & needed:
            needed = (needed | names_in(base)) - stored_by(base)
            for other in others:
                yield "\n".join([*bases[:i], other, *bases[i:]])


def mistakes_of(section: str) -> Iterator[tuple[str, str]]:
    """Yield code and message of every mistake of a section."""
    codes: list[str] = []
    lines = ERRORS.get(section, "")
    for entry in re.findall(r"^ {4}\S.*\n(?: {5,}.*\n)*", lines, re.MULTILINE):
        code, *more = re.split(r"^ {6}(?=\S)", entry, flags=re.MULTILINE)
        codes.append(" ".join(code.split()))
        if more:
            yield from ((code, " ".join("".join(more).split())) for code in codes)
            codes = []
    assert not codes


def mistakes() -> Iterator[Any]:
    """Yield set-up, code and message of every mistake."""
    set_up: list[Statement] = []
    for section, lines in SET_UPS.items():
        set_up += statements(lines)
        for code, seen in mistakes_of(section):
            is_loss = code.startswith("return ")
            run = "step(state, data)" if is_loss else code
            for i, program in enumerate(programs(set_up, run)):
                if is_loss:
                    program = program.replace(LAST_LINE, code)
                yield pytest.param(program, run, seen, id=f"{code}-{i}")


@functools.cache
def names_after(program: str) -> dict[str, Any]:
    """Run a set-up. `globals` of this module are there for the mistakes in words."""
    names = {**globals()}
    exec(program, names)
    return names


def is_alive(names: dict[str, Any]) -> bool:
    trees = [nnx.state(x) if isinstance(x, nnx.Module) else x for x in names.values()]
    arrays = [x for x in jax.tree.leaves(trees) if isinstance(x, jax.Array)]
    return not any(x.is_deleted() for x in arrays)


# What the mistakes below call.


def updated(optimizer: Any) -> Any:
    return optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS, num_tokens=1)


def stepped(step: Any, batch: Any, params: Any = PARAMS) -> Any:
    return step(step.init(params), batch)


def two_bools(*_: Any) -> Any:
    return jnp.zeros(2, bool), ()


def dot(w: Any, rows: Any) -> Any:
    return jnp.sum(rows @ w), len(rows)


def sum_and_losses(params: Any, batch: Any) -> Any:
    return jnp.sum(batch @ params["w"]), (len(batch), batch.sum(1))


def on_an_explicit_mesh() -> Any:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    return jax.device_put(PARAMS, NamedSharding(mesh, P()))


@jax.custom_vjp
def synchronized(w: Any) -> Any:
    """As a loop for pmap has it: the gradient is reduced in the backward pass."""
    return w


synchronized.defvjp(lambda w: (w, None), lambda _, g: (jax.lax.psum(g, "data"),))


def reduced_backward(params: Any, x: Any) -> Any:
    return jnp.sum(x @ synchronized(params["w"])), len(x)


def counted_for_all(params: Any, batch: Any) -> Any:
    return jnp.sum(batch["x"] @ params["w"]), batch["n"]


COUNTED = [{"x": jnp.ones(rows), "n": jnp.full(rows[:-2], 8)} for rows in ROWS]


def positive_rows(params: Any, model_state: Any, batch: Any) -> Any:
    rows = model_state["rows"] + jnp.sum(batch[:, 0] > 0)
    return dot(params["w"], batch), {"rows": rows}


def with_rows(make: Any, batch: Any, **options: Any) -> None:
    step = make(positive_rows, SGD, has_model_state=True, **options)
    step(step.init(PARAMS, {"rows": 0}), batch)


def sum_and_rows(model: Any, batch: Any) -> Any:
    return jnp.sum(model(batch)), len(batch)


def growing(model: Any, batch: Any) -> Any:
    model.seen.set_value(batch)
    return sum_and_rows(model, batch)


def counting(model: Any, batch: Any) -> Any:
    model.seen.set_value(model.seen[...] + jnp.sum(batch > 0))
    return sum_and_rows(model, batch)


def assigning(model: Any, batch: Any) -> Any:
    model.kernel.set_value(jnp.clip(model.kernel[...], -0.01, 0.01))
    return sum_and_rows(model, batch)


def nnx_stepped(tx: Any, loss_fn: Any = sum_and_rows, **options: Any) -> None:
    """Call a train step for NNX; or a window step, if `tx` does not accumulate."""
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    model.seen = nnx.Variable(jnp.int32(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    make, batch = optax_tokenaccum.nnx.make_train_step, jnp.ones((8, 3))
    if tx is SGD:
        make, batch = optax_tokenaccum.nnx.make_window_step, jnp.ones((2, 8, 3))
    make(loss_fn, **options)(model, optimizer, batch)


def opened_elsewhere() -> None:
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer, batch = nnx.Optimizer(model, OURS, wrt=nnx.Param), jnp.ones((8, 3))
    for options in (OVER, {}):
        step = optax_tokenaccum.nnx.make_train_step(sum_and_rows, **options)
        step(model, optimizer, batch)


def after_a_step(use: Any) -> None:
    """Use a clone of a model whose arrays a step has taken along."""
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer, clone = nnx.Optimizer(model, SGD, wrt=nnx.Param), nnx.clone(model)
    step = optax_tokenaccum.nnx.make_window_step(sum_and_rows)
    step(model, optimizer, jnp.ones((2, 4, 3)))
    use(step, clone, optimizer)


def after_a_failed_call(step: Any, *state: Any) -> Any:
    with pytest.raises(Exception, match="disk full"):
        step(*state, jnp.ones((2, 4, 3)))
    step(*state, jnp.ones((2, 4, 3)))


def with_full_disk(loss_fn: Any) -> Any:
    """The loss with a callback that raises while the program runs."""

    def write() -> None:
        raise OSError("disk full")

    def failing(*args: Any) -> Any:
        jax.debug.callback(write)
        return loss_fn(*args)

    return failing


SET_UPS = {
    "All": """
>>> import jax, jax.numpy as jnp, numpy as np, optax
>>> from functools import partial
>>> from optax_tokenaccum import *
>>> from optax_tokenaccum.ragged import *
>>> def loss_fn(params, batch):
...     losses, n = batch @ params["w"], len(batch)
...     return jnp.sum(losses), n
>>> params, batch, window = {"w": jnp.ones(3)}, jnp.ones((4, 3)), jnp.ones((2, 4, 3))
>>> sgd, adam = optax.sgd(0.1), optax.adam(0.1)
>>> skips = {"should_skip_update_fn": optax.skip_not_finite}
>>> wrap = token_accumulation  # or: wrap = MultiSteps
>>> # or: wrap = partial(make_train_step, loss_fn)
""",
    "Optimizers": """
>>> optimizer = token_accumulation(sgd, 2)  # or: optimizer = MultiSteps(sgd, 2)
>>> state, grads = optimizer.init(params), params
>>> old = optax.MultiSteps(sgd, 2).init(params)
>>> update = optimizer.update  # or: update = jax.jit(optimizer.update)
""",
    "Steps and losses": """
>>> k, losses, mask = 2, jnp.ones((2, 3)), jnp.ones((2, 3), bool)  # or: k = lambda _: 2
>>> train_step = make_train_step(loss_fn, sgd, k)
>>> window_step = make_window_step(loss_fn, sgd)
>>> train_state, window_state = train_step.init(params), window_step.init(params)
>>> step, state, data = train_step, train_state, batch
>>> # or: step = train_step.accumulate
>>> # or: step, state, data = window_step, window_state, window
>>> make = partial(make_train_step, every_k_schedule=2)  # or: make = make_window_step
>>> plain = make(loss_fn, sgd)
>>> stateful = partial(make, optimizer=sgd, has_model_state=True)
>>> counter = stateful(lambda p, s, x: (loss_fn(p, x), {"rows": s["rows"] + len(x)}))
>>> old, new = plain.init(params), counter.init(params, {"rows": 0})
""",
    "Ragged windows": """
>>> sequences = [{"ids": np.arange(n), "mask": np.ones(n, bool)} for n in (2, 4)]
>>> plan = MicroBatchPlan(indices=np.array([1, 0]), num_rows=2, length=4)
>>> pad = partial(pad_micro_batch, plan=plan)
""",
    "Devices": """
>>> mesh = jax.sharding.Mesh(np.array(jax.devices()), "data")  # of 8 devices
>>> new_step, data = partial(make_train_step, loss_fn, sgd, 2), jnp.ones((8, 3))
>>> # or: new_step, data = partial(make_window_step, loss_fn, sgd), jnp.ones((2, 8, 3))
>>> over = {"mesh": mesh, "data_axes": "data"}
>>> step = new_step(**over)
>>> state = step.init(params)
>>> everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
""",
    "Flax": """
>>> import optax_tokenaccum.linen, optax_tokenaccum.nnx
>>> from flax import nnx
>>> from flax.training.train_state import TrainState
>>> nnx_loss_fn = lambda model, batch: (jnp.sum(model(batch)), len(batch))
>>> nnx_step = optax_tokenaccum.nnx.make_train_step(nnx_loss_fn)
>>> nnx_window_step = optax_tokenaccum.nnx.make_window_step(nnx_loss_fn)
>>> model, accumulating = nnx.Linear(3, 1, rngs=nnx.Rngs(0)), token_accumulation(sgd, 2)
>>> trained_by = partial(nnx.Optimizer, model, wrt=nnx.Param)
>>> create = optax_tokenaccum.linen.TrainState.create
>>> applied = partial(create, apply_fn=None, params=params)
""",
}

# Mistakes, and below them what they raise; "…" stands for any text.
ERRORS = {
    "Optimizers": """
    wrap(token_accumulation(sgd, 2), 2).init(params)
    wrap(optax.MultiSteps(sgd, 2), 2).init(params)
    wrap(optax.chain(optax.clip(1.0), MultiSteps(sgd, 2).gradient_transformation()),
        2).init(params)
      ValueError: The inner optimizer already accumulates: a micro-batch would be
      counted by two windows. Pass the plain optimizer.
    updated(token_accumulation(optax.polyak_sgd(), 2))
      TypeError: … missing 1 required keyword-only argument: 'value'
    token_accumulation(sgd, lambda step: 0).update(grads, state, params, num_tokens=1)
      ValueError: The function given as every_k_schedule must return at least 1: got 0….
    update(grads, sgd.init(params), params, num_tokens=1)
    update(grads, old, params, num_tokens=1)
    update(grads, state._asdict(), params, num_tokens=1)
      TypeError: The state must be the TokenAccumulationState that init or the last call
      returned: got …. Restore a checkpoint into jax.eval_shape(init, params); take a
      run of optax.MultiSteps over with from_multi_steps_state.
    token_accumulation(sgd, 2, **skips).update(grads, state, params, num_tokens=1)
      ValueError: skip_state must come from this should_skip_update_fn (keep the
      function that the run began with, or take skip_state from a new init): at
      ['num_not_finite'] expected shape (), got no leaf.
    has_updated(old)
    has_updated((state, state))
      ValueError: has_updated needs a state that holds exactly one
      TokenAccumulationState: got … in a ….
    close_window(adam, adam.init(params), params)
    close_window(optax.MultiSteps(sgd, 2), old, params)
      ValueError: close_window needs an optimizer that accumulates, and its state: got a
      … without a TokenAccumulationState. Any other optimizer would take a step on a
      gradient of zeros.
    from_multi_steps_state(optimizer, old._replace(mini_step=jnp.int32(1)), params)
      ValueError: An optax.MultiSteps state can be taken over only at a window boundary:
      got mini_step 1. It holds a mean of means, whose token counts are lost. Take a
      checkpoint whose mini_step is 0, or give up the open window:
      state._replace(mini_step=0).
    from_multi_steps_state(optimizer, old._asdict(), params)
    from_multi_steps_state(optimizer, adam.init(params), params)
      ValueError: The old state must be that of the same optimizer with optax.MultiSteps
      where tx accumulates: expected …, got …. A checkpoint read without a target holds
      dicts: restore it into optax.MultiSteps(...).init(params).
    wrap(sgd, 0)
    wrap(sgd, 2.0)
      …Error: every_k_schedule must be an integer of at least 1 or a function of …
    wrap(optax.adamw, 2)
      TypeError: The inner optimizer must be an optax optimizer … Call it, for example …
    make_train_step(sgd, loss_fn, 2)
    accumulate_over_window(jax.grad(loss_fn, has_aux=True))(params, window)
      TypeError: …_fn must …: got …
    wrap(sgd, 2, accumulator_dtype=jnp.int32)
      ValueError: accumulator_dtype must be a floating dtype, …: got int32.
    token_accumulation(sgd, 2, gradients="total")
    accumulate_over_window(loss_fn, gradients="total")
      ValueError: gradients must be 'sum' or 'mean', what they are of: got 'total'.
    wrap(sgd, 2, should_skip_update_fn=True)
      TypeError: should_skip_update_fn must be a function such as optax.…: got True.
    updated(token_accumulation(sgd, 2, should_skip_update_fn=two_bools))
      ValueError: should_skip_update_fn must return (a bool scalar, …): got bool of …
    MultiSteps(sgd, None)
      TypeError: MultiSteps needs every_k_schedule: got None.
    token_accumulation(sgd, 2, axis_name="data")
      TypeError: token_accumulation() has no keywords ['axis_name']. In place of ….
    token_accumulation(sgd, 2).init({"_overwrite_with_gradient": 1.0})
      ValueError: Scales of 8-bit floats cannot be summed: …
    with_num_tokens(optax.GradientTransformation(*sgd), 3)
      TypeError: tx must take extra arguments, to be given num_tokens: got a ….
    with_num_tokens(sgd, 3).update(params, sgd.init(params), params)
      ValueError: tx must accumulate, or num_tokens would be dropped: got a state ….
    update(grads, state, params)
      TypeError: update() needs num_tokens, …. If you did, something in between …
    update(grads, state, params, num_tokens=jnp.ones((2, 3), bool))
      TypeError: num_tokens must be a real number: got bool of shape (2, 3). …sum().
    update(grads, state, params, num_tokens=jnp.ones(8))
    update(grads, state, params, num_tokens=True)
    optimizer.update(grads, state, params, num_tokens=-1)
    update(grads, state, params, num_tokens=1, close_window=1)
      …Error: … must be …: got …
    update({"w": jnp.ones(4)}, state, params, num_tokens=1)
    optimizer.update((batch,), optimizer.init([batch]), [batch], num_tokens=1)
      ValueError: Gradients must have the tree and shapes of the parameters …, got …
    token_accumulation(adam, 2).update(grads, state, params, num_tokens=1)
      ValueError: The inner optimizer's state must come from its own init …, got …
    from_multi_steps_state(optimizer, optax.MultiSteps(adam, 2).init(params), params)
      ValueError: The old inner state must be one of tx's inner optimizer …: at [0]….
    from_multi_steps_state(sgd, old, params)
      ValueError: tx must accumulate with optax_tokenaccum: its state holds no ….
""",
    "Steps and losses": """
    return jnp.sum(losses), jnp.ones(4)
    return jnp.sum(losses), -1
      ValueError: num_tokens must be …
    make_train_step(loss_fn, sgd)(train_state, batch)
      ValueError: This step has no schedule, so nothing says when its window closes: …
      Give one to make_train_step (with NNX, to token_accumulation), or call
      step.accumulate(state, batch) for each micro-batch and step.close_window(state) at
      the end of the window.
    train_step.init({"act": jnp.tanh})
    window_step.init({"act": jnp.tanh})
      TypeError: Parameters and the optimizer's state must be pytrees of arrays: at
      ['act'] got …. Keep other leaves out of the parameters, with equinox.partition for
      example, and give them to loss_fn as a keyword.
    step(state._asdict(), data)
      TypeError: The state must be the StepState that step.init or the last call
      returned: got dict. Restore a checkpoint with jax.eval_shape(step.init, params) as
      its target; take one that was restored without a target over with
      regroup_sums(state, step.init(params)).
    stateful(lambda p, s, x: (loss_fn(p, x), {}))(new, batch)
    stateful(lambda p, s, x: (loss_fn(p, x), {"rows": jnp.ones(2)}))(new, batch)
    stateful(lambda p, s, x: (loss_fn(p, x), {"rows": 0.5}))(new, batch)
      ValueError: loss_fn must return the model state with the tree, shapes and kinds of
      numbers that it was given: at ['rows'] expected …, got ….
    step(state, data); step(state, data)
      ValueError: The state must not have been given to an earlier call: its buffers
      were donated to that call and are gone. Continue with the state that it returned;
      if it failed while it ran, restore a checkpoint. Build the step with donate=False
      to keep old states.
    after_a_failed_call(step := make_window_step(with_full_disk(loss_fn), sgd),
        step.init(params))
      ValueError: The state must not have been given to an earlier call: … if it failed
      while it ran, restore a checkpoint. Build the step with donate=False to keep old
      states.
    window_step(window_state, window); print(window_state.params)
      RuntimeError: Array has been deleted with shape=float32[3].
    split_batch({"x": jnp.ones(6)}, 4)
      ValueError: k must divide the rows of the batch: got k = 4 and 6 rows at ['x'].
      Give pad_values, for rows without tokens, or drop some rows.
    stepped(make_window_step(dot, sgd), jnp.ones((4, 1)), jnp.ones(2))
      TypeError: … got (1,) and (2,).
    window_step(window_state, window, num_micro_batches=5)
    window_value_and_grad(loss_fn)(params, window, num_micro_batches=5)
      ValueError: num_micro_batches must be at most the 2 micro-batches there are: got
      5.
    reduce_loss(losses, mask, "seq-mean-token-sum-norm")
    reduce_loss(losses, mask, max_length=3)
      ValueError: max_length goes with reduction='seq-mean-token-sum-norm', which
      divides by it, and with no other: got max_length=… and …. Take a constant of the
      run, such as the most tokens of a completion, never the padded length.
    return jnp.sum(losses)
    return jnp.sum(losses), (n, {})
    return losses, n
      …Error: loss_fn must return (loss_sum, num_tokens), …: got …
    stepped(make_train_step(loss_fn, optax.lbfgs(), 2), batch)
      TypeError: The optimizer of a step must need nothing but gradients, … linesearch…
    window_step(train_state, window)
      ValueError: The state must be of a … step: got that of a … step. …
    counter.init(params)
    plain.init(params, {"rows": 0})
    stateful(lambda p, s, x: loss_fn(p, x))(new, batch)
      TypeError: …has_model_state=…: got …
    regroup_sums(make_train_step(loss_fn, adam).init(params), train_state)
      ValueError: The states must be of the same training: …
    reduce_loss(losses, mask, "mean")
      ValueError: reduction must be one of token-mean, …-sum-norm: got 'mean'.
    reduce_loss(losses, mask[0])
      ValueError: losses and mask must both be [rows, length]: got losses … and mask ….
    reduce_loss(losses, mask, segment_ids=mask[0].astype(int))
      ValueError: segment_ids must be integers of the shape of mask: got … and mask ….
    reduce_loss(losses, mask, count_empty=True, segment_ids=mask.astype(int))
      ValueError: count_empty needs segment_ids, …: got … segment_ids and …. Leave it ….
    check_loss_fn(loss_fn, params, [batch], per="row")
      ValueError: per must be 'token' or 'sequence': got 'row'.
    audit(print, loss_fn, params, [batch], rtol=1)
      ValueError: rtol must be between 0 and 1, or None: got ….
""",
    "Ragged windows": """
    pad(sequences)
      TypeError: … missing 1 required keyword-only argument: 'pad_values'
    pad(sequences[0], pad_values=0)
    pad([], pad_values=0)
    pad([[1, 2, 3], [4, 5, 6]], pad_values=0)
    pad([np.arange(2), np.ones((4, 1))], pad_values=0)
      …Error: …equence… must …got …
    pad(sequences, pad_values="0")
      TypeError: A pad value must be a number: got '0' for ['ids']. What weighs ….
    pad([{"ids": np.array(["ab"])}], pad_values=0)
      TypeError: The leaves of a sequence must be numbers: got <U2 at ['ids'] of the ….
    pad_micro_batch(sequences, plan._replace(length=3), pad_values=0)
      ValueError: The plan must be one of these sequences: got one of 4 tokens at ….
""",
    "Devices": """
    step.init(on_an_explicit_mesh())
      ValueError: The parameters must be on the mesh given to the step, or on a single
      device: at ['w'] got …, the step has …. Make one mesh, and use it for both.
    step(state, data[..., :7, :])
      ValueError: The rows of a micro-batch must be a multiple of the 8 devices of
      data_axes ('data',): got 7 in an array of shape … at …. Add rows without tokens,
      for example by planning with batch_multiple=8.
    step(state, {"classes": data.repeat(2, -2), "x": data})
    step(state, {"classes": jax.device_put(data, everywhere), "x": data})
      ValueError: All arrays of a micro-batch must have the same number of rows, which
      are spread over the 8 devices of data_axes ('data',), and arrays that are whole on
      every device another number: got shape … at ['…'] and … at ['…']…. Spread all
      rows; give loss_fn what has no rows as a keyword, step(state, batch, name=array),
      or place it on every device with NamedSharding(mesh, PartitionSpec()).
    return jax.lax.psum((jnp.sum(losses), n), "data")
    return jax.lax.pmean(jnp.sum(losses), "data"), n
      ValueError: loss_fn must not name the data axes: it is given the rows of one
      device, and the sums of all are added up after it. Got a … over ['data']. Return
      this device's sums.
    stepped(make_train_step(reduced_backward, sgd, 2, **over), jnp.ones((8, 3)))
      ValueError: loss_fn must not name the data axes: it is given the rows of one
      device, and the sums of all are added up after it. Got a psum over ['data'] in its
      backward pass. Return this device's sums.
    return jnp.sum(jax.lax.with_sharding_constraint(losses,
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))), n
      ValueError: pspec … contains a manual axes ('data',) of mesh which is not allowed.
      If you are using a with_sharding_constraint under a shard_map, …
    stepped(make_train_step(counted_for_all, sgd, 2, **over), COUNTED[0])
    stepped(make_window_step(counted_for_all, sgd, **over), COUNTED[1])
      ValueError: … must be a count of the rows that loss_fn is given, those of one
      device, because the counts of all devices are added up: got a number that does not
      depend on these rows and would be added 8 times. Sum their mask in loss_fn;
      multiply a weight that all rows share by mask.sum().
    new_step(mesh=mesh)
    new_step(reduce_every="micro_batch")
    new_step(mesh=mesh, data_axes=("data", "fsdp"))
      ValueError: …data_axes…: got …
    with_rows(make_window_step, jnp.ones((2, 8, 3)), **over)
      ValueError: ['rows'] must be the same on all devices, …
    new_step(mesh="data", data_axes="data")
      TypeError: mesh must be a jax.sharding.Mesh: got 'data'.
    new_step(mesh=mesh, data_axes=("data", 0))
    new_step(mesh=mesh, data_axes=())
    new_step(mesh=mesh, data_axes=("data", "data"))
      ValueError: data_axes must be the name of a mesh axis or several …: got ….
    new_step(reduce_every="step", **over)
      ValueError: reduce_every must be 'window' or 'micro_batch', …: got 'step'.
""",
    "Flax": """
    TrainState.create(apply_fn=None, params=params,
        tx=accumulating).apply_gradients(grads=params, num_tokens=1)
      TypeError: update() needs num_tokens, … or flax's linen TrainState (use
      optax_tokenaccum.linen.TrainState).
    applied(tx=sgd).apply_gradients(grads=params, num_tokens=1)
    applied(tx=optax.MultiSteps(sgd, 2)).apply_gradients(grads=params, num_tokens=1)
    applied(tx=optax.chain(accumulating, accumulating)).apply_gradients(grads=params,
        num_tokens=1)
      ValueError: The tx of this TrainState must accumulate exactly once, since step
      counts its updates: got … accumulations. Write tx=token_accumulation(optimizer, k)
      around the whole optimizer, or optax_tokenaccum.MultiSteps in place of optax's.
    nnx_stepped(token_accumulation(sgd, 2, **skips), growing)
    nnx_stepped(accumulating, growing, **over)
    nnx_stepped(SGD, growing)
      ValueError: loss_fn must keep the model's variables and their shapes, and return
      other values as aux, or take them out with nnx.pop: at ['seen'] expected shape (),
      got shape …
    opened_elsewhere()
      ValueError: The optimizer must be of this model, …, and its open window laid out
      for the devices of this step (call close_window of the step that began it, or
      restore the checkpoint after step.init): at .opt_state.acc_grads['bias'] expected
      shape …, got shape …
    after_a_failed_call(optax_tokenaccum.nnx.make_window_step(
        with_full_disk(nnx_loss_fn)), model, trained_by(sgd))
    after_a_step(lambda step, *state: step(*state, window))
      ValueError: The arrays of the model and its optimizer must not have been donated:
      got some that are gone, because an earlier call failed while it ran, or because
      they are older than the last call. Restore a checkpoint, nnx.update((model,
      optimizer), checkpoint); or, if the parameters are still there, begin with a new
      nnx.Optimizer and step.init. Build the step with donate=False to lose nothing.
    after_a_step(lambda step, clone, _: np.asarray(clone.kernel[...]))
      RuntimeError: Array has been deleted with shape=….
    wrap(sgd, 2).init(nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    window_step.init([model, model])
      TypeError: Parameters must be variables that are trained, each once: at … got …
    nnx_step(model, trained_by(sgd), batch)
    nnx_step.init(model, trained_by(accumulating, wrt=nnx.LoRAParam))
    nnx_step(model, trained_by(MultiSteps(sgd, 2)), batch)
    nnx_window_step(model, trained_by(accumulating), window)
      …Error: … optimizer …must …: got …
    nnx_stepped(accumulating, assigning, **over)
      ValueError: loss_fn must not assign parameters, …: got a change at kernel. …
    nnx_stepped(accumulating, counting, **over)
      ValueError: ['seen'] must be the same on all devices, …
""",
}


@pytest.mark.parametrize(("program", "code", "seen"), [*mistakes()])
def test_a_mistake_raises_its_error_and_loses_nothing(
    program: str, code: str, seen: str
):
    takes = "donated" in seen or "deleted" in seen
    # A copy: a row may set names that another row uses.
    names = dict((names_after.__wrapped__ if takes else names_after)(program))
    with pytest.raises(Exception) as raised:
        exec(code, names)
    message = f"{raised.type.__name__}: {raised.value}"
    pattern = ".*".join(map(re.escape, seen.split("…")))
    assert re.fullmatch(pattern, message, re.DOTALL), message
    assert takes or is_alive(names)


def test_an_init_that_reads_values_is_no_reason_to_refuse_its_state():
    def init(params: Any) -> Any:
        return {"sign": jnp.sign(float(params["w"][0]))}

    inner = SGD._replace(init=init, update=lambda g, state, params=None: (g, state))
    chex.assert_trees_all_equal(updated(token_accumulation(inner, 1))[0], PARAMS)
