"""Token means in the SFT trainer of Tunix 0.1.7: see docs/trainers.md#tunix."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
from tunix.sft.metrics_logger import Mode
from tunix.sft.peft_trainer import PeftTrainer

from optax_tokenaccum import token_accumulation
from optax_tokenaccum.losses import softmax_cross_entropy_sum
from optax_tokenaccum.nnx import make_train_step


def token_loss(model, input_tokens, input_mask, positions, attention_mask):
    """Tunix's default loss, not divided, and the tokens it is over."""
    logits, _ = model(input_tokens, positions, None, attention_mask)
    return softmax_cross_entropy_sum(
        logits[:, :-1], input_tokens[:, 1:], input_mask[:, 1:]
    )


class TokenTrainer(PeftTrainer):
    def __init__(self, model, optimizer, training_config, **kwargs):
        k = training_config.gradient_accumulation_steps or 1
        # Told of k, Tunix would wrap the optimizer in optax.MultiSteps as well.
        config = dataclasses.replace(training_config, gradient_accumulation_steps=None)
        super().__init__(model, token_accumulation(optimizer, k), config, **kwargs)
        self.config = training_config
        # A resumed run begins with a window, and Tunix leaves out as many micro-batches
        # as all windows would have. If the last one was partial, it had fewer.
        self._iter_steps = self._train_steps * k
        saved = self._restored_custom_metadata or {}
        self._missing = self._iter_steps - saved.get("seen", self._iter_steps)
        self.with_loss_fn(token_loss)

    def custom_checkpoint_metadata(self):
        return {"seen": self._iter_steps - self._missing}

    def train(self, train_ds, *args, **kwargs):
        missing = itertools.repeat(None, self._missing)
        super().train(itertools.chain(missing, train_ds), *args, **kwargs)

    def _train_step(self, model, optimizer, inputs):
        step = make_train_step(lambda model, inputs: self.loss_fn(model, **inputs))
        metrics = step(model, optimizer, self.gen_model_input_fn(inputs))
        return metrics.loss, None, metrics.grad_norm  # of the window so far

    def _eval_step(self, model, inputs):
        inputs = self.gen_model_input_fn(inputs)
        return jnp.stack(self.eval_loss_fn(model, **inputs)), None

    def _write_metrics(self, buffer):
        if self._mode == Mode.EVAL:
            loss_sum, num_tokens = np.sum(buffer.losses, axis=0)
            buffer.losses = [loss_sum / num_tokens]
        else:
            buffer.losses = buffer.losses[-1:]
            norms, _ = buffer.additional_metrics["grad_norm"]
            buffer.additional_metrics["grad_norm"] = norms[-1:], np.mean
        super()._write_metrics(buffer)

    def close(self):
        metrics = make_train_step(self.loss_fn).close_window(self.model, self.optimizer)
        if metrics.updated:  # the last window was partial
            norms, _ = self._buffered_train_metrics.additional_metrics["grad_norm"]
            norms.append(metrics.grad_norm)
            self._train_steps += 1
            self._write_train_metrics()
            # Tunix's own last checkpoint has no metadata.
            self.checkpoint_manager.save(
                self._train_steps,
                self.model,
                self.optimizer,
                save_only_lora_params=self._lora_enabled,
                force=True,
                custom_metadata=self.custom_checkpoint_metadata(),
            )
        super().close()
