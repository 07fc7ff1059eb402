#!/usr/bin/env bash
# tokamax's chunked cross entropy is wrong unless the vocabulary is a multiple of 2,048.
#
# Versions: tokamax 0.0.17, which needs Python 3.12, and jax 0.12.0.1, on a CPU.
# Seen: linear_softmax_cross_entropy_loss with implementation="chunked_xla" pads the head with zeros
#   up to a multiple of 2,048 words, and counts their logits of 0 in the sum of exponentials. With
#   32,000 words the mean loss is 10.397 for 10.373. The more negative the logits, the more the
#   padding weighs: with 5 subtracted from all of them, which changes no softmax, 11.888 for 10.373,
#   and the gradient of the hidden states is off by 48 times its norm. 50,257 and 151,936 words are
#   padded, too, and 32,768 are not. The default on a CPU, "xla", is right.
# Expected: the loss and the gradient of the words that there are, or an error.
# Instead: implementation="xla".
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

def losses(vocabulary, shift):
    x = jax.random.normal(keys[0], (64, 16)).at[:, 0].set(1)
    head = (0.02 * jax.random.normal(keys[1], (16, vocabulary))).at[0].add(shift)
    labels = jax.random.randint(keys[2], (64,), 0, vocabulary)

    def by_jax(x):
        return -jnp.take_along_axis(jax.nn.log_softmax(x @ head), labels[:, None], 1).mean()

    def by_tokamax(x, implementation):
        return tokamax.linear_softmax_cross_entropy_loss(
            x, labels, head, reduction="mean", implementation=implementation)

    right, gradient = jax.value_and_grad(by_jax)(x)
    seen = {}
    for name in ("xla", "chunked_xla"):
        loss, other = jax.value_and_grad(by_tokamax)(x, name)
        difference = jnp.linalg.norm(other - gradient) / jnp.linalg.norm(gradient)
        seen[name] = float(loss - right), float(difference)
        print(f"{vocabulary} words, {shift:+.0f}: {right:.3f}; {name}: {loss:.3f}, "
              f"gradient off by {difference:.2g}")
    return seen

for vocabulary, shift, low in [(32768, -5.0, 0), (32000, 0.0, 0.02), (32000, -5.0, 1.0),
                               (50257, -5.0, 1.0), (151936, -5.0, 0.5)]:
    seen = losses(vocabulary, shift)
    assert abs(seen["xla"][0]) < 1e-4
    assert (seen["chunked_xla"][0] > low) if low else abs(seen["chunked_xla"][0]) < 1e-4
PYTHON
