"""Loads the built libraries and registers their FFI targets, once, when the first call needs them.

The libraries are plain shared objects with no Python or framework ABI (decision D11). They are built against the
FFI headers of one jaxlib and serve that version and later ones.
"""

import ctypes
import functools
import pathlib

import jax

import jaxsok

_HANDLERS = (
    "table_find table_find_or_insert table_gather table_scatter table_touch table_rebuild table_forget table_wait "
    "evict_select evict_release plan_requests plan_uses combine_transpose lookup lookup_find "
    "lookup_planned lookup_frozen tickets_digest tickets_issue tickets_redeem update tier_bring tier_write tier_read "
    "tier_bring_ahead tier_write_ahead tier_read_ahead tier_wait tier_peek window_exchange window_lines window_meet "
    "window_sum lookup_window update_window lookup_bags_window update_bags_window"
).split()
TARGETS: tuple[tuple[str, str], ...] = tuple(
    (f"jaxsok_{name}", f"Jaxsok{''.join(map(str.capitalize, name.split('_')))}") for name in _HANDLERS
)
"""FFI target and C symbol of every handler, in both back ends."""

_REMEDY = {
    "cpu": "Build it: `pip install .` in the source tree (needs a C++17 compiler), or install a jaxsok wheel.",
    "cuda": (
        "Build it: `pip install .` in the source tree with nvcc on PATH (CMake prints whether it found it; "
        "`-C cmake.define.JAXSOK_CUDA=ON` insists), or run on the CPU with JAX_PLATFORMS=cpu."
    ),
}


def library_path(back_end: str) -> pathlib.Path:
    """Returns the path of a back end's library, also if it is not built."""
    name = f"libjaxsok_{back_end}.so"
    places = [pathlib.Path(place) / "_lib" / name for place in jaxsok.__path__]
    return next((place for place in places if place.exists()), places[0])


def require(back_end: str) -> pathlib.Path:
    """Returns the path of a back end's library; ImportError, with the remedy: it is not built."""
    path = library_path(back_end)
    if not path.exists():
        raise ImportError(f"jaxsok: the {back_end} library is missing: {path} does not exist. {_REMEDY[back_end]}")
    return path


def _load(back_end: str) -> ctypes.CDLL:
    path = require(back_end)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(
            f"jaxsok: the {back_end} library {path} does not load: {error}. {_REMEDY[back_end]}"
        ) from error
    pointer = ctypes.POINTER(ctypes.c_int32)
    for name, result, *arguments in (
        ("JaxsokWindowOpen", ctypes.c_char_p, *[ctypes.c_int32] * 3, pointer, ctypes.c_int64),
        ("JaxsokWindowReserve", ctypes.c_char_p, ctypes.c_int32, ctypes.c_int64),
        ("JaxsokWindowBytes", ctypes.c_int64, ctypes.c_int32),
        ("JaxsokWindowRoom", ctypes.c_int64, ctypes.c_int32),
        ("JaxsokWindowTake", ctypes.c_char_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_char_p),
        ("JaxsokWindowMap", ctypes.c_char_p, ctypes.c_int32, ctypes.c_char_p),
        ("JaxsokWindowSettle", None, ctypes.c_int32, ctypes.c_int32),
        ("JaxsokHostMemoryNew", ctypes.c_char_p, ctypes.c_int32, *[ctypes.c_int64] * 2, ctypes.c_void_p),
        ("JaxsokHostMemoryDelete", None, ctypes.c_void_p),
        ("JaxsokReaderOpen", ctypes.c_char_p, ctypes.c_int32, ctypes.c_void_p),
        ("JaxsokReaderClose", None, ctypes.c_void_p),
        (
            "JaxsokReaderLookup",
            ctypes.c_char_p,
            *(ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p),
        ),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@functools.cache
def load_cpu() -> ctypes.CDLL:
    """Loads the CPU library, which has the sizes of workspaces for both back ends and packs batches on the host."""
    library = _load("cpu")
    for name, argument_types in {
        "JaxsokInsertWorkspaceBytes": (ctypes.c_int64,),
        "JaxsokSelectWorkspaceBytes": (),
        "JaxsokReleaseWorkspaceBytes": (ctypes.c_int64,),
        "JaxsokPlanRequestsWorkspaceBytes": (ctypes.c_int64,),
        "JaxsokPlanUsesWorkspaceBytes": (ctypes.c_int64,),
        "JaxsokUpdateWorkspaceBytes": (ctypes.c_int64, ctypes.c_int32),
        "JaxsokSortedUsesBytes": (ctypes.c_int64,),
        "JaxsokBringWorkspaceBytes": (ctypes.c_int64,),
        "JaxsokPackBags": (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32),
        "JaxsokEndKeys": (ctypes.c_void_p,),
    }.items():
        function = getattr(library, name)
        function.restype, function.argtypes = ctypes.c_int64, argument_types
    return library


@functools.cache
def load_for(platform: str) -> ctypes.CDLL:
    """Loads the library of a platform's devices, "cpu" or "gpu"; ImportError names the path and the remedy."""
    return load_cpu() if platform == "cpu" else _load("cuda")


@functools.cache
def _register_on(platform: str) -> None:
    library = load_for("cpu" if platform == "cpu" else "gpu")
    for target, symbol in TARGETS:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, symbol)), platform=platform)


def register() -> ctypes.CDLL:
    """Registers the targets of the back ends of this process; ImportError: JAX has a GPU, but there is no library."""
    _register_on("cpu")
    if jax.default_backend() == "gpu":
        _register_on("CUDA")
    return load_cpu()
