"""Builds the site of the documentation into build/site: `make docs`.

Pages are written for GitHub. Sphinx reads a copy of docs in build/site-source. In the copy the tables of index.md
become the navigation, names in api.md become docstrings, and files outside docs that pages link to have pages too.
"""

import argparse
import functools
import importlib
import inspect
import pathlib
import posixpath
import re
import shutil
import sys
import types
from collections.abc import Callable, Sequence

import jupytext
from sphinx.cmd import build

ROOT = pathlib.Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")
CODE = re.compile(r"(^(`{3,})[^`]*?\n.*?^\2$|`[^`\n]*`)", flags=re.DOTALL | re.MULTILINE)
LANGUAGES = {".py": "python", ".cc": "cpp", ".h": "cpp", ".cuh": "cpp"}


def stage(folder: pathlib.Path) -> None:
    """Writes the copy of docs that Sphinx reads, and pages for files outside docs."""
    extra = folder.parent / "site-extra/notebooks"  # docs/conf.py copies it unchanged
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder, ignore=shutil.ignore_patterns("__pycache__"))
    waiting = sorted(f"docs/{path.relative_to(folder)}" for path in folder.rglob("*") if path.suffix in (".md", ".py"))
    staged = set(waiting)
    while waiting:
        source = waiting.pop()
        page = folder / page_of(source)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(render(source))
        if source.startswith("docs/notebooks/"):
            extra.mkdir(parents=True, exist_ok=True)
            jupytext.write(jupytext.reads(text_of(source), "py:percent"), extra / f"{page.stem}.ipynb")
        for link in LINK.finditer(CODE.sub("", text_of(source))):
            target = target_of(source, link[2])
            if target not in staged and not target.startswith("docs"):
                staged.add(target)
                waiting.append(target)


def render(source: str) -> str:
    """Returns the page of the copy for a file of the project, with links between pages of the copy."""
    text = replace_outside_code(text_of(source), functools.partial(LINK.sub, functools.partial(lead, source)))
    if source.startswith("docs/notebooks/"):
        name = pathlib.Path(source).stem
        link = f'<a href="{name}.ipynb" download>Download this notebook</a>'
        return re.sub(r"^(# # .*\n#\n)", rf"\1# {link}\n#\n", text, count=1, flags=re.MULTILINE)
    if source == "docs/index.md":
        return text + navigation(text)
    if source == "docs/api.md":
        shown: dict[int, str] = {}
        return re.sub(r"^- `(jaxsok\.[\w.]+)`$", lambda name: directive_of(name[1], shown), text, flags=re.MULTILINE)
    return text


def text_of(source: str) -> str:
    """Renders a file or a folder of the project as Markdown; notebooks and pages are unchanged."""
    path = ROOT / source
    if path.is_dir():
        names = sorted(child.name for child in path.iterdir() if not child.name.startswith(("_", ".")))
        head = (path / "README.md").read_text() if "README.md" in names else f"# {source}\n"
        line = "- [{0}]({0})\n" if source.startswith("examples") else "- `{0}`\n"  # for other folders, names suffice
        return head + "\n## Files\n\n" + "".join(line.format(name) for name in names)
    if path.suffix == ".md" or source.startswith("docs/"):
        return path.read_text()
    return f"# {source}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}\n````\n"


def target_of(source: str, link: str) -> str:
    """Returns the file of the project that a link leads to."""
    folder = source if (ROOT / source).is_dir() else posixpath.dirname(source)
    return posixpath.normpath(posixpath.join(folder, link))


def page_of(source: str) -> str:
    """Returns the page of the copy for a file of the project."""
    if source.startswith("docs"):
        return "index.md" if (ROOT / source).is_dir() else source.removeprefix("docs/")
    return f"project/{source}" if source.endswith(".md") else f"project/{source}.md"


def lead(source: str, link: re.Match) -> str:
    """Rewrites a link between files of the project as one between pages of the copy."""
    target = posixpath.relpath(page_of(target_of(source, link[2])), posixpath.dirname(page_of(source)) or ".")
    return f"{link[1]}{target}{link[3] or ''}{link[4]}"


def replace_outside_code(text: str, replace: Callable[[str], str]) -> str:
    """Applies a function to the text between pieces of code."""
    pieces, end = [], 0
    for code in CODE.finditer(text):
        pieces += [replace(text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*pieces, replace(text[end:])])


def navigation(index: str) -> str:
    """Makes the navigation from the tables of the index: the links in the first cells of their rows."""
    parts = re.split(r"^## (.*)$", index, flags=re.MULTILINE)
    toctrees = []
    for title, text in zip(parts[1::2], parts[2::2], strict=True):
        rows = re.findall(r"^\| \[(.*?)\]\((.*?)\) \| (.*) \|$", text, flags=re.MULTILINE)
        pages = [f"{f'{name} {about}' if name.isdigit() else name} <{page}>" for name, page, about in rows]
        toctrees.append((title, [page.replace("`", "") for page in pages]))
    toctrees.append(("Results", sorted(f"results/{path.name}" for path in (ROOT / "docs/results").glob("*.md"))))
    blocks = [
        f"```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(pages) + "\n```\n"
        for title, pages in toctrees
        if pages
    ]
    return "\n" + "\n".join(blocks)


def directive_of(name: str, shown: dict[int, str]) -> str:
    """Returns the directive that shows the docstring of a public name, or a reference if it was shown before."""
    module, _, attribute = name.rpartition(".")
    value = getattr(importlib.import_module(module.replace("jaxsok.optim", "jaxsok.optimizers")), attribute)
    first = name if isinstance(value, int) else shown.setdefault(id(value), name)
    if isinstance(value, types.ModuleType) or first != name:
        return f"- `{name}`: " + ("its names follow below\n" if first == name else f"the same as `{first}`\n")
    foreign = [base.__name__ for base in getattr(value, "__mro__", ()) if not base.__module__.startswith("jaxsok")]
    inherited = f"   :inherited-members: {', '.join(foreign)}\n" if foreign else ""  # of jaxsok's own bases
    kind = "exception" if inspect.isclass(value) and issubclass(value, BaseException) else "class"
    kind = kind if inspect.isclass(value) else "function" if callable(value) else "data"
    return f"```{{eval-rst}}\n.. auto{kind}:: {name}\n{inherited}```\n"


def main(arguments: Sequence[str]) -> int:
    """Stages the pages and builds the site; warnings are errors. Unknown arguments go to Sphinx."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build", help="default: build")
    options, others = parser.parse_known_args(arguments)
    source, cache, site = (str(options.build / name) for name in ("site-source", "site-cache", "site"))
    stage(pathlib.Path(source))
    return build.main(["--fail-on-warning", "--keep-going", "--quiet", "-d", cache, *others, source, site])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
