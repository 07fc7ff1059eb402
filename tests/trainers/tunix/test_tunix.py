"""The recipe of `docs/trainers.md` for Tunix, with the real SFT trainer of 0.1.7."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

pytest.importorskip("tunix.sft", reason="its own environment has Tunix")

from tunix.models.llama3.model import Llama3, ModelConfig
from tunix.sft import utils
from tunix.sft.peft_trainer import (
    PeftTrainer,
    TrainingConfig,
    TrainingInput,
    _default_loss_fn,
)
from tunix_token_trainer import TokenTrainer

PAGE = (Path(__file__).parents[3] / "docs" / "trainers.md").read_text()
(SECTION,) = re.findall(r"^## Tunix\n(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
TEXT = " ".join(SECTION.split())
(FIXED,) = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
AS_SHIPPED = FIXED.replace("= TokenTrainer(", "= PeftTrainer(")

K, ROWS = 4, 8
SGD = optax.sgd(1.0, momentum=0.0)
RTOL = helpers.RTOL["float32"]


class Tiny(nnx.Module):
    """Attends to the mean of visible positions; has the signature of Tunix's models."""

    def __init__(self):
        rngs, size, width = nnx.Rngs(0), helpers.VOCABULARY, helpers.WIDTH
        self.embed = nnx.Embed(size, width, rngs=rngs)
        self.hidden = nnx.Linear(width, width, rngs=rngs)
        self.out = nnx.Linear(width, size, rngs=rngs)

    def __call__(self, tokens: Any, positions: Any, cache: Any, mask: Any) -> Any:
        x = self.embed(tokens)
        seen = mask / jnp.maximum(mask.sum(-1, keepdims=True), 1)
        return self.out(nnx.tanh(self.hidden(seen @ x)) + x), cache


@nnx.jit
def llama3() -> Llama3:
    sizes = dict(num_layers=1, embed_dim=16, hidden_dim=32, head_dim=8, num_heads=2)
    rope = dict(num_kv_heads=1, rope_theta=10_000, norm_eps=1e-5)
    config = ModelConfig(vocab_size=helpers.VOCABULARY, **sizes, **rope)
    return Llama3(config, rngs=nnx.Rngs(0))


def gen_model_input(batch: TrainingInput) -> dict[str, Any]:
    return {
        "input_tokens": batch.input_tokens,
        "input_mask": batch.input_mask,
        "positions": utils.build_positions_from_mask(batch.input_mask),
        "attention_mask": utils.make_causal_attn_mask(batch.input_mask),
    }


def window(seed: int) -> tuple[TrainingInput, list[TrainingInput]]:
    """Return a batch, and the K micro-batches that it is cut into."""
    batch = helpers.ragged_batch(seed, ROWS)
    full, *cuts = (
        TrainingInput(input_tokens=b["tokens"], input_mask=b["mask"])
        for b in (batch, *helpers.cut(batch, K))
    )
    return full, cuts


def trained(trainer: PeftTrainer) -> Any:
    """Return the variables that the optimizer trains, as arrays."""
    return arrays(nnx.state(trainer.model, trainer.optimizer.wrt))


def arrays(state: Any) -> Any:
    return jax.tree.map(np.asarray, nnx.to_pure_dict(state))


@nnx.jit
def _loss_and_gradient(model: Any, batch: TrainingInput) -> Any:
    return nnx.value_and_grad(_default_loss_fn)(model, **gen_model_input(batch))


def full_batch(model: Any, batch: TrainingInput) -> tuple[float, Any]:
    """Return Tunix's own loss of a whole batch, and its gradient."""
    loss, gradient = _loss_and_gradient(model, batch)
    return float(loss), arrays(nnx.state(gradient))


def applied(trainer: PeftTrainer) -> Any:
    """Return the last gradient given to SGD; parameter differences are rounded."""
    return arrays(trainer.optimizer.opt_state.inner_opt_state[0].trace)


def new(trainer_class: Any, model: Any, optimizer: Any = SGD, **options: Any) -> Any:
    options = {"eval_every_n_steps": 1, "gradient_accumulation_steps": K} | options
    trainer = trainer_class(model, optimizer, TrainingConfig(**options))
    return trainer.with_gen_model_input_fn(gen_model_input)


def logged(trainer: PeftTrainer, name: str, mode: str = "train") -> list[float]:
    history = trainer.metrics_logger.get_metric_history("", name, mode)
    return [float(x) for x in history]


def run_block(block: str, **names: Any) -> Any:
    names |= {"TrainingConfig": TrainingConfig, "PeftTrainer": PeftTrainer}
    exec(compile(block, "docs/trainers.md", "exec"), names)
    return names["trainer"]


