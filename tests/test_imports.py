"""What the files of the package may know: imports go down, and extras stay apart."""

import ast
import functools
import re
from pathlib import Path

from jax.extend.core import Primitive, primitives

from optax_tokenaccum import _jaxprs

ROOT = Path(__file__).parents[1]
PACKAGE = "optax_tokenaccum"
# What needs an extra, by the names of files that may import it.
FLAX = {"nnx", "_nnx_model", "_nnx_steps", "linen"}
# The core: a scalar loss of a tree, and nothing of devices, models or losses.
CORE = "_accumulation", "_backward", "_jaxprs", "_perturbations"
BELOW_CORE = {"_trees", "_checks", "_schedule", "_state", *CORE}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts[1:] if part != "__init__")


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
                is_file = module.removeprefix(f"{PACKAGE}.") in FILES
                found.add(module if is_file else str(node.module))
    return {module.removeprefix(f"{PACKAGE}.") for module in found}


IMPORTS = {name: imports_in(path.read_text()) for name, path in FILES.items()}


@functools.cache
def floor_of(name: str) -> int:
    """The longest chain of imports from a file; a circle of imports never ends."""
    below = IMPORTS[name] & FILES.keys() - {name}
    return 1 + max(map(floor_of, below), default=0)


def test_imports_go_down():
    assert max(map(floor_of, FILES.keys() - {""})) <= 9


def test_imports_are_in_the_order_of_the_map():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`\w+\.py`.*?) \|", page, re.MULTILINE)
    order = [name for row in rows for name in re.findall(r"`(\w+)\.py`", row)]
    for i, name in enumerate(order):
        above = {*order[: i + 1]}
        assert IMPORTS[name] & FILES.keys() - {""} <= above, name


def test_what_needs_an_extra_is_imported_by_nothing_else():
    for name, modules in IMPORTS.items():
        if name not in FLAX:
            assert not FLAX & modules, name
            assert not any(module.split(".")[0] == "flax" for module in modules), name


def test_the_core_knows_no_devices_and_compiles_nothing():
    for name in CORE:
        text = FILES[name].read_text()
        assert IMPORTS[name] & FILES.keys() <= BELOW_CORE, name
        assert "jax.jit(" not in text and "shard_map(" not in text, name
        assert "Mesh" not in text, name


def test_no_platform_is_named_and_nothing_private_is_used():
    platforms = "lowering_platforms", "platform_dependent", "default_backend"
    for name, path in FILES.items():
        text = path.read_text()
        assert "jax._src" not in text, name
        assert not any(word in text for word in platforms), name


def test_one_file_names_operations_of_jaxprs_and_their_parameters():
    listed = {x.name for x in vars(primitives).values() if isinstance(x, Primitive)}
    names = {*_jaxprs._CLASSES, *_jaxprs._UNLISTED, *_jaxprs._CALLS, *listed}
    names -= {"name", "pcast", "pvary"}  # also a keyword, and functions of jax.lax
    for file in FILES.keys() - {"_jaxprs"}:
        for node in ast.walk(ast.parse(FILES[file].read_text())):
            match node:
                case ast.Attribute(attr="primitive"):
                    raise AssertionError((file, node.lineno))
                case ast.Attribute(ast.Name("eqn"), "params"):
                    raise AssertionError((file, node.lineno))
                case ast.Attribute(attr="eqns"):  # it evaluates them, in order
                    assert file == "_perturbations", (file, node.lineno)
                case ast.Constant(str(text)):
                    assert text not in names, (file, text)
