"""The steps of EasyDeL, Kauldron and MaxText, in a few lines, and their pages' code."""

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

DOCS = Path(__file__).parents[2] / "docs"
K, ROWS = 4, 16
RTOL = helpers.RTOL["float32"]
GENERATIONS = 4  # of each prompt
PROMPT = 5  # loss tokens of each row that belong to a masked prompt


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


def token_losses(params: Any, batch: Any) -> jax.Array:
    return optax.losses.softmax_cross_entropy_with_integer_labels(
        helpers.logits_of(params, batch["tokens"]), jnp.maximum(batch["labels"], 0)
    )


@dataclasses.dataclass
class Metrics:
    loss: Any
    weight_sum: Any = None


jax.tree_util.register_dataclass(Metrics, ["loss", "weight_sum"], [])


def minibatch_call(state: Any, batch: Any, minibatch_size: int, grad_fn: Any) -> Any:
    """Average over micro-batches, as EasyDeL 0.3.0; numbers go to each of them."""
    arrays = {name: x for name, x in batch.items() if jnp.ndim(x)}
    numbers = {name: x for name, x in batch.items() if not jnp.ndim(x)}
    k = len(batch["tokens"]) // minibatch_size
    parts = [
        grad_fn(state.graphstate, part | numbers) for part in helpers.cut(arrays, k)
    ]
    metrics, grads = zip(*((m, g) for (_, m), g in parts), strict=True)
    return tuple(
        jax.tree.map(lambda *xs: sum(xs) / k, *trees) for trees in (grads, metrics)
    )


def training_step(module: Any, params: Any, batch: Any, k: int, loss_fn: Any) -> Any:
    """Return gradient and metrics of `k` micro-batches, by the module's function."""
    return jax.jit(
        lambda params, batch: module.minibatch_call(
            state=SimpleNamespace(graphstate=params),
            batch=batch,
            minibatch_size=ROWS // k,
            grad_fn=jax.value_and_grad(loss_fn, has_aux=True),
        )
    )(params, batch)


def sft_loss_fn(reduction: str | None) -> Any:
    """A mean over the attention mask, or over the labels with reduction="mean"."""

    def loss_fn(params: Any, batch: Any) -> Any:
        counted = batch["attention_mask"] & (batch["labels"] != -100)
        loss_sum = jnp.sum(jnp.where(counted, token_losses(params, batch), 0))
        divisor = counted if reduction else batch["attention_mask"]
        loss = loss_sum / jnp.sum(divisor)
        return loss, Metrics(loss, jnp.sum(counted).astype(jnp.float32))

    return loss_fn


def policy_loss_fn(params: Any, batch: Any) -> Any:
    """The sum over `num_items_in_batch`, by default the micro-batch's own tokens."""
    mask = batch["completion_mask"]
    losses = token_losses(params, batch) * batch["advantages"][:, None]
    losses += jnp.mean(params["embed"][batch["prompt_ids"]], (1, 2))[:, None]
    tokens = batch.get("num_items_in_batch", jnp.sum(mask))
    loss = jnp.sum(losses * mask) / tokens
    return loss, Metrics(loss)


@pytest.fixture
def easydel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the page's code imports, with `minibatch_call` as shipped."""
    import_as(monkeypatch, "easydel")
    import_as(monkeypatch, "easydel.infra")
    import_as(monkeypatch, "easydel.infra.loss_utils", LossConfig=SimpleNamespace)
    import_as(monkeypatch, "easydel.trainers")
    modules = {}
    for name in ("trainer", "group_relative_policy_optimization"):
        modules[name] = SimpleNamespace(minibatch_call=minibatch_call)
        import_as(monkeypatch, f"easydel.trainers.{name}", _fn=modules[name])
    names: dict[str, Any] = {}
    sft, policy = modules.values()

    def change() -> Any:
        (block,) = blocks_of("trainers.md", "EasyDeL")
        exec(compile(block, "docs/trainers.md", "exec"), names)
        return names["loss_config"]

    return SimpleNamespace(sft=sft, policy=policy, change=change)


def sft_batch() -> dict[str, np.ndarray]:
    """Return rows whose first tokens are a masked prompt, with a loss token each."""
    batch = helpers.ragged_batch(3, ROWS)
    place = np.arange(helpers.MAX_LENGTH)
    labels = np.where(~batch["mask"] | (place < PROMPT), -100, batch["labels"])
    labels[:, PROMPT] = batch["labels"][:, PROMPT]
    return {
        "tokens": batch["tokens"],
        "labels": labels,
        "attention_mask": batch["mask"] | (place <= PROMPT),
    }


