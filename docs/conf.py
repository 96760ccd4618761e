"""Sphinx's configuration of the site (`make docs`); decisions/0028-documentation-site.md has the reasons."""

import re

import jax
import sphinx.application

import jaxsok

project = "jaxsok"
version = release = jaxsok.__version__
copyright = "the authors of jaxsok"
html_title = f"jaxsok {version}"
html_theme = "furo"
html_show_sphinx = False
html_last_updated_fmt = f"%Y-%m-%d, run with jaxsok {version} and JAX {jax.__version__}"  # the footer of every page
exclude_patterns = ["conf.py"]
html_extra_path = ["../site-extra"]

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline"]
nb_custom_formats = {".py": ["jupytext.reads", {"fmt": "py:percent"}]}
nb_execution_mode = "cache"
nb_execution_cache_path = "../site-cache/notebooks"
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_merge_streams = True

autodoc_default_options = {"members": True, "undoc-members": True, "member-order": "bysource"}
autodoc_typehints = "none"
autodoc_preserve_defaults = True
autoclass_content = "both"
default_role = "code"
napoleon_custom_sections = ["Cost"]
suppress_warnings = ["misc.highlighting_failure", "toc.not_included"]  # blocks of text; pages that only others link to

_CODE = re.compile(r"(`+)(.*?)\1", flags=re.DOTALL)
_PROGRAM = re.compile(r"^ *>>> .*(?:\n *\S.*)*$|(?<=::\n\n)(?: {4}.*\n?|\n)+", flags=re.MULTILINE)
_BEFORE_LIST = re.compile(r"^( *)((?!- |\s).*)\n(?=\1- )", flags=re.MULTILINE)
_BEFORE_BLOCK = re.compile(r"^( *)(.*):\n\n(?=\1 {4}\S)", flags=re.MULTILINE)


def convert_docstring(app, what, name, obj, options, lines: list[str]) -> None:
    """Makes reStructuredText of a docstring, whose text is Markdown: code, lists and indented programs."""
    text = _BEFORE_BLOCK.sub(r"\1\2::\n\n", _BEFORE_LIST.sub(r"\1\2\n\n", "\n".join(lines)))
    pieces, end = [], 0
    for program in _PROGRAM.finditer(text):
        pieces += [_escape(text[end : program.start()]), program[0]]
        end = program.end()
    lines[:] = "".join([*pieces, _escape(text[end:])]).split("\n")


def _escape(text: str) -> str:
    """Escapes what only reStructuredText would take for markup, and marks code as it does."""
    pieces = _CODE.split(text)
    plain = [re.sub(r"[*|\\]|(?<=\w)_(?!\w)", lambda found: f"\\{found[0]}", piece) for piece in pieces[::3]]
    return plain[0] + "".join(f"\\ ``{code}``\\ {text}" for code, text in zip(pieces[2::3], plain[1:], strict=True))


def setup(app: sphinx.application.Sphinx) -> None:
    """Registers the conversion before Napoleon, which reads the sections of docstrings and leaves those of fields."""
    kept: list[str] = []  # of fields: Napoleon would take words before a colon for a type

    def keep(app, what, name, obj, options, lines: list[str]) -> None:
        kept[:] = lines

    def restore(app, what, name, obj, options, lines: list[str]) -> None:
        lines[:] = kept if what in ("attribute", "property", "data") else lines

    for priority, function in ((300, convert_docstring), (400, keep), (600, restore)):
        app.connect("autodoc-process-docstring", function, priority=priority)
