"""Packs raw batches with several threads: one pass over the keys, straight into the memory that devices copy from.

For each batch Python describes every feature in a few numbers, without looking at its keys, and the library
(kernels/pack.py) writes offsets, keys and weights of all features, for each shard's part, into their places and checks
them. `features.py` and `split.py` do the same with NumPy and define what is right: they pack what is not described here
(`jax.Array`s, features whose samples share bags, numbers of unusual dtypes), and they read again what the library
refuses, to raise the error. Both ways give the same batch.
"""

import ctypes
import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32, UInt32

from jaxsok import checks, sources
from jaxsok import features as features_lib
from jaxsok import keys as keys_lib
from jaxsok import split as split_lib
from jaxsok.annotations import annotated
from jaxsok.checks import there
from jaxsok.features import Batch, FeatureLayout, Features, StoreFeatures
from jaxsok.host_buffers import ALIGNMENT, HostBuffers
from jaxsok.kernels import pack as kernel
from jaxsok.shards import MeshShards, Shards
from jaxsok.specs import FeatureSpec, StoreSpec
from jaxsok.types import PADDING_KEY

MOST_THREADS = 8
"""Threads that pack a batch, at most: a host has other work."""

_TYPES = kernel.TYPES
_INTEGERS = {code for dtype, code in _TYPES.items() if dtype.kind in "iu"}
_FLOATS = {code for dtype, code in _TYPES.items() if dtype.kind == "f"}
_NARROW = {_TYPES[np.dtype(name)] for name in ("int8", "int16", "int32", "uint8", "uint16", "uint32")}
_UNSIGNED = _TYPES[np.dtype("uint32")]
_MOST_LAYOUTS = 256
_PADDING_WORD = np.uint32(PADDING_KEY & 0xFFFFFFFF)


@dataclasses.dataclass(slots=True)
class _Source:
    """One feature of a raw batch, described: arrays that are read in place, and what becomes of them."""

    spec: FeatureSpec
    keys: np.ndarray
    key_type: int
    num_samples: int
    num_bags: int
    """Bags of the samples, with those that `pad_to` adds."""
    width: int
    """Keys of each bag; 0: ragged."""
    bags: np.ndarray | None
    """Lengths or offsets."""
    is_offsets: bool
    weights: np.ndarray | None
    ends: np.ndarray | None = None
    """Where each part begins among ragged keys, and where the last one ends."""
    longest: int = 0
    """Ragged keys of the longest part."""
    scratch: np.ndarray | None = None
    """Offsets of ragged keys that become a rectangle; no device gets them."""
    size: int = 0
    """Keys of a part, with padding."""

    @property
    def square(self) -> int:
        """Places of each bag where ragged keys become a rectangle; else 0."""
        return 0 if self.bags is None else self.spec.max_hotness or 0

    @property
    def has_offsets(self) -> bool:
        return self.bags is not None and self.spec.max_hotness is None

    @property
    def is_narrow(self) -> bool:
        """Whether 32 bits of each key say all: of unsigned ones padding is known by offsets alone."""
        if self.key_type == _UNSIGNED:
            return not self.square and (self.has_offsets or self.num_bags == self.num_samples)
        return self.key_type in _NARROW


class _Memory:
    """Arrays that every part of a batch has, in memory lent for all parts, one after the other."""

    def __init__(self, num_parts: int):
        self.part_bytes = 0
        self.address = 0
        self._num_parts = num_parts
        self._lent: ctypes.Array | None = None

    def reserve(self, num_bytes: int) -> int:
        """Returns where an array begins in each part."""
        begin = self.part_bytes
        self.part_bytes += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return begin

    def take(self, buffers: HostBuffers) -> None:
        self._lent = buffers.take(max(1, self.part_bytes * self._num_parts))
        self.address = ctypes.addressof(self._lent)

    def views(self, begin: int, dtype: Any, *shape: int) -> list[np.ndarray]:
        """Returns each part's array of this shape; nothing for one without elements."""
        count = math.prod(shape)
        places = range(begin, begin + self._num_parts * self.part_bytes, self.part_bytes) if count else ()
        return [np.frombuffer(self._lent, dtype, count, place).reshape(shape) for place in places]


