"""Names in the text are links: ours to the reference, others to their projects.

The addresses of other projects are in `inventories/`: a base address, then a name and a
path in each line, `$` for the name itself. Nothing is fetched when the site is built.
"""

import zlib
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

INVENTORIES = Path(__file__).parent / "inventories"
SHORT = {"jnp.": "jax.numpy.", "nnx.": "flax.nnx."}
OURS = "optax_tokenaccum."


def intersphinx_mapping(build: Path) -> dict[str, Any]:
    """Writes each list as an inventory of Sphinx into `build`."""
    mapping = {}
    for path in sorted(INVENTORIES.glob("*.txt")):
        url, *lines = path.read_text(encoding="utf-8").splitlines()
        head = f"# Sphinx inventory version 2\n# Project: {path.stem}\n# Version: \n"
        head += "# The remainder of this file is compressed using zlib.\n"
        body = "\n".join(map(_entry, lines)) + "\n"
        inventory = build / f"{path.stem}.inv"
        inventory.write_bytes(head.encode() + zlib.compress(body.encode()))
        mapping[path.stem] = (url, str(inventory))
    return mapping


def _entry(line: str) -> str:
    name, uri = line.split()
    kind = "class" if name.rpartition(".")[2][0].isupper() else "function"
    return f"{name} py:{kind} 1 {uri} -"


class LinkNames(SphinxTransform):
    """Makes inline code that is a known name a reference to it."""

    default_priority = 5  # before references are resolved

    def apply(self, **_: Any) -> None:
        for literal in list(self.document.findall(nodes.literal)):
            parent = literal.parent
            if isinstance(parent, nodes.title | nodes.reference | pending_xref):
                continue
            target = _target(literal.astext())
            if not target:
                continue
            link = pending_xref(
                "",
                literal.deepcopy(),
                refdomain="py",
                reftype="obj",
                reftarget=target,
                refexplicit=False,
                refwarn=False,
                refdoc=self.env.docname,
            )
            parent.replace(literal, link)


def _target(text: str) -> str | None:
    """The full name that a piece of inline code means, with or without arguments."""
    import optax_tokenaccum

    name = text.partition("(")[0]
    if not all(part.isidentifier() for part in name.split(".")):
        return None
    if name.split(".")[0] in optax_tokenaccum.__all__:
        return OURS + name
    for short, full in SHORT.items():
        if name.startswith(short):
            if name.removeprefix(short) in ("make_train_step", "make_window_step"):
                return OURS + name
            return full + name.removeprefix(short)
    return name if name.startswith(("jax.", "optax.", "flax.", OURS)) else None


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_transform(LinkNames)
    return {"parallel_read_safe": True}
