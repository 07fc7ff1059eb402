"""The documentation: `sphinx-build -W --keep-going -c docs . site`.

The sources are the repository's own folders, so that a link works there and here.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import names

project = "optax_tokenaccum"
author = "The optax_tokenaccum authors"
copyright = "2026, " + author

extensions = [
    "myst_nb",
    "names",
    "search_words",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
include_patterns = [
    "docs/**",
    "notebooks/*",
    "benchmarks/results/**/*.md",
    "upstream/README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
]
root_doc = "docs/index"
# Pages that others link to: notebooks, results, patches. The sidebar has no room.
suppress_warnings = ["toc.not_included"]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_execution_timeout = 300

autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
maximum_signature_line_length = 88
intersphinx_mapping = names.intersphinx_mapping(Path(tempfile.mkdtemp()))
default_role = "code"
napoleon_use_rtype = False
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
html_math_renderer = "mathml"

html_theme = "furo"
html_title = "optax_tokenaccum"
html_additional_pages = {"index": "to_docs.html"}
templates_path = ["templates"]
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False


# Unions that Python spells out, and their names, from the longest to the shortest.
ARRAY_LIKE = (
    "~jax.Array | ~numpy.ndarray | ~numpy.bool | ~numpy.number | bool | int | float"
    " | complex"
)
TYPE_NAMES = {
    f"{ARRAY_LIKE} | ~typing.Iterable[ArrayTree]"
    " | ~typing.Mapping[~typing.Any, ArrayTree]": "ArrayTree",
    ARRAY_LIKE: "~jax.typing.ArrayLike",
    "str | type[~typing.Any] | ~numpy.dtype"
    " | ~jax._src.typing.SupportsDType": "~jax.typing.DTypeLike",
    "type | str | ~typing.Callable[[tuple[~flax.typing.Key, ...], ~typing.Any], bool]"
    " | bool | ~typing.Any | None | tuple[Filter, ...] | list[Filter]": "Filter",
}


def name_types(
    app: Any, what: str, name: str, obj: Any, options: Any, *texts: Any
) -> Any:
    """Shorten the signature and the type of the result."""
    for union, type_name in TYPE_NAMES.items():
        texts = tuple(text and text.replace(union, type_name) for text in texts)
    return texts


def setup(app: Any) -> None:
    """Formulas as MathML, which browsers draw themselves: no script, no network."""
    app.connect("autodoc-process-signature", name_types)
    from docutils.nodes import SkipNode
    from docutils.utils.math.latex2mathml import tex2mathml

    def draw(writer: Any, node: Any) -> None:
        is_block = node.tagname == "math_block"
        writer.body.append(tex2mathml(node.astext(), as_block=is_block))
        raise SkipNode

    app.add_html_math_renderer("mathml", (draw, None), (draw, None))
