"""docs/bad_input.md is the test: the code of each row raises the message next to it.

A section's rows run after the set-ups of the page up to there; once more with each line
that the set-up names after `# or:`, where the row depends on it.
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
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
from optax_tokenaccum import make_train_step, make_window_step, token_accumulation

PAGE = (Path(__file__).parents[2] / "docs/bad_input.md").read_text(encoding="utf-8")
SGD, PARAMS, BATCH = optax.sgd(1.0), {"w": jnp.zeros(3)}, jnp.ones((4, 3))
OURS = token_accumulation(SGD, 2)
OVER = {"mesh": jax.sharding.Mesh(np.array(jax.devices()), "data"), "data_axes": "data"}
LAST_LINE = "return jnp.sum(losses), n"  # of the page's `loss_fn`
ROWS = (8, 3), (2, 8, 3)  # of a batch and of a window, for 8 devices
# A statement of a set-up, and what may follow it to make the mistakes another way.
Statement = tuple[str, ...]


def statements(section: str) -> Iterator[Statement]:
    """Read the code blocks of a section."""
    for block in re.findall(r"^```python\n(.*?)^```", section, re.M | re.S):
        for example in re.split(r"^>>> (?!#)", block, flags=re.MULTILINE)[1:]:
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


def mistakes() -> Iterator[Any]:
    """Yield set-up, code and message of every mistake."""
    set_up: list[Statement] = []
    for section in PAGE.split("\n## "):
        set_up += statements(section)
        more = NOT_ON_THE_PAGE.get(section.partition("\n")[0], "")
        found = re.findall(r"^((?:    \S.*\n)+)      (.*)$", more, re.MULTILINE)
        found = [(code.strip(), seen) for x, seen in found for code in x.splitlines()]
        for line in re.findall(r"^\| (.*) \|$", section, re.MULTILINE)[1:]:
            mistake, seen, _ = line.split(" | ")
            if seen.startswith("No error: "):
                assert mistake in (*WITHOUT_AN_ERROR, NOT_SHOWN)
                continue
            is_code = re.fullmatch("`[^`]+`(?: or `[^`]+`)*", mistake)
            codes = re.findall("`(.*?)`", mistake) if is_code else IN_WORDS[mistake]
            found += [(code, seen.strip("`")) for code in codes]
        for code, seen in found:
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


# What the code below calls: mistakes that the page tells in words.


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


# Errors that nobody would search for, by the section in which their code runs.
NOT_ON_THE_PAGE = {
    "Optimizers": """
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
    pad(sequences[0], pad_values=0)
    pad([[1, 2, 3], [4, 5, 6]], pad_values=0)
    pad([np.arange(2), np.ones((4, 1))], pad_values=0)
      …Error: …equence… must …got …
    pad(sequences, pad_values="0")
      TypeError: A pad value must be a number: got '0' for ['ids']. What weighs ….
    pad([], pad_values=0)
      ValueError: There must be at least one sequence: got none.
    pad([{"ids": np.array(["ab"])}], pad_values=0)
      TypeError: The leaves of a sequence must be numbers: got <U2 at ['ids'] of the ….
    pad_micro_batch(sequences, plan._replace(length=3), pad_values=0)
      ValueError: The plan must be one of these sequences: got one of 4 tokens at ….
    pad_micro_batch(sequences, plan._replace(num_rows=1), pad_values=0)
      ValueError: A micro-batch must have a row for …: got 2 sequences and num_rows 1. …
""",
    "Devices": """
    new_step(mesh=mesh)
    new_step(reduce_every="micro_batch")
    new_step(mesh=mesh, data_axes=("data", "fsdp"))
      ValueError: …data_axes…: got …
    with_rows(make_window_step, jnp.ones((2, 8, 3)), **over)
      ValueError: ['rows'] must be the same on all devices, …
    new_step(mesh="data", data_axes="data")
      TypeError: mesh must be a jax.sharding.Mesh: got 'data'.
    new_step(mesh=mesh, data_axes=("data", 0))
      TypeError: data_axes must be the name of a mesh axis or several …: got ….
    new_step(mesh=mesh, data_axes=())
    new_step(mesh=mesh, data_axes=("data", "data"))
      ValueError: data_axes must be the name of a mesh axis or several …: got ….
    new_step(reduce_every="step", **over)
      ValueError: reduce_every must be 'window' or 'micro_batch', …: got 'step'.
