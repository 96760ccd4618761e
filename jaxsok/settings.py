"""JAX's settings of a thread, and how another thread gets them."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

# JAX's settings that change a program and that a context can hold for one thread alone. A thread begins with the
# global ones, so the compiling one is given those of the caller; and a program serves only the settings it was made in.
_SETTINGS = (
    jax.default_device,
    jax.default_matmul_precision,
    jax.default_prng_impl,
    jax.enable_x64,
    jax.numpy_dtype_promotion,
    jax.numpy_rank_promotion,
    jax.threefry_partitionable,
    jax.enable_custom_prng,
    jax.softmax_custom_jvp,
    jax.allow_f16_reductions,
    jax.debug_key_reuse,
)


def compile_ahead(program: Any, *args: Any) -> Callable[..., Any]:
    """Compiles a `jax.jit` for arguments; the result takes those that are not static, also under `jax.disable_jit`."""
    with jax.disable_jit(False):
        compiled = program.lower(*args).compile()

    def call(*args: Any) -> Any:
        with jax.disable_jit(False):
            return compiled(*args)

    return call


def modes_of_flax() -> list[Any]:
    """Returns Flax's modes that change what its transformations do, if Flax is in use; older Flax has none."""
    nnx = sys.modules.get("flax.nnx")
    modes = [getattr(nnx, name, None) for name in ("set_graph_mode", "set_graph_updates")]
    return [mode for mode in modes if mode is not None]


def mesh_of_thread() -> Any:
    """Returns the mesh of `jax.set_mesh`; None: a trace is under way."""
    try:
        return jax.sharding.get_mesh()
    except ValueError:  # JAX's way to say so
        return None


def current_settings() -> tuple | None:
    """Returns this thread's settings; None: a trace is under way."""
    mesh = mesh_of_thread()
    if mesh is None:
        return None
    return (mesh, *(setting.value for setting in _SETTINGS), *(mode.current_value() for mode in modes_of_flax()))


@contextlib.contextmanager
def in_settings(settings: tuple) -> Iterator[None]:
    """Gives this thread the settings of another; equal settings stay, so that JAX's caches are shared."""
    mesh, *values = settings
    with contextlib.ExitStack() as stack:
        for setting, value in zip(_SETTINGS, values[: len(_SETTINGS)], strict=True):
            if setting.value != value:
                stack.enter_context(setting(value))
        for mode, value in zip(modes_of_flax(), values[len(_SETTINGS) :], strict=False):
            stack.enter_context(mode(value))
        if jax.sharding.get_mesh() != mesh:
            stack.enter_context(jax.set_mesh(mesh))
        yield
