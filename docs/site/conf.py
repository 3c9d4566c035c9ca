"""The documentation as a site, from the pages where the repository keeps them."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

sys.path.insert(0, str(Path(__file__).parents[2]))

project = "edgegossip"
root_doc = "README"
include_patterns = [
    "*.md",
    "docs/*.md",
    "docs/api/*.rst",
    "lab/*.md",
    "benchmarks/results/*.md",
]
exclude_patterns = [".venv", "build", "runs", "data"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
highlight_language = "text"  # commands and formulas; Python is marked as such
myst_heading_anchors = 4  # as forges make them, so that one link works in both places

default_role = "py:obj"  # `Gossip` in a docstring leads to its place in the reference
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Fields", "params_style")]

html_theme = "furo"
html_title = "edgegossip"
html_static_path = ["static"]
templates_path = ["templates"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_math_renderer = "mathml"

CONTENTS = """
```{toctree}
:hidden:
:caption: Use it

All pages <docs/index>
docs/install
docs/algorithms
docs/compression
EdgeSqueeze <docs/edge-squeeze>
Sparse-Push <docs/sparse-push>
docs/edgegossip
Claimed work <docs/claimed-work>
docs/parameter-servers
docs/stages
docs/tasks
docs/tools
docs/recipes
Simulator <docs/simulator>
Three machines at home <docs/home>
Real machines <docs/network>
Existing scripts <docs/scripts>
Local data <docs/local-data>
docs/deployment
docs/security
docs/robust
docs/watch
docs/monitor
Run folder <docs/run-folder>
```

```{toctree}
:hidden:
:caption: Reference
:maxdepth: 1

docs/api/index
docs/names
```

```{toctree}
:hidden:
:caption: Measured

docs/results
docs/papers
docs/performance
docs/comparison
```

```{toctree}
:hidden:
:caption: Notebooks

Gossip <benchmarks/results/gossip>
EdgeGossip <benchmarks/results/edgegossip>
EdgeGossip's figures <benchmarks/results/edgegossip-figures>
EdgeGossip's parts <benchmarks/results/edgegossip-parts>
Sparse-Push <benchmarks/results/sparse-push>
Parameter servers <benchmarks/results/adsp>
All systems <benchmarks/results/systems>
Environments <benchmarks/results/environments>
Stages <benchmarks/results/stages>
Language models <benchmarks/results/language>
Plans <benchmarks/results/plans>
Compression <benchmarks/results/compression>
Simulator <benchmarks/results/simulator>
Real machines <benchmarks/results/real-machines>
Historical <benchmarks/results/historical>
```

```{toctree}
:hidden:
:caption: Change it

docs/architecture
Contract <docs/contract>
Design notes <docs/contract-design>
Dependencies <docs/dependencies>
CONTRIBUTING
Lab <lab/README>
CHANGELOG
SECURITY
```
"""


def add_contents(app: Sphinx, docname: str, source: list[str]) -> None:
    """The front page is the README, which a forge shows without a table of contents."""
    if docname == root_doc:
        source[0] += CONTENTS


def add_index(app: Sphinx, error: Exception | None) -> None:
    """A server asks for index.html."""
    if error is None:
        shutil.copyfile(Path(app.outdir, f"{root_doc}.html"), Path(app.outdir, "index.html"))


def formula(translator: HTML5Translator, node: nodes.math) -> None:
    """MathML, which browsers draw without a script."""
    translator.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def formula_block(translator: HTML5Translator, node: nodes.math_block) -> None:
    """The same on lines of its own."""
    text = node.astext()
    aligned = rf"\begin{{aligned}}{text}\end{{aligned}}" if "&" in text else text
    translator.body.append(tex2mathml(aligned, as_block=True))
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_contents)
    app.connect("build-finished", add_index)
    app.add_html_math_renderer("mathml", (formula, None), (formula_block, None))
