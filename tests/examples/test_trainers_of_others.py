"""The steps of Kauldron and MaxText, in a few lines, and their pages' code."""

import dataclasses
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"
K, ROWS = 4, 16
RTOL = helpers.RTOL["float32"]


def blocks_of(page: str, section: str = "") -> list[str]:
    """Return the blocks of a page, or of its section with this heading."""
    text = (DOCS / page).read_text()
    if section:
        text = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def import_as(monkeypatch: Any, name: str, **attributes: Any) -> Any:
    """Make `name` importable, with these attributes."""
    module: Any = ModuleType(name)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)
    return module


class State(NamedTuple):
    params: Any
    opt_state: Any


@dataclasses.dataclass(kw_only=True, eq=False, frozen=True)
class TrainStep:
    """Update with the gradient of the mean loss, as Kauldron 1.4.4."""

    optimizer: Any = None

    def _step(self, state: State, batch: Any) -> tuple[State, Any]:
        grads, _ = jax.grad(helpers.loss_mean_fn, has_aux=True)(state.params, batch)
        update = jax.named_call(self.optimizer.update)
        updates, opt_state = update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(params, opt_state), updates


def trainer(trainstep: Any = None, **options: Any) -> Any:
    trainstep = trainstep or TrainStep()
    return SimpleNamespace(
        trainstep=dataclasses.replace(trainstep, optimizer=options["optimizer"])
    )


def kauldron_gradient(trainstep: Any, batches: list[Any]) -> Any:
    """Return the last gradient that was given to SGD."""
    params = helpers.init_params(3)
    state = State(params, trainstep.optimizer.init(params))
    step = jax.jit(trainstep._step)
    for batch in batches:
        state, _ = step(state, batch)
    return state.opt_state.inner_opt_state[0].trace


def test_kauldron(monkeypatch: pytest.MonkeyPatch):
    kd = SimpleNamespace(train=SimpleNamespace(TrainStep=TrainStep, Trainer=trainer))
    import_as(monkeypatch, "kauldron", kd=kd)
    (changed,) = blocks_of("trainers.md", "Kauldron")
    without_count = changed.replace("trainstep=TokenTrainStep(), ", "")
    theirs = "optax.MultiSteps(optimizer, 4)"
    shipped = re.sub(r"token_accumulation\(.*\)", theirs, without_count)
    sgd = optax.sgd(1.0, momentum=0.0)
    given: dict[str, Any] = {"optax": optax, "optimizer": sgd, "options": {}}

    batch = helpers.ragged_batch(3, ROWS)
    expected = helpers.float64_gradient(helpers.init_params(3), batch)
    errors = []
    for block in (shipped, changed):
        names = dict(given)
        exec(compile(block, "docs/trainers.md", "exec"), names)
        got = kauldron_gradient(names["trainer"].trainstep, helpers.cut(batch, K))
        errors.append(helpers.relative_error(got, expected))
    assert errors[0] > 0.1
    assert errors[1] < RTOL


class MaxTextModel(nnx.Module):
    def __init__(self):
        for name, x in helpers.init_params(3).items():
            setattr(self, name, nnx.Param(x))
        self.rngs = nnx.Rngs(dropout=0)
        self.words = [helpers.VOCABULARY]  # a graph definition without a hash

    def params(self) -> Any:
        names = helpers.init_params(3)
        return {name: getattr(self, name)[...] for name in names}


@jax.custom_vjp
def in_fixed_range(x: Any) -> Any:
    """Clip cotangents to a range that holds those of a mean, and none of a sum."""
    return x


in_fixed_range.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))


def loss_in_fixed_range(params: Any, batch: Any) -> Any:
    embed = in_fixed_range(params["embed"])
    return helpers.loss_sum_fn(params | {"embed": embed}, batch)


def maxtext_loss_fn(
    model: Any, config: Any, data: Any, dropout_rng: Any, params: Any, is_train: bool
) -> Any:
    """The sum of the loss, and what MaxText 0.2.5 logs."""
    assert is_train
    model.rngs.dropout()
    f = loss_in_fixed_range if config.quantization else helpers.loss_sum_fn
    loss_sum, num_tokens = f(model.params(), data)
    aux = {"xent_sum": loss_sum, "total_weights": num_tokens, "mtp_loss": 3.0}
    return loss_sum, aux | {"moe_lb_loss": 0.0, "indexer_loss": 0.0, "bias": None}


def test_maxtext(monkeypatch: pytest.MonkeyPatch):
    for name in ("", ".utils", ".trainers"):
        import_as(monkeypatch, f"maxtext{name}")
    shard = {"maybe_shard_with_name": lambda x, sharding, shard_mode: x}
    import_as(monkeypatch, "maxtext.utils.sharding", **shard)
    train = SimpleNamespace(main=None)
    import_as(monkeypatch, "maxtext.trainers.pre_train", train=train)
    import_as(monkeypatch, "absl", app=SimpleNamespace(run=lambda main: None))
    monkeypatch.delitem(sys.modules, "maxtext_glue", raising=False)
    [start] = blocks_of("trainers.md", "MaxText")
    exec(compile(start, "docs/trainers.md", "exec"), {})
    refused = sys.modules["maxtext_glue"].REFUSED

    model, batch = MaxTextModel(), helpers.ragged_batch(3, ROWS)
    config = SimpleNamespace(**dict.fromkeys(refused, False))
    config.gradient_accumulation_steps, config.shard_mode = K, None
    config.global_batch_size_to_train_on = ROWS
    config.max_target_length, config.quantization = helpers.MAX_LENGTH, False
    params = nnx.state(model, nnx.Param)
    arguments = maxtext_loss_fn, config, model, None, params, batch, None
    for config.shard_optimizer_over_data in (False, True):
        narrow = config.shard_optimizer_over_data
        rtol = helpers.RTOL["bfloat16" if narrow else "float32"]
        loss, aux, grads = train.gradient_accumulation_loss_and_grad(*arguments)
        expected = helpers.float64_gradient(model.params(), batch)
        assert helpers.relative_error(nnx.to_pure_dict(grads), expected) < rtol
        assert aux["total_weights"] == np.sum(batch["mask"])
        np.testing.assert_allclose(loss, aux["xent_sum"] / aux["total_weights"], rtol)
        assert (aux["mtp_loss"], aux["bias"]) == (3, None)
    assert model.rngs.dropout.count[...] == 2 * K

    # A range that clips the gradient of a sum, and not that of the mean.
    config.quantization, config.shard_optimizer_over_data = True, False
    _, _, grads = train.gradient_accumulation_loss_and_grad(*arguments)
    assert helpers.relative_error(nnx.to_pure_dict(grads), expected) < RTOL
    of_sum, n = jax.grad(loss_in_fixed_range, has_aux=True)(model.params(), batch)
    of_sum = jax.tree.map(lambda g: g / n, of_sum)
    assert helpers.relative_error(of_sum, expected) > 0.1
    assert model.embed[...].dtype == jnp.float32

    config.routed_bias = True
    with pytest.raises(ValueError, match="routed_bias"):
        train.gradient_accumulation_loss_and_grad(*arguments)