class _Place(NamedTuple):
    """Where keys and weights of a store begin in each part, and how many there are."""

    keys: int
    weights: int
    num_keys: int
    num_weights: int
    itemsize: int
    """Bytes of a key: 8, or 4 where low words travel."""

    @classmethod
    def reserve(cls, memory: _Memory, store: Sequence[_Source], may_narrow: bool) -> "_Place":
        num_keys = sum(source.size for source in store)
        num_weights = sum(source.size for source in store if source.weights is not None)
        itemsize = 4 if store and may_narrow and all(source.is_narrow for source in store) else 8
        return cls(
            memory.reserve(itemsize * num_keys), memory.reserve(4 * num_weights), num_keys, num_weights, itemsize
        )

    def key_views(self, memory: _Memory) -> list[np.ndarray]:
        shape = (self.num_keys,) if self.itemsize == 4 else (self.num_keys, 2)
        return memory.views(self.keys, np.uint32, *shape)

    def weight_views(self, memory: _Memory) -> list[np.ndarray]:
        return memory.views(self.weights, np.float32, self.num_weights)


_Unsigned = tuple[tuple[int, int, int], ...]
"""Features of a store whose keys have no sign: where their keys begin, how many there are, and which offset ends them.
That is never the first one; 0: they are not ragged."""


class Packing(NamedTuple):
    """A batch that is packed and on its way to the devices."""

    batch: Batch
    """Keys `[num_keys]` are low words."""
    unsigned: tuple[_Unsigned | None, ...]
    """The features whose keys are widened with zeros, by store; None: the keys of the store are wide."""


