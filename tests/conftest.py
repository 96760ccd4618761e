"""The test environment: eight CPU devices, x64 off, strict promotion, warnings are errors, seeds are printed.

Tests of the public API run on JAX's default backend: on a machine with a GPU the same tests
run on the GPU. Tests marked `gpu` need one and are skipped, with the reason, where there is none.
"""

import gc
import importlib.util
import itertools
import logging
import mmap
import os
import pathlib
import signal
import sys

import hypothesis
import jax
import jaxlib
import numpy as np
import pytest

# Several workers share a GPU, so none may reserve most of its memory at start. JAX reads this with its first array.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# A shell starts what runs in its background with SIGINT ignored; tests press Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The most devices that a test needs (law 2, meshes of 8). It must be set before the first array is made.
NUM_CPU_DEVICES = 8

jax.config.update("jax_num_cpu_devices", NUM_CPU_DEVICES)
jax.config.update("jax_enable_x64", False)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Most of the time goes into compiling small programs. Without LLVM's optimizations the suite takes a sixth less time.
# The code that runs for long is compiled in advance, in jaxsok's library.
jax.config.update("jax_disable_most_optimizations", os.environ.get("JAX_PLATFORMS") == "cpu")


def _compile_quickly():
    """Selects XLA's older code generator, which compiles in half the time, also for processes that tests start.

    The processes inherit XLA's flags through the environment; a flag that XLA does not know would end them.
    """
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    wanted = {"xla_cpu_use_fusion_emitters": "false", "xla_cpu_parallel_codegen_split_count": "1"}
    libraries = list(pathlib.Path(jaxlib.__file__).parent.glob("libjax_common.*"))
    if os.environ.get("JAX_PLATFORMS") != "cpu" or not libraries:
        return
    with libraries[0].open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
        # A flag that was removed is still among the fields of a message, where no zero ends its name.
        known = [f"--{name}={value}" for name, value in wanted.items() if library.find(name.encode() + b"\0") >= 0]
    flags = os.environ.get("XLA_FLAGS", "").split()
    os.environ["XLA_FLAGS"] = " ".join([*flags, *(flag for flag in known if flag not in flags)])


_compile_quickly()

# Shapes as types: JAXSOK_TYPECHECK=1 checks the annotations of the inner modules while the tests run. The public
# surface is left out: it has to refuse bad input with its own message, which a type checker would preempt.
_TYPECHECKED = ("kernels", "table", "lookup", "export", "grow")
if os.environ.get("JAXSOK_TYPECHECK") == "1" and importlib.util.find_spec("beartype") and "jaxsok" not in sys.modules:
    import jaxtyping

    jaxtyping.install_import_hook([f"jaxsok.{name}" for name in _TYPECHECKED], "beartype.beartype")

# Shapes are few and contents vary, so examples are cheap after the first: "ci" fits two cores and five minutes.
_SETTINGS = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.data_too_large,
        hypothesis.HealthCheck.large_base_example,
    ],
}
hypothesis.settings.register_profile("ci", max_examples=25, stateful_step_count=15, **_SETTINGS)
hypothesis.settings.register_profile("gpu", max_examples=100, stateful_step_count=30, **_SETTINGS)
hypothesis.settings.register_profile("long", max_examples=1000, stateful_step_count=50, **_SETTINGS)


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    """Loads a Hypothesis profile (JAXSOK_PROFILE: ci, gpu or long), and makes warnings errors.

    In pyproject.toml this would end the run as soon as any plugin that happens to be installed warns while it is
    configured, as pytest-benchmark does where there are several workers.
    """
    config.addinivalue_line("filterwarnings", "error")
    hypothesis.settings.load_profile(os.environ.get("JAXSOK_PROFILE", "ci"))


# Packages of the extras of pyproject.toml, as they are imported. The suite itself needs only pytest and Hypothesis.
_EXTRAS = frozenset(
    "beartype flatbuffers flax grain httpx matplotlib optax orbax polars prometheus_client pyarrow redis rocksdict "
    "sklearn starlette tqdm uvicorn".split()
)


def _missing_extra(error):
    """Returns the missing extra that made an import fail, or None if the import failed for another reason."""
    while error is not None:
        name = (getattr(error, "name", None) or "").split(".")[0] if isinstance(error, ImportError) else ""
        if name in _EXTRAS and importlib.util.find_spec(name) is None:
            return name
        error = error.__cause__ or error.__context__
    return None


