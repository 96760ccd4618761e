"""Door to memory of the host that a device reads and writes: `JaxsokHostMemoryNew` in ffi/kernels/host_memory.cc."""

import ctypes
from typing import Any

from jaxsok.kernels import library

_TYPES = {"cpu": 1, "gpu": 3}  # kOnHost and kPinnedOnHost in ffi/kernels/host_memory.h
_NAME = b"dltensor"  # of a capsule whose tensor is not taken yet

_python = ctypes.PyDLL(None)  # and not ctypes.pythonapi, whose functions are of the types that others gave them
_python.PyCapsule_New.restype = ctypes.py_object
_python.PyCapsule_New.argtypes = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
_python.PyCapsule_IsValid.argtypes = ctypes.py_object, ctypes.c_char_p


class HostBytes:
    """Zeros, uint8[num_rows, width], which `jax.dlpack.from_dlpack` takes over; RuntimeError: no memory, says why."""

    def __init__(self, platform: str, ordinal: int, num_rows: int, width: int):
        self._library = library.load_for(platform)
        self._device = _TYPES[platform], ordinal
        tensor = ctypes.c_void_p()
        error = self._library.JaxsokHostMemoryNew(ordinal, num_rows, width, ctypes.byref(tensor))
        if error is not None:
            raise RuntimeError(error.decode())
        self._tensor = tensor.value
        self._capsule = _python.PyCapsule_New(self._tensor, _NAME, None)

    def __del__(self) -> None:
        # A consumer that takes a tensor renames its capsule.
        if hasattr(self, "_capsule") and _python.PyCapsule_IsValid(self._capsule, _NAME):
            self._library.JaxsokHostMemoryDelete(self._tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Returns DLPack's type of the memory, and the ordinal of the device."""
        return self._device

    def __dlpack__(self, **_: Any) -> Any:
        """Returns the capsule; only the first taker gets the tensor."""
        return self._capsule
