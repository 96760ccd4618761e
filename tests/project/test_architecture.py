"""The structure of the project: the direction of imports, one noun in all its files, the contents of ffi/.

Reads sources only: no module of jaxsok is imported here, except by the test of what an import loads.
"""

import ast
import os
import pathlib
import re
import subprocess
import sys
import tomllib
import warnings

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# Ops that have kernels. An exchange is XLA's collective, or goes through windows, which have kernels and no op. Packing
# is a function of the CPU library, called outside of programs.
NOUNS = ("table", "plan", "combine", "update", "lookup", "evict", "tickets")
FILES_OF_A_NOUN = (
    "ffi/kernels/{}.h",
    "ffi/kernels/{}_cpu.cc",
    "ffi/kernels/{}_cuda.cu",
    "ffi/handlers/{}.cc",
    "jaxsok/kernels/{}.py",
    "jaxsok/{}.py",
    "tests/core/test_{}.py",
    "benchmarks/bench_{}.py",
)


def sources(*patterns):
    """Returns the files of the patterns by path from the root; no match is an error, so no test passes vacuously."""
    found = sorted(path for pattern in patterns for path in ROOT.glob(pattern))
    assert found, f"no file matches {patterns}"
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in found}


def code(text):
    """Returns C++ without its comments and string literals."""
    pattern = r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\""
    return re.sub(pattern, lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL)


def occurrences(files, pattern):
    """Returns each "file:line: text" whose code matches the pattern."""
    return [
        f"{name}:{number}: {line.strip()}"
        for name, text in files.items()
        for number, line in enumerate(code(text).splitlines(), 1)
        if re.search(pattern, line)
    ]


def includes(files):
    """Returns each (file, included file)."""
    pattern = r"^\s*#\s*include\s*[<\"]([^>\"]+)[>\"]"
    return [(name, found) for name, text in files.items() for found in re.findall(pattern, text, flags=re.MULTILINE)]


# Imports ---------------------------------------------------------------------------------------------------------


def layers():
    """Returns the layer of each module by its place in the import contract, 0 at the bottom."""
    contract = PYPROJECT["tool"]["importlinter"]["contracts"][0]
    assert contract["type"] == "layers" and contract["exhaustive"]
    levels = [level.replace("|", " ").split() for level in reversed(contract["layers"])]
    return {module: number for number, modules in enumerate(levels) for module in modules}


def imported_modules(name, text):
    """Returns the modules of jaxsok, each without its parents, that a source file imports, also inside functions."""
    package = name.removesuffix(".py").split("/")[:-1]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            full = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base += node.module.split(".") if node.module else []
            full = [".".join([*base, alias.name]) for alias in node.names]
        else:
            continue
        yield from (path.split(".")[1] for path in full if path.startswith("jaxsok."))


def test_every_module_has_a_layer():
    """A new module needs an entry in the import contract."""
    modules = {path.stem for path in ROOT.glob("jaxsok/*.py")} | {
        path.parent.name for path in ROOT.glob("jaxsok/*/__init__.py")
    }
    assert modules - {"__init__"} == set(layers())


def test_imports_run_downwards():
    """A module imports only from layers below its own (import-linter checks the same in `make lint`)."""
    layer = layers()
    wrong = []
    for name, text in sources("jaxsok/**/*.py").items():
        module = name.removesuffix(".py").split("/")[1]
        if module == "__init__":
            continue
        for imported in imported_modules(name, text):
            if imported in layer and imported != module and layer[imported] >= layer[module]:
                wrong.append(f"{name}: {module} (layer {layer[module]}) imports {imported} (layer {layer[imported]})")
    assert not wrong


