"""Token means in the trainers of EasyDeL 0.3.0: see docs/trainers.md#easydel."""

import jax

from optax_tokenaccum import accumulate_over_window, split_batch


def minibatch_call(state, batch, minibatch_size, grad_fn, *, count):
    def counted(tree, minibatch):
        (loss, metrics), grads = grad_fn(tree, minibatch)
        return (loss, (count(minibatch, metrics), metrics)), grads

    k = len(jax.tree.leaves(batch)[0]) // minibatch_size
    accumulate = accumulate_over_window(counted, gradients="mean", has_aux=True)
    (loss, (_, metrics)), grads = accumulate(state.graphstate, split_batch(batch, k))
    metrics = jax.tree.map(lambda x: x.mean(0), metrics)
    metrics.loss = loss
    return grads, metrics


def sft_minibatch_call(state, batch, minibatch_size, grad_fn):
    return minibatch_call(
        state,
        batch,
        minibatch_size,
        grad_fn,
        count=lambda minibatch, metrics: metrics.weight_sum,
    )


def policy_minibatch_call(state, batch, minibatch_size, grad_fn):
    # Without the count of the window, a loss is a mean over its micro-batch's tokens.
    batch = {name: x for name, x in batch.items() if name != "num_items_in_batch"}
    rows = len(batch["completion_ids"])
    for name in ("prompt_ids", "prompt_mask"):  # a row for each completion
        batch[name] = batch[name].repeat(rows // len(batch[name]), 0)
    return minibatch_call(
        state,
        batch,
        minibatch_size,
        grad_fn,
        count=lambda minibatch, metrics: minibatch["completion_mask"].sum(),
    )