def test_as_shipped_and_fixed():
    batch, micro_batches = window(0)
    loss, expected = full_batch(Tiny(), batch)
    norm = float(optax.tree.norm(expected))
    moves, logs = [], []
    for block in (AS_SHIPPED, FIXED):
        model = Tiny()
        before = arrays(nnx.state(model, nnx.Param))
        trainer = run_block(
            block,
            model=model,
            optimizer=SGD,
            gen_model_input_fn=gen_model_input,
            train_ds=micro_batches,
            eval_ds=micro_batches,
        )
        moves.append(helpers.difference(before, trained(trainer)))
        evaluated = logged(trainer, "loss", "eval")[0]  # before the first update
        names = "loss", "perplexity", "grad_norm"
        logs.append((evaluated, *(logged(trainer, name)[0] for name in names)))
        assert (trainer.train_steps, trainer.iter_steps) == (1, K)

    naive, exact = (helpers.relative_error(move, expected) for move in moves)
    error = helpers.relative_error(applied(trainer), expected)
    # A parameter of size 1 rounds its updates to about 1e-7 of the *parameter*.
    assert naive > 0.1 and exact < 1e-5 and error < RTOL
    np.testing.assert_allclose(logs[1], (loss, loss, np.exp(loss), norm), rtol=RTOL)
    differ = np.abs(np.divide(*logs) - 1)
    assert differ.min() > 1e-3
    lengths = batch.input_mask[:, 1:].sum(1)
    assert f"{lengths.min()} to {lengths.max()} loss tokens" in TEXT
    assert f"{naive:.0%}".replace("%", " %") in TEXT and error < 3e-7


def test_windows_and_a_partial_last_one():
    model = llama3()
    trainer = new(TokenTrainer, model)
    losses, gradients = [], []

    def batches() -> Iterator[TrainingInput]:
        """Yield two windows, the last half as long; check the trainer in between."""
        for seed, k in ((0, K), (1, K // 2)):
            micro_batches, before = window(seed)[1][:k], trained(trainer)
            found = [full_batch(model, b) for b in micro_batches]
            counts = [b.input_mask[:, 1:].sum() for b in micro_batches]
            losses.append(np.average([loss for loss, _ in found], weights=counts))
            gradients.append(
                jax.tree.map(
                    lambda *xs, counts=counts: np.average(xs, 0, counts),
                    *[gradient for _, gradient in found],
                )
            )
            for micro_batch in micro_batches:
                chex.assert_trees_all_equal(trained(trainer), before)
                yield micro_batch

    trainer.train(batches())
    assert helpers.relative_error(applied(trainer), gradients[-1]) < RTOL
    assert (trainer.train_steps, trainer.iter_steps) == (2, K + K // 2)
    norms = [float(optax.tree.norm(gradient)) for gradient in gradients]
    np.testing.assert_allclose(logged(trainer, "loss"), losses, rtol=RTOL)
    np.testing.assert_allclose(logged(trainer, "grad_norm"), norms, rtol=RTOL)


def test_a_resumed_run_continues_exactly(tmp_path: Path):
    micro_batches = [b for seed in range(2) for b in window(seed)[1]]
    options = {"checkpoint_root_directory": str(tmp_path)}
    adam = optax.adamw(0.1)
    straight = new(TokenTrainer, Tiny(), adam)
    straight.train(micro_batches)
    new(TokenTrainer, Tiny(), adam, max_steps=1, **options).train(micro_batches)
    resumed = new(TokenTrainer, Tiny(), adam, **options)
    assert (resumed.train_steps, resumed.iter_steps) == (1, K)
    resumed.train(micro_batches)
    assert (resumed.train_steps, resumed.iter_steps) == (2, 2 * K)
    chex.assert_trees_all_equal(trained(resumed), trained(straight))


def test_a_run_resumed_after_a_partial_window_trains_every_micro_batch(tmp_path: Path):
    """Ten micro-batches in windows of four; then the same data, and eight more."""
    seen: list[Any] = []

    class Recording(TokenTrainer):
        def _post_process_train_step(self, aux: Any) -> None:
            seen.append(self.iter_steps)
            super()._post_process_train_step(aux)

    batches = [b for seed in range(5) for b in window(seed)[1]]
    options = {"checkpoint_root_directory": str(tmp_path)}
    first = new(Recording, Tiny(), **options)
    first.train(batches[:10])
    assert (first.train_steps, len(seen)) == (3, 10)
    resumed = new(Recording, Tiny(), **options)
    assert resumed.train_steps == 3
    resumed.train(batches[:18])
    assert len(seen) == 18  # the eleventh and the twelfth, too
    assert resumed.train_steps == 5
