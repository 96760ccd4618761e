"""JAX's settings of a thread, and how another thread gets them."""

import contextlib
from collections.abc import Iterator

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


def current_settings() -> tuple | None:
    """Returns this thread's settings; None: a trace is under way."""
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # JAX's way to say that a trace is under way
        return None
    return (mesh, *(setting.value for setting in _SETTINGS))


@contextlib.contextmanager
def in_settings(settings: tuple) -> Iterator[None]:
    """Gives this thread the settings of another; equal settings stay, so that JAX's caches are shared."""
    mesh, *values = settings
    with contextlib.ExitStack() as stack:
        for setting, value in zip(_SETTINGS, values, strict=True):
            if setting.value != value:
                stack.enter_context(setting(value))
        if jax.sharding.get_mesh() != mesh:
            stack.enter_context(jax.set_mesh(mesh))
        yield
