"""The devices over which stores and batches are sharded: one device, or some axes of a mesh.

`Shards` is one device; `MeshShards` does the same on a mesh.

Every array of a store, of a batch and of a plan is split along its first dimension, one equal part for each shard, in
the order of the axes; seed and step are the same everywhere. Along axes of the mesh that are not named, everything is
repeated. Inside `shard_map` (or `pmap`) over the axes, code works on the parts.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from jaxtyping import Array, Int32

from jaxsok.checks import not_none


@dataclasses.dataclass(frozen=True)
class Shards:
    """The places of stores and batches, and a way to run code there, which sees a shard's part of split arrays.

    This class is a single shard on one device, where all arrays are whole and nothing travels.
    """

    is_mesh: ClassVar[bool] = False
    """True if arrays are global, with a part in each shard; a mesh may have a single device."""

    @staticmethod
    def of(mesh: Any, axis: Any) -> "Shards":
        """Checks the named axes (TypeError, ValueError: no mesh, no such axis); without a mesh returns one device."""
        if mesh is not None:
            return MeshShards.from_mesh(mesh, axis)
        if axis is not None:
            raise ValueError(f"Collection: axis: got {axis!r} without a mesh, wanted both; pass mesh=...")
        return ONE_DEVICE

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return 1

    @property
    def num_processes(self) -> int:
        """Processes whose devices are among the shards."""
        return 1

    @property
    def is_of_each_process(self) -> bool:
        """True if every process has shards, and so a state, of its own; the first one's is saved."""
        return jax.process_count() > self.num_processes

    @property
    def spec(self) -> P:
        """The partition of split arrays: along their first dimension."""
        return P()

    @property
    def stacked_spec(self) -> P:
        """The partition of split arrays of several steps, which were stacked along a leading axis."""
        return P(None, *self.spec)

    def __str__(self) -> str:
        """Names the axes and sizes for messages; empty for one device."""
        return ""

    def local(self) -> list[int]:
        """Returns the numbers of the shards on this process's devices, ascending."""
        return [0]

    def sees_parts(self) -> bool:
        """Returns whether the caller works on a shard's part of split arrays: on one device, and inside of `run`."""
        return True

    def run(self, body: Callable, args: Sequence[Any], in_specs: Sequence[Any], out_specs: Any) -> Any:
        """Calls `body` on every shard; at once where the caller sees parts already."""
        return body(*args)

    def split_stacked(self, tree: Any) -> Any:
        """Splits the arrays of batches that were stacked along a leading axis, in a program."""
        return tree

    def index(self) -> Any:
        """Returns the number of this shard (inside)."""
        return 0

    def sum(self, parts: Any) -> Any:
        """Sums over all shards (inside)."""
        return parts

    def max(self, parts: Any) -> Any:
        """Takes the maximum over all shards (inside)."""
        return parts

    def total(self, parts: Array, *, is_replicated: bool) -> Array:
        """Sums over all shards; a replicated store counts once (inside)."""
        if is_replicated and self.num_shards > 1:
            parts = jnp.where(self.index() == 0, parts, jnp.zeros_like(parts))
        return self.sum(parts)

    def make(
        self, function: Callable, *static: Hashable, operands: Sequence[np.ndarray] = (), is_split: bool = True
    ) -> Any:
        """Makes arrays on their devices by `function(*static, *operands)`, compiled once for its static arguments."""
        return jax.jit(function, static_argnums=tuple(range(len(static))))(*static, *operands)

    def put(self, blocks: Mapping[int, np.ndarray]) -> Array:
        """Makes one split array of the blocks of this process's shards, which all have one shape."""
        return jnp.asarray(blocks[0])

    def replicate(self, tree: Any) -> Any:
        """Copies arrays of one device to all shards, as a model's parameters."""
        return tree

    def read(self, array: Array) -> np.ndarray:
        """Copies a small split array, whole, to the host of every process (waits for the device; a collective)."""
        return np.asarray(array)


ONE_DEVICE = Shards()


