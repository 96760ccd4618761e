"""The devices on which served tables lie: of this process, whatever process of a job it is."""

from typing import Any

import jax


def host_device() -> Any:
    """Returns JAX's CPU device. RuntimeError: it is switched off; says how to switch it on."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise RuntimeError(
            "jaxsok.serving: device: got no CPU backend of JAX, wanted one, where rows of the host are read; leave "
            'JAX_PLATFORMS unset, or set it to "cuda,cpu".'
        ) from error


def device_or_default(device: Any) -> Any:
    """Returns a device; for None that of `jax.default_device`, else the first of this process."""
    default = jax.config.jax_default_device if device is None else device
    if default is None or isinstance(default, str):  # the name of a platform
        return jax.local_devices(backend=default)[0]
    return default
