"""Token means in the `fit` of Keras 3.15.1: see docs/trainers.md#keras."""

import jax
import keras
import optax
from keras.src.backend import get_keras_mask, set_keras_mask

from optax_tokenaccum import close_window, split_batch, token_accumulation


class TokenMean:
    """Takes every batch of `fit` as a window, and runs it in `k` micro-batches."""

    k = 1

    def train_step(self, state, data):
        params, others, optimizer_variables, metrics = state
        tx = token_accumulation(optax.identity())

        def add(carry, batch):
            sums, others, metrics = carry
            x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)

            def loss_fn(params):
                returned = self.compute_loss_and_updates(
                    params, others, metrics, x, y, weights, True, optimizer_variables
                )
                mean, (loss, y_pred, new_others, new_metrics) = returned
                n = Ones(self.loss)(y, y_pred, weights)
                with self.with_metrics(new_metrics) as scope:
                    self.metrics[0].update_state(loss, n)  # Keras's "loss"
                    self.compute_metrics(x, y, y_pred, weights)
                new_metrics = map(scope.get_current_value, self.metrics_variables)
                return mean * n, (n, new_others, list(new_metrics))

            grads, (n, *states) = jax.grad(loss_fn, has_aux=True)(params)
            _, sums = tx.update(grads, sums, params, num_tokens=n, close_window=False)
            return (sums, *states), None

        rows = len(jax.tree.leaves(data)[0])
        size = -(-rows // self.k)
        rest = rows % size  # rows of a last micro-batch, where k does not divide
        whole = jax.tree.map(lambda x: x[: rows - rest], data)
        whole = split_batch(whole, rows // size)
        carry, _ = jax.lax.scan(add, (tx.init(params), others, metrics), whole)
        if rest:
            carry, _ = add(carry, jax.tree.map(lambda x: x[rows - rest :], data))
        sums, others, metrics = carry
        grads, _ = close_window(tx, sums, params)
        params, optimizer_variables = self.optimizer.stateless_apply(
            optimizer_variables, grads, params
        )
        with self.with_metrics(metrics):
            logs = self.get_metrics_result()
        return logs, (params, others, optimizer_variables, metrics)

    def with_metrics(self, values):
        mapping = zip(self.metrics_variables, values, strict=True)
        return keras.StatelessScope(list(mapping))

    def make_train_function(self, force=False):
        if getattr(self.loss, "reduction", None) != "mean_with_sample_weight":
            raise ValueError(
                "The loss must be one keras.losses.Loss, with reduction="
                f'"mean_with_sample_weight": got {self.loss}.'
            )
        optimizer = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        if optimizer.gradient_accumulation_steps:
            raise ValueError(
                "TokenMean accumulates, so the optimizer must not: got "
                f"gradient_accumulation_steps={optimizer.gradient_accumulation_steps}."
            )
        if any(getattr(v, "overwrite_with_gradient", False) for v in self.variables):
            raise ValueError("TokenMean cannot train a model quantized to float8.")
        super().make_train_function(force)

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        if keras.tree.is_nested(y_pred):
            raise ValueError("TokenMean needs one output, with one loss: got several.")
        regularized = [v for v in self.trainable_weights if v.regularizer]
        if len(self.losses) > len(regularized):
            raise ValueError(
                "A loss of add_loss or of an activity_regularizer does not say what it "
                "is a mean over. Make it a part of the loss, or regularize weights."
            )
        return super().compute_loss(x, y, y_pred, sample_weight, training)


class Ones(keras.losses.Loss):
    """A loss of 1 per element: the sum of the weights that another loss gives them."""

    def __init__(self, loss):
        super().__init__(reduction="sum")
        self.loss = loss

    def call(self, y_true, y_pred):
        losses = self.loss.call(y_true, y_pred)
        ones = keras.ops.ones_like(losses)
        set_keras_mask(ones, get_keras_mask(losses))  # of ignore_class
        return ones
