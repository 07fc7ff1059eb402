"""Numbers that other projects published about their fixes, reproduced here."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from batches import Batch
from llama import VOCABULARY, TorchRandom, init, loss_fn, make_rows
from methods import NAIVE, REFERENCE
from naive_or_exact import EXACT, compare, gradient, train

from optax_tokenaccum import make_window_step, softmax_cross_entropy_sum

LEARNING_RATE = 0.5


class Fixture(NamedTuple):
    """A published number or bound, right and wrong, and the values found here."""

    source: str
    quantity: str
    right: str
    exact: float
    wrong: str
    naive: float


def weighted_sum(params: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """A loss that equals its gradient at parameter 1."""
    return params * jnp.sum(batch.inputs), jnp.sum(batch.mask)


def sums_and_counts(*pairs: tuple[float, int]) -> Batch:
    """Makes one row per micro-batch, from pairs `(loss_sum, num_tokens)`."""
    mask = np.arange(max(n for _, n in pairs)) < np.array([[n] for _, n in pairs])
    values = np.zeros(mask.shape, np.float32)
    values[:, 0] = [loss_sum for loss_sum, _ in pairs]
    return Batch(values, values, mask)


def torchtitan() -> list[Fixture]:
    """The loss of pull request 4167, from sums and tokens (2, 1) and (90, 9)."""
    batch, one = sums_and_counts((2, 1), (90, 9)), jnp.ones(())
    _, [naive] = train(NAIVE, weighted_sum, one, [batch], 2, 0.0)
    step = make_window_step(weighted_sum, optax.sgd(0.0))
    _, metrics = step(step.init(one), Batch(*(part[:, None] for part in batch)))
    return [Fixture("torchtitan", "loss", "9.2", float(metrics.loss), "6.0", naive)]


def megatron() -> list[Fixture]:
    """The gradients of Megatron-LM's issue 7452, from sums and tokens chosen here."""
    batch = sums_and_counts((4, 2), (4, 1), (8, 1))
    [exact], [naive] = (
        gradient(method, weighted_sum, jnp.zeros(()), batch, 3)
        for method in (EXACT, NAIVE)
    )
    return [Fixture("Megatron-LM", "gradient", "4", exact, "14/3", naive)]


def accelerate() -> list[Fixture]:
    """The guide's `Linear(1, 2)`, which tells odd from even in rows of 1 to 16 numbers.

    The guide's two devices alternate every 4 rows, so they get 10 + 42 = 52 and
    26 + 58 = 84 tokens.
    """

    def linear(params: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        logits = batch.inputs[..., None] * params
        return softmax_cross_entropy_sum(logits, batch.labels, batch.mask)

    mask = np.tri(16, dtype=bool)
    numbers = np.broadcast_to(np.arange(1, 17, dtype=np.int32), mask.shape)
    batch = Batch(numbers, numbers % 2, mask)
    weights = jnp.asarray(2 * TorchRandom(0).uniform(2) - 1, jnp.float32)
    exact, naive = (
        train(method, linear, weights, [batch], 4, 0.08)[0].tolist()
        for method in (EXACT, NAIVE)
    )
    return [
        Fixture("accelerate", "weight 0", "0.2117", exact[0], "-", naive[0]),
        Fixture("accelerate", "weight 1", "0.3172", exact[1], "-", naive[1]),
    ]


def soup() -> list[Fixture]:
    """Pull request 943: rows of 2, 2, 2, 2, 16, 16, 16 and 16 tokens, cut in two."""
    ids = TorchRandom(1).integers(1, VOCABULARY, 8, 16)
    lengths = np.repeat([2, 16], 4)[:, None]
    batch = Batch(ids[:, :-1], ids[:, 1:], np.arange(1, 16) < lengths)
    run = loss_fn, init(0, width=16, layers=1), batch
    full = gradient(REFERENCE, *run)
    exact = compare(full, gradient(EXACT, *run, 2))
    naive = compare(full, gradient(NAIVE, *run, 2))
    published = {"norm ratio": ("1", "1.7776"), "relative L2": ("0", "1.5322")}
    published["cosine"] = ("1", "0.5097")
    return [
        Fixture("Soup", name, right, exact[name], wrong, naive[name])
        for name, (right, wrong) in published.items()
    ]


def logged_losses() -> list[Fixture]:
    """Bounds on the losses of 8 rows, from the tests of transformers and torchtune."""
    rows = [make_rows(i, 1, 15) for i in range(5)]
    batches = [Batch(*(part[:8, :15] for part in batch)) for batch in rows]
    run = loss_fn, init(0, width=16, layers=1), batches
    _, full = train(REFERENCE, *run, 1, LEARNING_RATE)

    def farthest(method: str, k: int) -> float:
        _, losses = train(method, *run, k, LEARNING_RATE)
        return float(np.max(np.abs(np.subtract(losses, full))))

    ks, name = (2, 4, 8), "loss difference"
    exact, naive = ([farthest(method, k) for k in ks] for method in (EXACT, NAIVE))
    return [
        Fixture("transformers", name, "< 0.01", exact[0], "> 0.7", naive[0]),
        Fixture("torchtune", name, "< 1e-4", max(exact), "-", max(naive)),
    ]


FIXTURES = (torchtitan, megatron, accelerate, soup, logged_losses)
