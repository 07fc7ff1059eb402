"""Imports between the package's folders only go down, through at most nine levels."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "optax_tokenaccum"
# The folders that each folder may import from. Files at the root may import from all.
BELOW = {
    "_core": set(),
    "_devices": {"_core"},
    "_audit": {"_core"},
    "_steps": {"_core", "_devices"},
    "ragged": {"_core", "_steps"},
    "_nnx": {"_core", "_devices", "_steps"},
}
# What needs an extra, and the public modules that may import it.
EXTRAS = {"nnx": "flax", "_nnx": "flax", "linen": "flax"}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


FILES = {name_of(path): path for path in (ROOT / PACKAGE).rglob("*.py")}


def imports_in(text: str) -> set[str]:
    """Return the modules that a file imports, at its top or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                found.add(module if module in FILES else str(node.module))
    return found


IMPORTS = {name: imports_in(path.read_text()) for name, path in FILES.items()}


def part_of(name: str) -> str:
    """Return the folder of a module, or the name of a file at the root."""
    return (name.split(".") + [""])[1]


@functools.cache
def floor_of(name: str) -> int:
    """The longest chain of imports from a module; a circle of imports never ends."""
    below = IMPORTS[name] & FILES.keys() - {name}
    return 1 + max(map(floor_of, below), default=0)


def test_imports_go_down():
    folders = {path.parent.name for path in FILES.values()}
    assert folders == {PACKAGE, *BELOW}
    for name, modules in IMPORTS.items():
        ours = {x for x in modules if x.split(".")[0] == PACKAGE} - {name}
        assert ours <= FILES.keys(), name
        part = part_of(name)
        if part in BELOW:
            assert {part_of(x) for x in ours} <= {part, *BELOW[part]}, name
        assert floor_of(name) <= 9, name


def test_what_needs_an_extra_is_imported_by_nothing_else():
    for name, modules in IMPORTS.items():
        part = part_of(name)
        extras = {part_of(x) for x in modules if x.startswith(PACKAGE)} & EXTRAS.keys()
        assert {x.lstrip("_") for x in extras} <= {part.lstrip("_")}, name
        packages = {x.split(".")[0] for x in modules} & {*EXTRAS.values()}
        assert packages <= {EXTRAS.get(part)}, name


def test_the_core_knows_no_devices_and_compiles_nothing():
    for name, path in FILES.items():
        if part_of(name) == "_core":
            text = path.read_text()
            assert "jax.jit(" not in text and "shard_map(" not in text, name
            assert "Mesh" not in text, name