""",
    "Flax": """
    wrap(sgd, 2).init(nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    window_step.init([model, model])
      TypeError: Parameters must be variables that are trained, each once: at … got …
    nnx_step(model, trained_by(sgd), batch)
    nnx_step.init(model, trained_by(accumulating, wrt=nnx.LoRAParam))
    nnx_step(model, trained_by(MultiSteps(sgd, 2)), batch)
    nnx_window_step(model, trained_by(accumulating), window)
      …Error: … optimizer …must …: got …
    optax_tokenaccum.nnx.make_train_step(nnx_loss_fn, trained_by(accumulating))
      TypeError: The step of an NNX model is made from loss_fn alone: got …
    nnx_stepped(accumulating, assigning, **over)
      ValueError: loss_fn must not assign parameters, …: got a change at kernel. …
    nnx_stepped(accumulating, counting, **over)
      ValueError: ['seen'] must be the same on all devices, …
""",
}


IN_WORDS: dict[str, list[str]] = {
    # These two errors are tested in tests/devices/test_own_shard_map.py.
    "the loss of one device, or its count, where devices share parameters, in a "
    "`shard_map`": [],
    "a loss that reads from other devices, in a `shard_map` with `check_vma=False`": [],
    "no `value` for an optimizer that needs the loss, such as `optax.polyak_sgd()`": [
        "updated(token_accumulation(optax.polyak_sgd(), 2))",
    ],
    "`make_window_step(lambda w, x: (jnp.sum(x @ w), len(x)), sgd)` with a batch that "
    "was not split": [
        "stepped(make_window_step(dot, sgd), jnp.ones((4, 1)), jnp.ones(2))",
    ],
    "parameters on another mesh than the step": ["step.init(on_an_explicit_mesh())"],
    "a `custom_vjp` that synchronizes gradients over the data axes": [
        "stepped(make_train_step(reduced_backward, sgd, 2, **over), jnp.ones((8, 3)))",
    ],
    "a count of the whole batch, which is the same on all devices": [
        "stepped(make_train_step(counted_for_all, sgd, 2, **over), COUNTED[0])",
        "stepped(make_window_step(counted_for_all, sgd, **over), COUNTED[1])",
    ],
    "a variable of another shape after the loss, or a new one": [
        "nnx_stepped(token_accumulation(sgd, 2, **skips), growing)",
        "nnx_stepped(accumulating, growing, **over)",
        "nnx_stepped(SGD, growing)",
    ],
    "an open window of an `nnx` step on other devices": ["opened_elsewhere()"],
    "a model or an optimizer that an `nnx` step has donated, to a call that failed "
    "while it ran or through a clone": [
        "after_a_failed_call(optax_tokenaccum.nnx.make_window_step("
        "with_full_disk(nnx_loss_fn)), model, trained_by(sgd))",
        "after_a_step(lambda step, *state: step(*state, window))",
    ],
    "using a clone of a model that an `nnx` step has donated": [
        "after_a_step(lambda step, clone, _: np.asarray(clone.kernel[...]))",
    ],
    "a state that was given to a call that failed while it ran": [
        "after_a_failed_call(step := make_window_step("
        "with_full_disk(loss_fn), sgd), step.init(params))",
    ],
}


WITHOUT_AN_ERROR = {}
# What happens depends on which thread is first.
NOT_SHOWN = "one NNX model that two threads train at once, with `donate=False`"


def shows(mistake: str) -> Any:
    """Register a function that asserts what happens where nothing sees a mistake."""
    return functools.partial(WITHOUT_AN_ERROR.setdefault, mistake)


@shows("a loss that is a mean")
def a_loss_that_is_a_mean() -> None:
    def mean_fn(params: Any, batch: Any) -> Any:
        return jnp.mean(batch @ params["w"]), len(batch)

    state, _ = stepped(make_train_step(mean_fn, SGD, 1), BATCH)
    np.testing.assert_array_equal(state.params["w"], -1 / len(BATCH) * np.ones(3))


@shows("a schedule function that returns less than 1, traced")
def a_schedule_of_0_traced() -> None:
    optimizer = token_accumulation(SGD, lambda step: 0 * step)
    update, state = jax.jit(optimizer.update), optimizer.init(PARAMS)
    for _ in range(2):
        updates, state = update({"w": jnp.ones(3)}, state, PARAMS, num_tokens=1)
        chex.assert_trees_all_equal(updates, {"w": -np.ones(3)})


@shows("a count that is negative or not finite, traced")
def counts_that_are_not_finite_traced() -> None:
    optimizer = token_accumulation(SGD, 2)
    update, grads = jax.jit(optimizer.update), {"w": jnp.ones(3)}
    for count in (-1.0, np.nan, np.inf, -np.inf):
        state = optimizer.init(PARAMS)
        _, state = update(grads, state, PARAMS, num_tokens=count)
        assert (int(state.mini_step), float(state.acc_tokens)) == (1, 0.0)
        updates, state = update(grads, state, PARAMS, num_tokens=2.0)
        chex.assert_trees_all_equal(updates, {"w": -np.ones(3) / 2})


@shows("`num_micro_batches` too large, traced")
def a_bound_too_large_traced() -> None:
    step = make_window_step(dot, SGD)
    state = step.init(jnp.zeros(3))
    _, metrics = step(state, jnp.ones((2, 4, 3)), num_micro_batches=jnp.asarray(9))
    assert metrics.updated and float(metrics.num_tokens) == 8.0


@shows("`optax.MultiSteps` around one of ours")
def wrapped_by_optax() -> None:
    optimizer = optax.MultiSteps(token_accumulation(SGD, 2), 2)
    update, state, moved = jax.jit(optimizer.update), optimizer.init(PARAMS), []
    for _ in range(8):
        updates, state = update({"w": jnp.ones(3)}, state, PARAMS, num_tokens=1)
        moved.append(bool(updates["w"][0] != 0))
    assert moved == [False, False, False, True] * 2


@shows("a count of the whole batch that looks like the device's own")
def counts_that_look_own() -> None:
    """Device by device the whole batch is counted: the update is an eighth."""

    def counted_maximum(w: Any, batch: Any) -> Any:
        return jnp.sum(w * batch["x"]), jnp.maximum(jnp.sum(batch["x"]), batch["n"])

    step = make_train_step(counted_maximum, SGD, 1, **OVER)
    batch = {"x": jnp.ones((8, 2)), "n": jnp.float32(16)}
    state, _ = stepped(step, batch, jnp.zeros(()))
    assert float(state.params) == -1 / 8


@pytest.mark.parametrize(("program", "code", "seen"), [*mistakes()])
def test_a_mistake_raises_what_the_page_shows_and_loses_nothing(
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


def test_every_mistake_in_words_is_on_the_page():
    assert all(
        f"| {words} | " in PAGE for words in (*IN_WORDS, *WITHOUT_AN_ERROR, NOT_SHOWN)
    )


@pytest.mark.parametrize("happens", WITHOUT_AN_ERROR.values(), ids=WITHOUT_AN_ERROR)
def test_a_mistake_without_an_error(happens: Any):
    happens()


def test_an_init_that_reads_values_is_no_reason_to_refuse_its_state():
    def init(params: Any) -> Any:
        return {"sign": jnp.sign(float(params["w"][0]))}

    inner = SGD._replace(init=init, update=lambda g, state, params=None: (g, state))
    chex.assert_trees_all_equal(updated(token_accumulation(inner, 1))[0], PARAMS)