@pytest.mark.slow
def test_easydel_sft(easydel: Any):
    params, batch = helpers.init_params(3), sft_batch()
    counted = batch["attention_mask"] & (batch["labels"] != -100)
    full = batch | {"mask": counted, "labels": np.maximum(batch["labels"], 0)}
    expected, num_tokens = helpers.float64_gradient(params, full), counted.sum()
    shipped, _ = training_step(easydel.sft, params, batch, K, sft_loss_fn(None))
    assert helpers.relative_error(shipped, expected) > 0.1

    loss_fn = sft_loss_fn(easydel.change().reduction)
    for k in (1, K):
        grads, metrics = training_step(easydel.sft, params, batch, k, loss_fn)
        assert helpers.relative_error(grads, expected) < RTOL
        whole = loss_fn(params, jax.tree.map(jnp.asarray, batch))[0]
        np.testing.assert_allclose(metrics.loss, whole, rtol=RTOL)
        assert float(metrics.weight_sum) == num_tokens / k


def policy_batch() -> dict[str, Any]:
    batch, rng = helpers.ragged_batch(3, ROWS), np.random.default_rng(3)
    prompts = ROWS // GENERATIONS
    return {
        "tokens": batch["tokens"],
        "labels": batch["labels"],
        "completion_ids": batch["labels"],
        "completion_mask": batch["mask"].astype(np.int32),
        "advantages": rng.normal(size=ROWS).astype(np.float32),
        "prompt_ids": rng.integers(0, helpers.VOCABULARY, (prompts, 4)),
        "prompt_mask": np.ones((prompts, 4), np.int32),
    }


@pytest.mark.slow
def test_easydel_policy(easydel: Any):
    params, batch = helpers.init_params(3), policy_batch()
    for_each = {
        name: np.repeat(batch[name], GENERATIONS, 0)
        for name in ("prompt_ids", "prompt_mask")
    }
    num_items = {"num_items_in_batch": jnp.sum(batch["completion_mask"])}
    full = batch | for_each
    expected = helpers.in_float64(
        jax.grad(lambda params, batch: policy_loss_fn(params, batch)[0])
    )(params, full)

    dapo, _ = training_step(easydel.policy, params, full | num_items, K, policy_loss_fn)
    times_k = jax.tree.map(lambda g: K * g, dapo)
    assert helpers.relative_error(times_k, expected) < RTOL  # exactly 1/k
    bnpo, _ = training_step(easydel.policy, params, full, K, policy_loss_fn)
    assert helpers.relative_error(bnpo, expected) > 0.05

    easydel.change()
    for k in (1, K):
        given = batch | num_items
        grads, _ = training_step(easydel.policy, params, given, k, policy_loss_fn)
        assert helpers.relative_error(grads, expected) < RTOL


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

    names = dict(given)
    exec(without_count, names)
    with pytest.raises(TypeError, match="num_tokens"):
        kauldron_gradient(names["trainer"].trainstep, helpers.cut(batch, K))


class MaxTextModel(nnx.Module):
    def __init__(self):
        for name, x in helpers.init_params(3).items():
            setattr(self, name, nnx.Param(x))
        self.rngs = nnx.Rngs(dropout=0)
        self.words = [helpers.VOCABULARY]  # a graph definition without a hash

    def params(self) -> Any:
        names = helpers.init_params(3)
        return {name: getattr(self, name)[...] for name in names}


def maxtext_loss_fn(
    model: Any, config: Any, data: Any, dropout_rng: Any, params: Any, is_train: bool
) -> Any:
    """The sum of the loss, and what MaxText 0.2.5 logs."""
    assert is_train
    model.rngs.dropout()
    loss_sum, num_tokens = helpers.loss_sum_fn(model.params(), data)
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
    glue, start = blocks_of("maxtext.md")
    shared = (DOCS.parent / "benchmarks/maxtext_glue.py").read_text()
    assert glue in re.sub("  # pyrefly: ignore.*", "", shared)
    names: dict[str, Any] = {}
    for block in (glue, start):
        exec(compile(block, "docs/maxtext.md", "exec"), names)

    model, batch = MaxTextModel(), helpers.ragged_batch(3, ROWS)
    config = SimpleNamespace(**dict.fromkeys(names["REFUSED"], False))
    config.gradient_accumulation_steps, config.shard_mode = K, None
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
    assert model.embed[...].dtype == jnp.float32

    config.routed_bias = True
    with pytest.raises(NotImplementedError, match="routed_bias"):
        train.gradient_accumulation_loss_and_grad(*arguments)