class Packer:
    """Packs the raw batches of one collection; keeps their host memory, and the layouts that it has seen."""

    num_threads: int
    """Threads that pack a batch, the caller's among them."""
    is_narrow: bool | None
    """Whether keys of at most 32 bits travel as 32 bits and are widened on the device; None: if that is a GPU."""

    def __init__(self, stores: Sequence[StoreSpec], features: Sequence[FeatureSpec], tag: str, shards: Shards):
        self.num_threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
        self.is_narrow = None
        self._stores = tuple(stores)
        self._features = tuple(features)
        self._tag = tag
        self._shards = shards
        self._num_shards, self._num_processes = shards.num_shards, shards.num_processes  # a mesh counts its devices
        names = [{table.name for table in store.tables} for store in stores]
        self._of_store = [[i for i, spec in enumerate(features) if spec.table in tables] for tables in names]
        self._layouts: dict[Any, tuple[FeatureLayout, ...]] = {}
        self._buffers: HostBuffers | None = None
        widen = functools.partial(_widen, shards)
        self._widen = jax.jit(widen, static_argnums=0)
        if isinstance(shards, MeshShards):
            self._widen = jax.jit(widen, static_argnums=0, out_shardings=shards.place(2))

    @annotated("jaxsok.batch")
    def begin(self, raw: Mapping[str, Any], pad_to: int | None) -> "Packing":
        """Packs a raw batch and begins its copy to the devices; `finish` makes a batch of it.

        TypeError, ValueError: names the feature, the argument, what was got and wanted.
        """
        raw = sources.converted(raw, self._features)
        features_lib.require_features(raw, self._features)
        features_lib.require_samples(raw, self._features)
        if pad_to is not None:
            pad_to = checks.integer("batch: pad_to", pad_to, 1, wanted="a number of samples, at least 1")
        is_split = not self._shards.sees_parts()
        packing = self.pack_by_threads(raw, pad_to, is_split)
        return Packing(self.pack_by_numpy(raw, pad_to, is_split), ()) if packing is None else packing

    def finish(self, packing: "Packing") -> Batch:
        """Widens keys that travel as 32 bits, on the devices.

        This is a program like others and waits for the copy, and programs run in the order of their dispatch. A
        pipeline dispatches the step before this batch's first, so that the copy runs during that step.
        """
        features = packing.batch.features
        if all(unsigned is None for unsigned in packing.unsigned):
            return packing.batch
        stores = [
            store
            if unsigned is None
            else dataclasses.replace(store, keys=self._widen(unsigned, store.keys, store.offsets))
            for store, unsigned in zip(features.stores, packing.unsigned, strict=True)
        ]
        return dataclasses.replace(packing.batch, features=dataclasses.replace(features, stores=tuple(stores)))

    def pack_by_numpy(self, raw: Mapping[str, Any], pad_to: int | None, is_split: bool) -> Batch:
        """Packs a batch feature by feature, or raises; `is_split`: for all shards of this process."""
        mask: Any = None
        if pad_to is not None:
            raw, mask = split_lib.pad(raw, self._features, pad_to)
        if is_split:
            return split_lib.pack_sharded(raw, self._stores, self._features, self._tag, self._shards, mask)
        batch = features_lib.pack(raw, self._stores, self._features, self._tag)
        features = dataclasses.replace(batch.features, num_parts=self._shards.num_shards)
        return dataclasses.replace(batch, features=features, mask=None if mask is None else jnp.asarray(mask))

    def pack_by_threads(self, raw: Mapping[str, Any], pad_to: int | None, is_split: bool) -> "Packing | None":
        """Packs a batch; returns None where NumPy has to, which then packs it or raises."""
        if not self._features or not kernel.is_available() or _is_tracing():
            return None
        described = []
        for spec in self._features:
            source = _describe(spec, raw[spec.name], pad_to)
            if source is None:
                return None
            described.append(source)
        num_samples, num_bags = described[0].num_samples, described[0].num_bags
        numbers = self._shards.local() if is_split else [0]
        if num_bags == 0 or num_bags % len(numbers) or any(source.num_bags != num_bags for source in described):
            return None
        found = self._pack_stores([[described[i] for i in members] for members in self._of_store], numbers, is_split)
        if found is None:
            return None
        stores, unsigned = found
        rest, mask = features_lib.rest_of(raw, self._features), None
        if pad_to is not None:
            rest, mask = split_lib.pad_rest(rest, num_samples, pad_to)
        if is_split:
            rest, mask = split_lib.split_rest(rest, mask, num_bags, self._shards)
        elif mask is not None:
            mask = jnp.asarray(mask)
        return Packing(Batch(Features(stores, self._tag, self._num_shards), rest, mask), unsigned)

    def _pack_stores(
        self, stores: Sequence[Sequence[_Source]], numbers: Sequence[int], is_split: bool
    ) -> tuple[tuple[StoreFeatures, ...], tuple["_Unsigned | None", ...]] | None:
        """Packs the features of each store, for the shards of these numbers; None: refused."""
        buffers, num_parts = self.host_buffers(), len(numbers)
        offsets = self._pack_offsets(stores, buffers, num_parts)
        if offsets is None:
            return None
        may_narrow = self.is_narrow if self.is_narrow is not None else self._device().platform != "cpu"
        memory, items, places = _Memory(num_parts), [], []
        for store in stores:
            for source in store:
                if not self._set_size(source, num_parts, is_split):
                    return None
            places.append(_Place.reserve(memory, store, may_narrow))
        if any(place.num_keys >= 2**31 for place in places):
            return None
        memory.take(buffers)
        for store, place in zip(stores, places, strict=True):
            keys_at, weights_at = memory.address + place.keys, memory.address + place.weights
            for source in store:
                items.append(_key_item(source, keys_at, weights_at, place.itemsize, num_parts, memory.part_bytes))
                keys_at += place.itemsize * source.size
                weights_at += 4 * source.size if source.weights is not None else 0
        if not kernel.pack_keys(items, self.num_threads):
            return None

        leaves = []  # by store: keys, offsets and weights, each by part; None where there are none
        for store, place, of_store in zip(stores, places, offsets, strict=True):
            no_weights = [np.zeros(1, np.float32)] * num_parts if any(s.weights is not None for s in store) else None
            keys = place.key_views(memory) or [keys_lib.padding_words((1,))] * num_parts
            leaves.append((keys, of_store or None, place.weight_views(memory) or no_weights))
        if is_split:
            arrays = [
                [parts and self._shards.put(dict(zip(numbers, parts, strict=True))) for parts in of_store]
                for of_store in leaves
            ]
        else:
            arrays = jax.device_put([[parts and parts[0] for parts in of_store] for of_store in leaves])
        packed, unsigned = [], []
        for s, store in enumerate(stores):
            layouts = self._layouts_of(s, store, num_parts)
            packed.append(StoreFeatures(*arrays[s], layouts))
            unsigned.append(_unsigned_of(store, layouts) if places[s].itemsize == 4 else None)
        return tuple(packed), tuple(unsigned)

    def _pack_offsets(
        self, stores: Sequence[Sequence[_Source]], buffers: HostBuffers, num_parts: int
    ) -> list[list[np.ndarray]] | None:
        """Writes the offsets of ragged features, by store and part, and where their keys end; None: refused."""
        memory, places = _Memory(num_parts), []
        for store in stores:
            count = sum(source.num_bags // num_parts + 1 for source in store if source.has_offsets)
            places.append((memory.reserve(4 * count), count))
        ragged = [source for store in stores for source in store if source.bags is not None]
        if not ragged:
            return [[] for _ in stores]
        memory.take(buffers)
        items, ends = [], np.empty((len(ragged), num_parts + 1), np.int64)
        end_place, row = _address(ends), 0
        for store, (begin, _) in zip(stores, places, strict=True):
            place = memory.address + begin
            for source in store:
                if source.bags is None:
                    continue
                num_offsets = source.num_bags // num_parts + 1
                source.ends = ends[row]
                if source.square:
                    source.scratch = np.empty((num_parts, num_offsets), np.int32)
                    items.append(_bag_item(source, num_parts, _address(source.scratch), num_offsets, end_place))
                else:
                    items.append(_bag_item(source, num_parts, place, memory.part_bytes // 4, end_place))
                    place += 4 * num_offsets
                row, end_place = row + 1, end_place + ends.strides[0]
        if not kernel.pack_bags(items, self.num_threads):
            return None
        for source, of_source in zip(ragged, ends.tolist(), strict=True):
            source.longest = max(last - first for first, last in itertools.pairwise(of_source))
        return [memory.views(begin, np.int32, count) for begin, count in places]

    def _set_size(self, source: _Source, num_parts: int, is_split: bool) -> bool:
        """Sets the size of a part's keys; returns False where there are too many keys, or no size can be agreed on."""
        limit, of_part = source.spec.max_keys, source.num_bags // num_parts
        if is_split and limit is not None:
            limit = -(-limit // self._num_shards)
        if source.ends is None:
            source.size = num_keys = of_part * source.width
        else:
            num_keys = source.longest
            if source.square:
                source.size = of_part * source.square
            elif limit is None and is_split and self._num_processes > 1:
                return False
            else:
                source.size = limit or features_lib.buffer_size(num_keys)
        return source.size > 0 and (limit is None or num_keys <= limit)

    def _layouts_of(self, store: int, sources: Sequence[_Source], num_parts: int) -> tuple[FeatureLayout, ...]:
        """Returns the layouts of a store's features, made once for features of these sizes."""
        of_part = [source.num_bags // num_parts for source in sources]
        sizes = (
            store,
            tuple(
                (source.size, bags, source.width, source.keys.ndim, source.bags is None)
                for source, bags in zip(sources, of_part, strict=True)
            ),
        )
        layouts = self._layouts.get(sizes)
        if layouts is None:
            if len(self._layouts) == _MOST_LAYOUTS:
                self._layouts.clear()
            parts = [_part(source, bags) for source, bags in zip(sources, of_part, strict=True)]
            layouts = self._layouts[sizes] = features_lib.layouts_of(self._stores[store], parts)
        return layouts

    def _device(self) -> Any:
        return self._shards.mesh.local_devices[0] if isinstance(self._shards, MeshShards) else jax.local_devices()[0]

    def host_buffers(self) -> HostBuffers:
        """Returns the memory that batches are packed into."""
        if self._buffers is None or self._buffers.process_id != os.getpid():
            device = self._device()
            self._buffers = HostBuffers(device.client if device.platform == "gpu" else None)
        return self._buffers


# Descriptions of features ---------------------------------------------------------------------------------------------


def _is_tracing() -> bool:
    try:
        jax.sharding.get_mesh()
    except ValueError:  # JAX's way to say so
        return True
    return False


def _describe(spec: FeatureSpec, value: Any, pad_to: int | None) -> _Source | None:
    """Describes a feature by types and shapes; None: NumPy has to read it, or to say what is wrong."""
    bags = features_lib.bags_of(value)
    given = bags.offsets if bags.lengths is None else bags.lengths
    if bags.inverse is not None or (bags.lengths is not None and bags.offsets is not None):
        return None
    try:
        keys, given, weights = _as_numpy(bags.keys), _as_numpy(given), _as_numpy(bags.weights)
    except (TypeError, ValueError):  # on a device, or no array
        return None
    if keys is None or spec.weighted != (weights is not None):
        return None
    key_type = _TYPES.get(keys.dtype, -1)
    if key_type not in _INTEGERS or keys.ndim not in (1, 2) or keys.size >= 2**31:
        return None
    if weights is not None:
        if weights.dtype in (np.float16, jnp.bfloat16):
            weights = weights.astype(np.float32)
        if weights.shape != keys.shape or _TYPES.get(weights.dtype, -1) not in _FLOATS:
            return None
    num_samples, width, is_offsets = keys.shape[0], keys.shape[1] if keys.ndim == 2 else 1, False
    if given is not None:
        width, is_offsets = 0, bags.lengths is None
        num_samples = given.shape[0] - is_offsets if given.ndim == 1 else -1
        if keys.ndim != 1 or num_samples < 0 or _TYPES.get(given.dtype, -1) not in _INTEGERS:
            return None
    if (pad_to is not None and num_samples > pad_to) or (given is None and width == 0):
        return None
    return _Source(spec, keys, key_type, num_samples, pad_to or num_samples, width, given, is_offsets, weights)


def _as_numpy(given: Any) -> np.ndarray | None:
    if given is None or type(given) is np.ndarray:
        return given
    if isinstance(given, jax.Array):
        raise TypeError
    return keys_lib.as_array(given, "")


def _part(source: _Source, num_bags: int) -> features_lib.Part:
    """Describes one part of a feature as `features.py` reads it, without arrays."""
    spec, size = source.spec, source.size
    offsets = jax.ShapeDtypeStruct((num_bags + 1,), jnp.int32) if source.has_offsets else None
    weights = None if source.weights is None else jax.ShapeDtypeStruct((size,), jnp.float32)
    if source.has_offsets:
        shape, hotness = (num_bags,) if spec.combiner else (size,), 0
    elif source.square:
        shape, hotness = (num_bags, source.square), 1
    else:
        shape = (num_bags,) if spec.combiner or source.keys.ndim == 1 else (num_bags, source.width)
        hotness = source.width
    if spec.combiner is None:
        num_bags, hotness = size, 1
    words = jax.ShapeDtypeStruct((size, 2), jnp.uint32)
    return features_lib.Part(spec, words, offsets, weights, num_bags, hotness, shape)


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def _bag_item(source: _Source, num_parts: int, offsets: int, offsets_step: int, ends: int) -> tuple[int, ...]:
    """Returns the fields of `PackBags` (ffi/kernels/pack.h)."""
    bags = source.bags
    assert bags is not None
    return (
        _address(bags),
        bags.strides[0],
        _TYPES[bags.dtype],
        source.is_offsets,
        source.num_samples,
        source.keys.shape[0],
        num_parts,
        source.num_bags // num_parts,
        offsets,
        offsets_step,
        ends,
    )


def _key_item(
    source: _Source, key_place: int, weight_place: int, itemsize: int, num_parts: int, part_bytes: int
) -> tuple[int, ...]:
    """Returns the fields of `PackKeys` (ffi/kernels/pack.h)."""
    keys, weights = source.keys, source.weights
    of_weights = (0, 0, 0, 0)
    if weights is not None:
        of_weights = (_address(weights), weights.strides[0], weights.strides[-1], _TYPES[weights.dtype])
    return (
        _address(keys),
        keys.strides[0],
        keys.strides[-1],
        source.key_type,
        max(1, source.width),
        keys.size,
        0 if source.ends is None else _address(source.ends),
        num_parts,
        part_bytes,
        source.size,
        key_place,
        itemsize == 4,
        *of_weights,
        weight_place,
        0 if source.scratch is None else _address(source.scratch),
        source.num_bags // num_parts,
        source.square,
    )


# Keys of 32 bits ------------------------------------------------------------------------------------------------------


def _unsigned_of(store: Sequence[_Source], layouts: Sequence[FeatureLayout]) -> _Unsigned:
    return tuple(
        (layout.key_start, layout.num_keys, layout.num_offsets and layout.offsets_start + layout.num_offsets - 1)
        for source, layout in zip(store, layouts, strict=True)
        if source.key_type == _UNSIGNED
    )


def _widen(
    shards: Shards,
    unsigned: _Unsigned,
    low: UInt32[Array, " num_keys"],
    offsets: Int32[Array, " num_offsets"] | None,
) -> UInt32[Array, "num_keys 2"]:
    """Widens the low words of keys: by sign, or with zeros, where padding is what lies behind the last bag."""

    def widen_part(low: Array, offsets: Array | None) -> Array:
        high = jnp.where(lax.bitcast_convert_type(low, jnp.int32) < 0, _PADDING_WORD, jnp.uint32(0))
        for start, size, last in unsigned:
            is_padding = jnp.arange(size, dtype=jnp.int32) >= (there(offsets)[last] if last else size)
            high = lax.dynamic_update_slice(high, jnp.where(is_padding, _PADDING_WORD, jnp.uint32(0)), (start,))
        return jnp.stack([low, high], axis=-1)

    return shards.run(widen_part, (low, offsets), (shards.spec, shards.spec), shards.spec)