def _skip_for_want_of_an_extra():
    """Runs a hook; an import of an extra that is not installed becomes a skip that names it."""
    try:
        return (yield)
    except ImportError as error:
        name = _missing_extra(error)
        if name is None:
            raise
        pytest.skip(f"needs {name}, which is not installed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup():
    """Skips a test whose fixtures import a missing extra."""
    return (yield from _skip_for_want_of_an_extra())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """Skips a test that imports a missing extra."""
    return (yield from _skip_for_want_of_an_extra())


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Skips a module that imports a missing extra."""
    report = yield
    call = report.__dict__.get("call")
    name = _missing_extra(call.excinfo.value) if report.failed and call is not None else None
    if name is not None:
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"Skipped: needs {name}, which is not installed")
        del report.call
    return report


# A compiled program takes some ten memory mappings, and Linux gives a process 65,530. Beyond them the compiler crashes.
# They also take memory (6 GB before the limit is reached), and files share few programs, so few are kept.
_MOST_MAPPINGS = 35_000
_MOST_MAPPINGS_OF_ANOTHER_FILE = 12_000
_MAPPINGS = pathlib.Path("/proc/self/maps")
_TESTS_BETWEEN_LOOKS = 25
_num_torn_down = itertools.count(1)
# Python's default, 700, fits small programs: tracing a step makes tens of thousands of objects.
_NEW_OBJECTS_BETWEEN_COLLECTIONS = 50_000


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Frees the programs that earlier tests compiled before one process has too many; ends what a file left on."""
    is_last_of_file = nextitem is None or nextitem.path != item.path
    if is_last_of_file:
        logging.getLogger("jaxsok").setLevel(logging.NOTSET)  # `jaxsok serve`, run in this process, shows more.
    is_time_to_look = next(_num_torn_down) % _TESTS_BETWEEN_LOOKS == 0
    if not (is_last_of_file or is_time_to_look) or not _MAPPINGS.exists():
        return
    most = _MOST_MAPPINGS_OF_ANOTHER_FILE if is_last_of_file else _MOST_MAPPINGS
    if _MAPPINGS.read_bytes().count(b"\n") > most:
        jax.clear_caches()
        gc.collect()


def pytest_collection_finish():
    """Exempts modules and tests from Python's collector, since they live as long as the process."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS_BETWEEN_COLLECTIONS, 20, 10)


def pytest_report_header():
    """Reports the platform of the run, so that logs of different platforms are not confused."""
    device = jax.devices()[0]
    return f"jax {jax.__version__} on {len(jax.devices())} x {device.platform} ({device.device_kind})"


def pytest_collection_modifyitems(items):
    """Skips tests that cannot run here, with the reason."""
    backend = jax.default_backend()
    num_gpus = len(jax.devices()) if backend == "gpu" else 0
    for item in items:
        if "gpu" in item.keywords and num_gpus < 1:
            item.add_marker(pytest.mark.skip(reason=f"needs a CUDA device; the default backend is {backend}"))
        if "multi_gpu" in item.keywords and num_gpus < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs two CUDA devices; there are {num_gpus}"))
        if "slow" in item.keywords and os.environ.get("JAXSOK_SLOW") != "1":
            item.add_marker(pytest.mark.skip(reason="slow; set JAXSOK_SLOW=1"))


@pytest.fixture
def one_salt(monkeypatch):
    """Gives all states of the test the same salts, so that their indexes can be compared to the bit."""
    from jaxsok import processes

    monkeypatch.setattr(processes, "draw_words", lambda op, *, is_shared, num_words=2: np.zeros(num_words, np.uint32))


@pytest.fixture
def looks_ahead(monkeypatch):
    """Lookups run ahead on one device with all tables in its memory, too, as if another table lay in host memory."""
    import jaxsok

    monkeypatch.setattr(jaxsok.Collection, "_can_hide_lookups", True)


@pytest.fixture
def by_doubling(monkeypatch):
    """Makes new tables start at their declared size and grow by doubling, so that a short test sees several growths."""
    monkeypatch.setattr("jaxsok.grow.FIRST_CALLS", 0)
    monkeypatch.setattr("jaxsok.grow.CALLS_AT_ONCE", 1)


@pytest.fixture(scope="module")
def quickly():
    """Turns off LLVM's optimizations, which take most of the time of some tests, also where the GPU is the default."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