@dataclasses.dataclass(frozen=True)
class MeshShards(Shards):
    """The shards of some axes of a mesh."""

    is_mesh: ClassVar[bool] = True

    mesh: Mesh
    axis: tuple[str, ...]

    @classmethod
    def from_mesh(cls, mesh: Any, axis: Any) -> "MeshShards":
        if not isinstance(mesh, Mesh):
            raise TypeError(f"Collection: mesh: got {type(mesh).__name__}, wanted a jax.sharding.Mesh (jax.make_mesh).")
        names = (axis,) if isinstance(axis, str) else axis
        is_tuple = isinstance(names, (tuple, list)) and names and all(isinstance(name, str) for name in names)
        if not is_tuple or len(set(names)) != len(names):
            raise TypeError(
                f"Collection: axis: got {axis!r}, wanted the name of an axis of the mesh, or a tuple of them."
            )
        missing = [name for name in names if name not in mesh.axis_names]
        if missing:
            raise ValueError(
                f"Collection: axis: got {missing[0]!r}, wanted one of the mesh's axes, {list(mesh.axis_names)}; name "
                "it in jax.make_mesh, or pass another axis."
            )
        types = {name: mesh.axis_types[mesh.axis_names.index(name)] for name in names}
        if len(set(types.values())) > 1:
            raise ValueError(
                f"Collection: axis: got axes of several types, {types}, wanted one type for all of them; pass "
                "axis_types to jax.make_mesh."
            )
        if AxisType.Manual in types.values():
            raise ValueError(
                f"Collection: axis: got axes of the type Manual, {types}, wanted Auto or Explicit; pass axis_types to "
                "jax.make_mesh."
            )
        shards = cls(mesh, tuple(names))
        if 1 < shards.num_processes < jax.process_count():
            raise ValueError(
                f"Collection: mesh: got devices of {shards.num_processes} processes of {jax.process_count()}, wanted "
                "those of all, or of one: what processes agree on, all of them must be asked."
            )
        counts = collections.Counter(device.process_index for device in mesh.devices.flat)
        if len(set(counts.values())) > 1:
            raise ValueError(
                f"Collection: mesh: got {dict(counts)} devices, by process, wanted as many of each: JAX places no "
                "array on other meshes of several processes."
            )
        return shards

    @functools.cached_property
    def num_shards(self) -> int:  # for each batch it is asked for many times
        return math.prod(self.mesh.shape[name] for name in self.axis)

    @property
    def spec(self) -> P:
        return P(self.axis)

    @property
    def split(self) -> NamedSharding:
        """The sharding of split arrays."""
        return NamedSharding(self.mesh, self.spec)

    @property
    def same(self) -> NamedSharding:
        """The sharding of arrays that are the same everywhere."""
        return NamedSharding(self.mesh, P())

    def place(self, ndim: int, *, is_split: bool = True) -> NamedSharding:
        """Returns `split` or `same` in the form of a step's results: on an explicit mesh all dimensions are named."""
        return _place(self, ndim, is_split)

    def read(self, array: Array) -> np.ndarray:
        if self.num_processes > 1:
            with jax.disable_jit(False):
                array = jax.jit(MeshShards.reshard, static_argnums=(0, 1), out_shardings=self.same)(self, P(), array)
        return np.asarray(array)

    def replicate(self, tree: Any) -> Any:
        return jax.device_put(tree, self.same)

    def to_host(self, tree: Any) -> Any:
        """Moves split arrays of a program to pinned host memory, where the host reads them; on CPUs they stay."""
        if self.mesh.devices.flat[0].platform == "cpu":
            return tree
        return jax.tree.map(lambda leaf: jax.device_put(leaf, self.place(leaf.ndim).with_memory_kind(HOST_KIND)), tree)

    def make(
        self, function: Callable, *static: Hashable, operands: Sequence[np.ndarray] = (), is_split: bool = True
    ) -> Any:
        numbers = tuple(range(len(static)))
        shapes = jax.jit(function, static_argnums=numbers).eval_shape(*static, *operands)
        places = jax.tree.map(lambda leaf: self.place(leaf.ndim, is_split=is_split), shapes)
        with jax.disable_jit(False):  # which would leave the places out
            made = jax.jit(function, static_argnums=numbers, out_shardings=places)(*static, *operands)
        # Within a trace, `out_shardings` are not in the types of explicit axes.
        return self.reshard(self.spec if is_split else P(), made)

    @property
    def num_processes(self) -> int:
        return len({device.process_index for device in self.mesh.devices.flat})

    def __str__(self) -> str:
        return ", ".join(f"{name}={self.mesh.shape[name]}" for name in self.axis)

    def local(self) -> list[int]:
        return self._local

    @functools.cached_property
    def _local(self) -> list[int]:
        places = self.split.addressable_devices_indices_map((self.num_shards,))
        return sorted({(not_none(place)[0].start or 0) for place in places.values()})

    def sees_parts(self) -> bool:
        all_manual = jax.sharding.get_abstract_mesh().manual_axes
        manual = [name for name in self.axis if name in all_manual]
        if all_manual and not manual:
            raise ValueError(
                f"Collection: axis: got a shard_map or pmap over other axes alone, {list(all_manual)}, wanted one over "
                f"{list(self.axis)}, or none; name it, as in jax.pmap(step, axis_name={self.axis[0]!r})."
            )
        if manual and len(manual) < len(self.axis):
            raise ValueError(
                f"Collection: axis: got a shard_map over {manual} alone, wanted one over all of {list(self.axis)}, or "
                "none."
            )
        return bool(manual)

    @functools.cached_property
    def _explicit(self) -> set[str]:
        types = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
        return {name for name, kind in types if kind == AxisType.Explicit}

    def split_stacked(self, tree: Any) -> Any:
        if self._explicit.issuperset(self.axis):
            return tree  # it is, by its types
        return lax.with_sharding_constraint(tree, NamedSharding(self.mesh, self.stacked_spec))

    def index(self) -> Int32[Array, ""]:
        return lax.axis_index(self.axis)

    def sum(self, parts: Any) -> Any:
        return lax.psum(parts, self.axis)

    def max(self, parts: Any) -> Any:
        return lax.pmax(parts, self.axis)

    def run(self, body: Callable, args: Sequence[Any], in_specs: Sequence[Any], out_specs: Any) -> Any:
        if self.sees_parts():
            return body(*args)
        args = jax.tree.map(self.reshard, tuple(in_specs), tuple(args))
        mapped = jax.shard_map(body, mesh=self.mesh, in_specs=tuple(in_specs), out_specs=out_specs)
        if not jax.config.jax_disable_jit:
            return mapped(*args)
        with jax.disable_jit(False):  # on GPUs XLA crashes when it compiles a single call of the body (JAX 0.11.2)
            return jax.jit(mapped)(*args)

    def reshard(self, spec: P, tree: Any) -> Any:
        """Reshards arrays for `shard_map`: along explicit axes JAX moves nothing by itself."""
        if not (explicit := self._explicit):
            return tree
        is_stacked = spec == self.stacked_spec
        is_split = (is_stacked or spec == self.spec) and explicit.issuperset(self.axis)
        first = [*[None] * is_stacked, self.axis if is_split else None]

        def reshard_leaf(leaf: Any) -> Any:
            kind = jax.typeof(leaf)
            wanted = P(*first[: kind.ndim], *[None] * (kind.ndim - len(first)))
            if kind.sharding.spec == wanted:
                return leaf
            return jax.sharding.reshard(leaf, NamedSharding(self.mesh, wanted))

        return jax.tree.map(reshard_leaf, tree)

    def put(self, blocks: Mapping[int, np.ndarray]) -> Array:
        block = next(iter(blocks.values()))
        size = block.shape[0]
        shape = (self.num_shards * size, *block.shape[1:])

        def block_at(place: Any) -> np.ndarray:
            # The shards of an empty array have no distinct places.
            return blocks[(not_none(place)[0].start or 0) // size] if size else block

        with jax.transfer_guard_host_to_device("allow"):  # which is meant, as by `jax.device_put`
            return jax.make_array_from_callback(shape, self.place(block.ndim), block_at)


@functools.cache
def _place(shards: MeshShards, ndim: int, is_split: bool) -> NamedSharding:
    # JAX compiles a step again for arguments whose shardings differ in the form alone.
    if AxisType.Explicit not in shards.mesh.axis_types:
        return shards.split if is_split else shards.same
    first = [shards.axis if is_split else None][:ndim]
    return NamedSharding(shards.mesh, P(*first, *[None] * (ndim - 1)))


_NO_MESH = Mesh(np.empty((), object), ())


def without_mesh(function: Callable) -> Callable:
    """Calls a function outside of the caller's `jax.set_mesh`, where JAX refuses arrays of one device."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with jax.set_mesh(_NO_MESH):
            return function(*args, **kwargs)

    return call


def read_on_host(word: Array) -> np.ndarray:
    """Reads an array that is the same on all devices, as a state's seed, without its mesh (waits for the device)."""
    return np.asarray(word.addressable_data(0))


def local_parts(array: Array, num_parts: int, *, is_once: bool = False) -> dict[int, Array]:
    """Returns this process's parts of a split array by shard number; `is_once` takes only one device's copy of each."""
    size, parts = array.shape[0] // num_parts, {}
    for shard in array.addressable_shards:
        if not is_once or shard.replica_id == 0:
            parts.setdefault((shard.index[0].start or 0) // size, shard.data)

    def on_device(part: Array) -> Array:
        # A sharding, not a device: JAX would keep the explicit axes of the type.
        (device,) = part.devices()
        kind = part.sharding.memory_kind
        return mark_host_memory(part) if kind == HOST_KIND else jax.device_put(part, SingleDeviceSharding(device))

    return {number: on_device(parts[number]) for number in sorted(parts)}


def parts_of(tree: Any, num_parts: int, *, is_once: bool = False) -> Iterator[tuple[int, Any]]:
    """Yields this process's shards of a tree of split arrays: the number of each, and its part; see `local_parts`."""
    leaves, structure = jax.tree.flatten(tree)
    by_shard = [local_parts(leaf, num_parts, is_once=is_once) for leaf in leaves]
    for number in by_shard[0]:
        yield number, jax.tree.unflatten(structure, [parts[number] for parts in by_shard])


HOST_KIND = "pinned_host"
"""JAX's memory kind of host memory that a device reads and writes."""


def host_place(device: Any) -> NamedSharding:
    """Returns the place of an array in the host memory of one device, in the form from which JAX makes its type."""
    return NamedSharding(Mesh(np.array([device]), ("rows",)), P(), memory_kind=HOST_KIND)


def mark_host_memory(part: Array) -> Array:
    """Returns an array of one device that lies in host memory with the type that says so; copies nothing."""
    # JAX makes this type only of a place on a mesh. An array keeps it without one.
    (device,) = part.devices()
    typed = jax.make_array_from_single_device_arrays(part.shape, host_place(device), [part])
    return jax.device_put(typed, SingleDeviceSharding(device, memory_kind=HOST_KIND))


def view_on_host(array: Array, *, may_write: bool = False) -> np.ndarray:
    """Waits for an array of one device and gives it read-only; what lies in pinned host memory is not copied.

    `may_write`: the caller alone has the array, and may change what is not copied.
    """
    if array.sharding.memory_kind != HOST_KIND:
        return np.asarray(array)
    # NumPy's own name of bfloat16 is that of two bytes.
    return np.asarray(_Pinned(jax.block_until_ready(array), may_write)).view(array.dtype)


class _Pinned:
    """An array in pinned host memory, as NumPy reads it; the NumPy array keeps it alive."""

    def __init__(self, array: Array, may_write: bool):
        self._array = array
        address = array.unsafe_buffer_pointer(), not may_write
        self.__array_interface__ = {"shape": array.shape, "typestr": array.dtype.str, "data": address, "version": 3}