def test_import_brings_only_jax_numpy_and_jaxtyping(tmp_path):
    """Optional parts are imported on first use, and the first call loads the library."""
    script = (
        "import sys, jax, numpy, jaxtyping; before = set(sys.modules); import jaxsok; "
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    brought = {name for name in result.stdout.split() if name not in sys.stdlib_module_names}
    assert brought - {"jax", "jaxlib", "numpy", "jaxtyping", "ml_dtypes"} == {"jaxsok"}


# One noun, everywhere ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noun", NOUNS)
def test_every_noun_has_all_its_files(noun):
    """Every file of an op carries its noun, so a single grep follows it."""
    missing = [name for name in (form.format(noun) for form in FILES_OF_A_NOUN) if not (ROOT / name).exists()]
    assert not missing


def test_no_kernel_or_handler_without_a_noun():
    """Second names for an op and files without a noun are refused; long files split by verb: table_grow_cuda.cu."""
    names = [
        pathlib.Path(name) for name in sources("ffi/kernels/*_cpu.cc", "ffi/kernels/*_cuda.cu", "ffi/handlers/*.cc")
    ]
    owners = (*NOUNS, "tier", "window", "pack", "host_memory", "sort")
    assert not [name.as_posix() for name in names if not name.stem.startswith(owners)]


def test_cmake_lists_the_sources():
    """Sources are listed, never globbed, and the list is complete."""
    cmake = (ROOT / "ffi/CMakeLists.txt").read_text()
    assert "GLOB" not in re.sub(r"#.*", "", cmake)
    listed = set(re.findall(r"^\s+((?:kernels|handlers|c_interface|tests)/\S+)$", cmake, flags=re.MULTILINE))
    assert listed == {name.removeprefix("ffi/") for name in sources("ffi/*/*.c[cu]")}


def test_targets_in_cpp_are_targets_in_python():
    """Each handler is registered, each registered target has a handler, and target and symbol have the same name."""
    handlers = re.findall(
        r"\b(?:JAXSOK_DEFINE(?:_EAGER|_WINDOW)?_HANDLER|XLA_FFI_DEFINE_HANDLER_SYMBOL)\(\s*(\w+)",
        code("".join(sources("ffi/handlers/*.cc").values())),
    )
    assert len(set(handlers)) == len(handlers)
    library = ast.parse((ROOT / "jaxsok/kernels/library.py").read_text())
    (call,) = [
        node.value
        for node in library.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HANDLERS"
    ]
    names = ast.literal_eval(call.func.value).split()
    symbols = ["Jaxsok" + "".join(word.capitalize() for word in name.split("_")) for name in names]
    assert sorted(symbols) == sorted(handlers)


# The contents of ffi/ ----------------------------------------------------------------------------------------------


def test_core_knows_neither_xla_nor_the_cuda_runtime():
    """core/ holds facts that both back ends share: headers of its own and of the C++ standard library."""
    wrong = [
        pair
        for pair in includes(sources("ffi/core/*.h"))
        if re.search(r"xla|cuda|cub|thrust|kernels/|handlers/", pair[1])
    ]
    assert not wrong
    assert not occurrences(sources("ffi/core/*.h"), r"\bxla\b|\bffi::|\bcuda[A-Z]\w*|\bcub::")


def test_kernels_know_no_xla_type():
    """kernels/ take raw pointers and sizes, so that the C interface over them works without XLA."""
    files = sources("ffi/kernels/*", "ffi/c_interface/*", "jaxsok/include/*.h")
    assert not [pair for pair in includes(files) if re.search(r"xla/|handlers/", pair[1])]
    assert not occurrences(files, r"\bxla::|\bffi::|\bXLA_FFI\w*")


def test_handlers_see_xla_and_launchers_only():
    """handlers/ are glue: they include no CUDA header, and facts of core/ only through the contracts in kernels/*.h."""
    allowed = r"xla/ffi/api/\w+\.h|(\.\./)?kernels/[a-z]+\.h|(handlers/)?(bind|buffers|call)\.h|[a-z_]+"
    wrong = [pair for pair in includes(sources("ffi/handlers/*")) if not re.fullmatch(allowed, pair[1])]
    assert not wrong


def test_handlers_neither_allocate_device_memory_nor_wait_for_the_device():
    """A handler's launches can be captured in a CUDA graph, and cannot stop NCCL."""
    files = sources("ffi/handlers/*")
    allocates = r"cuda(Malloc|Free|HostAlloc|HostRegister)|cu(Mem|da)\w*Alloc|ScratchAllocator|\bnew\b|\bmalloc\b"
    waits = r"Synchronize|StreamQuery|EventQuery"
    assert not occurrences(files, f"{allocates}|{waits}")


def test_launches_neither_allocate_device_memory_nor_wait():
    """Functions that a handler calls neither allocate nor wait; workspaces are results of a known size.

    Windows are opened and grow while a program is traced, in functions that no handler calls; host slabs are made
    between programs, with their areas. Room for rows that are moved ahead is made by the first call that needs it
    (decision 0024).
    """
    files = sources("ffi/kernels/*.cu*", "ffi/kernels/*.h")
    while_traced = re.compile(r"^\S[^\n]* \*?(TakeWindow|ReturnWindow|TakeFailure)\(.*?^}", re.M | re.S)
    files["ffi/kernels/window_cuda.cu"], count = while_traced.subn("", files["ffi/kernels/window_cuda.cu"])
    assert count == 3
    between = re.compile(r"^\S[^\n]* (Unpin|Pin)HostMemory\(.*?^}", re.M | re.S)
    name = "ffi/kernels/host_memory_cuda.cu"
    files[name], count = between.subn("", files[name])
    assert count == 2
    of_areas = re.compile(r"^\S[^\n]* (OpenLane|Reserve|OpenArea|CloseArea)\(.*?^}", re.M | re.S)
    name = "ffi/kernels/tier_move_cuda.cu"
    files[name], count = of_areas.subn("", files[name])
    assert count == 4
    assert not occurrences(
        files, r"cuda(Malloc|Free|HostAlloc|HostRegister)|Synchronize|StreamQuery|EventQuery|thrust::"
    )


def test_nothing_waits_for_a_device_as_a_whole():
    """CUDA would end the graphs that other threads are recording on it."""
    assert not occurrences(
        sources("ffi/kernels/*", "ffi/c_interface/*", "ffi/handlers/*"), "DeviceSynchronize|CtxSynchronize"
    )


def test_no_float_atomics_in_kernels():
    """Floats are added in a fixed order, so that two runs give the same bits."""
    assert not occurrences(sources("ffi/kernels/*.cu*"), r"atomicAdd\(\s*\(?\s*(reinterpret_cast<)?float")


# The project -------------------------------------------------------------------------------------------------------


def test_oracle_imports_nothing_of_jaxsok():
    """The oracle shares no code with the library that it checks."""
    tree = ast.parse((ROOT / "tests/oracle.py").read_text())
    modules = {
        alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    modules |= {(node.module or "").split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert modules - set(sys.stdlib_module_names) == {"numpy"}


def test_the_oldest_jaxlib_is_one_number():
    """The build uses the headers of the oldest supported JAX."""
    (jax,) = [text for text in PYPROJECT["project"]["dependencies"] if re.match(r"jax\b", text)]
    oldest = re.search(r">=([0-9.]+)", jax)[1]
    assert f"jaxlib=={oldest}" in PYPROJECT["build-system"]["requires"]
    assert f'"jax=={oldest}" "jaxlib=={oldest}"' in (ROOT / "scripts/test_wheel.sh").read_text()
    assert all(oldest in requirement for requirement in PYPROJECT["project"]["optional-dependencies"]["cuda13"])


def test_warnings_are_errors():
    """Tests set this in conftest.py, not in pyproject.toml, where a plugin's warning would end the run."""
    with pytest.raises(UserWarning, match="as a test"):
        warnings.warn("as a test", stacklevel=1)


def test_a_plugin_that_warns_does_not_end_the_run(tmp_path):
    """A plugin may warn while it is configured, as pytest-benchmark does with several workers."""
    (tmp_path / "warning_plugin.py").write_text(
        "import warnings\ndef pytest_configure(config):\n    warnings.warn('benchmarks are disabled')\n"
    )
    collects = ["pytest", "-p", "warning_plugin", "--collect-only", "-q", "tests/project/test_architecture.py"]
    found = subprocess.run(
        [sys.executable, "-m", *collects],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "test_a_plugin_that_warns" in found.stdout
