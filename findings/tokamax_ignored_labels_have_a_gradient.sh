#!/usr/bin/env bash
# A row with the label -100 has no loss in tokamax's cross entropy, and still a gradient.
#
# Versions: tokamax 0.0.17, which needs Python 3.12, and jax 0.12.0.1, on a CPU.
# Seen: linear_softmax_cross_entropy_loss makes a one-hot row of zeros of a label that is outside of
#   the vocabulary. Its loss is 0, so the total is that of the other rows. But the backward pass
#   returns the softmax, the gradient of log-sum-exp: with half of 64 rows ignored, the gradient of
#   the head is off by 0.65 of its norm. jax.grad of the formula in its docstring,
#   -sum(one_hot * log_softmax), is right.
# Expected: the gradient of the value, or an error. -100 marks what a loss ignores in PyTorch and in
#   most data made for it, and the logged loss is right while padding is trained.
# Instead: reduction="none", and multiply the losses with a mask.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3.12 -m venv "$work/env"
"$work/env/bin/pip" install --quiet jax==0.12.0.1 tokamax==0.0.17
"$work/env/bin/python" - <<'PYTHON'
import logging
import jax, jax.numpy as jnp, tokamax

logging.disable(logging.WARNING)  # of the cache of an autotuner
keys = jax.random.split(jax.random.key(0), 3)
x = jax.random.normal(keys[0], (64, 16))
head = jax.random.normal(keys[1], (16, 32))
mask = jnp.arange(64) < 32
labels = jnp.where(mask, jax.random.randint(keys[2], (64,), 0, 32), -100)

def formula(head):
    return -jnp.sum(jax.nn.one_hot(labels, 32) * jax.nn.log_softmax(x @ head))

def ignored(head):
    return tokamax.linear_softmax_cross_entropy_loss(
        x, labels, head, reduction="sum", implementation="xla")

def masked(head):
    losses = tokamax.linear_softmax_cross_entropy_loss(
        x, jnp.maximum(labels, 0), head, reduction="none", implementation="xla")
    return jnp.sum(losses * mask)

right, gradient = jax.value_and_grad(formula)(head)
for f, is_right in ((masked, True), (ignored, False)):
    loss, other = jax.value_and_grad(f)(head)
    difference = float(jnp.linalg.norm(other - gradient) / jnp.linalg.norm(gradient))
    print(f"{f.__name__}: loss {loss:.3f} for {right:.3f}, gradient off by {difference:.2g}")
    assert abs(loss - right) < 1e-3 * right
    assert (difference < 1e-5) == is_right
PYTHON
