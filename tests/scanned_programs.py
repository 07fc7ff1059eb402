"""Losses that scan over their parameters, in all the ways that a model may."""

from typing import Any, NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

SIZE = 3  # of every axis, so that gradients that are swapped have the right shapes
NAMES = ("a", "b", "c")

# How a program takes a parameter, or a part of one.
USES = {
    "whole": lambda p: p,
    "tripled": lambda p: 3.0 * p,
    "sine": jnp.sin,
    "turned": lambda p: jnp.swapaxes(p, 0, 1),
}
PARTS = {"first": 0, "last": -1}


class Leaf(NamedTuple):
    """A parameter, what is done to it, and which of its layers is taken if not all."""

    name: str
    use: str
    part: str | None = None

    def of(self, params: Any) -> Any:
        value = USES[self.use](params[self.name])
        return value if self.part is None else value[PARTS[self.part]]


class Scan(NamedTuple):
    """A scan over layers."""

    scanned: tuple[Leaf, ...]
    constants: tuple[Leaf, ...]
    carried: Leaf | None
    reverse: bool
    unroll: int
    remat: bool
    nested: bool

    def __call__(self, params: Any, x: Any) -> Any:
        constants = [leaf.of(params) for leaf in self.constants]

        def layer(carry: Any, weights: Any) -> Any:
            x, carried = carry
            for i, w in enumerate([*weights, *constants], start=2):
                x = jnp.tanh(x @ w / i + 1 / i)
            if carried is not None:
                x, carried = x + jnp.sin(x @ carried), 0.5 * carried + 0.1
            return (x, carried), None

        def layers(carry: Any, weights: Any) -> Any:
            return jax.lax.scan(lambda carry, _: layer(carry, weights), carry, length=2)

        body = layers if self.nested else layer
        carried = None if self.carried is None else self.carried.of(params)
        (x, _), _ = jax.lax.scan(
            jax.checkpoint(body) if self.remat else body,
            (x, carried),
            [leaf.of(params) for leaf in self.scanned],
            reverse=self.reverse,
            unroll=self.unroll,
        )
        return x


class Program(NamedTuple):
    """A loss of one or two scans, and of a parameter outside of them."""

    scans: tuple[Scan, ...]
    outside: Leaf | None

    def __call__(self, params: Any, batch: Any) -> Any:
        x = batch["x"].astype(params["a"].dtype)
        for scan in self.scans:
            x = scan(params, x)
        if self.outside is not None:
            x = x + jnp.sin(x @ self.outside.of(params))
        return jnp.sum(x**2 * batch["mask"][:, None]), jnp.sum(batch["mask"])


names, uses, flags = (
    st.sampled_from(NAMES),
    st.sampled_from(sorted(USES)),
    st.booleans(),
)
stacks = st.builds(Leaf, names, uses, st.none())
layers = st.builds(Leaf, names, uses, st.sampled_from(sorted(PARTS)))

programs = st.builds(
    Program,
    st.lists(
        st.builds(
            Scan,
            scanned=st.lists(stacks, min_size=1, max_size=3).map(tuple),
            constants=st.lists(layers, max_size=2).map(tuple),
            carried=st.none() | layers,
            reverse=flags,
            unroll=st.sampled_from([1, 2]),
            remat=flags,
            nested=flags,
        ),
        min_size=1,
        max_size=2,
    ).map(tuple),
    st.none() | layers,
)


def params_of(seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(SIZE,) * 3).astype(np.float32) for name in NAMES}


def batch_of(seed: int, tokens: int, rows: int = 8) -> Any:
    rng = np.random.default_rng(seed)
    mask = np.float32(np.arange(rows) < tokens)
    return {"x": rng.normal(size=(rows, SIZE)).astype(np.float32), "mask": mask}


def exact(program: Program, params: Any, batches: list[Any]) -> Any:
    """The gradient of the window's token mean, in float64."""
    with jax.enable_x64(True):
        wide = jax.tree.map(np.float64, params)
        whole = jax.tree.map(lambda *leaves: np.concatenate(leaves), *batches)
        gradient, tokens = jax.jit(jax.grad(program, has_aux=True))(wide, whole)
        return jax.tree.map(lambda g: np.asarray(g / tokens), gradient)
