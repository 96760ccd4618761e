"""Packs raw batches with several threads: one pass over the keys, straight into the memory that devices copy from.

The library (kernels/pack.py) gets a few numbers for each feature, such as addresses and strides, and writes offsets,
keys and weights of all features into their places. Most of these numbers follow from types and shapes alone: batches
that agree in them share a recipe, so that Python takes little time for each batch.

`features.py` and `split.py` define the result with NumPy: they pack batches without a recipe (`jax.Array`s, features
whose samples share bags, numbers of unusual dtypes), and raise the errors of batches that the library refuses.
"""

import ctypes
import dataclasses
import functools
import math
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32, UInt32

from jaxsok import adapters, checks, keys as keys_lib, raw_features, settings, split as split_lib
from jaxsok.annotations import annotate
from jaxsok.checks import not_none
from jaxsok.features import Bags, Batch, FeatureLayout, Features, StoreFeatures, bags_of
from jaxsok.host_buffers import ALIGNMENT, HostBuffers
from jaxsok.kernels import pack as kernel
from jaxsok.keys import PADDING_WORD
from jaxsok.shards import MeshShards, Shards
from jaxsok.specs import FeatureSpec, StoreSpec

MOST_THREADS = 8
"""Threads that pack a batch, at most: a host has other work."""

PadTo = int | Literal["auto"] | None
"""Samples to which a batch is filled up; "auto": the next multiple of the shards of this process."""

_TYPES = kernel.TYPES
_INTEGERS = {code for dtype, code in _TYPES.items() if dtype.kind in "iu"}
_FLOATS = {code for dtype, code in _TYPES.items() if dtype.kind == "f"}
_NARROW = {_TYPES[np.dtype(name)] for name in ("int8", "int16", "int32", "uint8", "uint16", "uint32")}
_UNSIGNED = _TYPES[np.dtype("uint32")]
_HALVES = {np.dtype(np.float16), np.dtype(jnp.bfloat16)}
_MOST_KEPT = 256
_NO_LIMIT = 2**62

_ONE, _LENGTHS, _OFFSETS = range(3)
"""Kinds of features: as many keys in each bag, or ragged by lengths or offsets."""

_form = operator.attrgetter("dtype", "shape", "strides")
_form_of_any_length = operator.attrgetter("dtype", "ndim", "strides")


class _Given(NamedTuple):
    """The arrays of a batch's features, which are read in place."""

    keys: list[np.ndarray]
    bags: list[np.ndarray]
    """Lengths or offsets of the ragged features."""
    weights: list[np.ndarray]
    """Weights of the weighted features, each in the shape of its keys."""
    kinds: list[int]
    """`_ONE`, `_LENGTHS` or `_OFFSETS` for each feature."""

    def signature(self) -> tuple:
        """Returns the dtypes, shapes and strides that a recipe depends on, but no number of ragged keys."""
        keys = [
            _form_of_any_length(array) if kind else _form(array)
            for array, kind in zip(self.keys, self.kinds, strict=True)
        ]
        return *self.kinds, *keys, *map(_form, self.bags), *map(_form_of_any_length, self.weights)

    def by_feature(self, specs: Sequence[FeatureSpec]) -> Iterator[tuple[np.ndarray, int, Any, Any]]:
        """Yields keys, kind, lengths or offsets or None, and weights or None of each feature."""
        bags, weights = iter(self.bags), iter(self.weights)
        for spec, keys, kind in zip(specs, self.keys, self.kinds, strict=True):
            yield keys, kind, next(bags) if kind else None, next(weights) if spec.weighted else None


@dataclasses.dataclass(frozen=True, slots=True)
class _Source:
    """A feature of the batches of a recipe."""

    spec: FeatureSpec
    key_type: int
    num_samples: int
    num_bags: int
    """Bags of the samples, with those that `pad_to` adds."""
    width: int
    """Keys of each bag; 0: ragged."""
    kind: int
    square: int
    """Places of each bag where ragged keys become a rectangle; else 0."""
    limit: int
    """The largest number of keys of a part."""
    size: int
    """Keys of a part, with padding; 0: it follows from the batch."""
    has_lines: bool
    """True if keys are given as `[num_samples, width]`."""
    of_keys: dict[str, int]
    """Fields of `kernel.KEYS` that types and shapes give."""
    of_bags: dict[str, int]
    """Fields of `kernel.BAGS`, likewise."""

    @property
    def has_offsets(self) -> bool:
        return self.kind != _ONE and self.spec.max_hotness is None

    @property
    def is_narrow(self) -> bool:
        """True if 32 bits of each key are enough: of unsigned keys padding is known by offsets alone."""
        if self.key_type == _UNSIGNED:
            return not self.square and (self.has_offsets or self.num_bags == self.num_samples)
        return self.key_type in _NARROW


class _Memory:
    """Places of arrays that every part of a batch has, in memory lent for all parts, one after the other."""

    def __init__(self, num_parts: int):
        self.part_bytes = 0
        self._num_parts = num_parts

    @property
    def num_bytes(self) -> int:
        return self.part_bytes * self._num_parts

    def reserve(self, num_bytes: int) -> int:
        """Reserves memory for an array; returns its place in each part."""
        begin = self.part_bytes
        self.part_bytes += _align(num_bytes)
        return begin

    def views(self, lent: ctypes.Array | None, begin: int, dtype: Any, *shape: int) -> list[np.ndarray]:
        """Returns each part's array of this shape; nothing for one without elements."""
        count = math.prod(shape)
        places = range(begin, begin + self.num_bytes, self.part_bytes) if count else ()
        return [np.frombuffer(lent, dtype, count, place).reshape(shape) for place in places]


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


_Unsigned = tuple[tuple[int, int, int], ...]
"""Features of a store with unsigned keys: the place of their keys, their number, and the offset that ends them (never
the first one; 0: they are not ragged)."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Recipe:
    """A way to pack batches of one signature. Features are counted store by store."""

    stores: list[list[_Source]]
    num_samples: int
    num_bags: int
    numbers: Sequence[int]
    """The shards that get a part each."""
    memory: _Memory
    """Offsets. Behind them lie the ends, and the offsets of rectangles, which no device gets."""
    num_bytes: int
    """Bytes of all these together."""
    ends: int
    """The place of the ends."""
    offsets: list[tuple[int, int]]
    """Place of each store's offsets in a part, and their number."""
    bags: np.ndarray
    """`kernel.BAGS` of the ragged features; addresses count from the beginning of the memory."""
    ragged: np.ndarray
    """The numbers of the ragged features."""
    weighted: np.ndarray
    """The numbers of the weighted features."""
    limits: np.ndarray
    """The largest number of keys of a part, for each ragged feature."""
    free: list[int]
    """The ragged features whose sizes follow from the batch, by their place among the ragged ones."""


class _Sized(NamedTuple):
    """The places of a recipe's arrays in batches whose keys take certain sizes."""

    memory: _Memory
    """Keys and weights."""
    places: list[tuple[tuple, tuple]]
    """Arguments of `_Memory.views` for each store's keys and weights."""
    keys: np.ndarray
    """`kernel.KEYS` of the features; addresses count from the beginning of the memory of keys, or that of offsets."""
    layouts: list[tuple[FeatureLayout, ...]]
    unsigned: "tuple[_Unsigned | None, ...]"


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays", "rest"],
    meta_fields=["layouts", "unsigned", "tag", "num_parts", "is_split", "num_samples", "pad_to"],
)
@dataclasses.dataclass(frozen=True)
class HostBatch:
    """A packed batch in host memory, which `batch` and `pipeline` take as a raw one; `PackBatch` makes it."""

    arrays: list[Any]
    """Keys, offsets and weights of each store, each an array for every part; None where there are none."""
    layouts: tuple[tuple[FeatureLayout, ...], ...]
    unsigned: "tuple[_Unsigned | None, ...]"
    rest: dict[str, Any]
    """The entries that are no features."""
    tag: str
    num_parts: int
    is_split: bool
    num_samples: int
    pad_to: int | None


class Begun(NamedTuple):
    """A raw batch whose packing has begun; threads may read its arrays until `wait` returns."""

    raw: Mapping[str, Any]
    """Converted to arrays if it had to be."""
    pad_to: int | None
    is_split: bool
    packed: HostBatch | None = None
    """None: NumPy has to pack the batch, or to raise."""
    job: kernel.KeysJob | None = None
    """None: the batch is packed already."""

    def wait(self) -> HostBatch | None:
        """Returns the packed batch; None where NumPy has to pack it, or to raise."""
        return self.packed if self.job is None or self.job.wait() else None


class Packing(NamedTuple):
    """A batch that is packed and on its way to the devices."""

    batch: Batch
    """Keys `[num_keys]` are low words."""
    unsigned: tuple[_Unsigned | None, ...]
    """The features of each store whose keys are widened with zeros; None: the keys of the store are wide."""


class HostPacker:
    """Packs raw batches into host memory; keeps this memory, and recipes for batches like the last ones.

    It knows the shards by number, and no devices: it packs in any process, and can be pickled.
    """

    num_threads: int = 1
    """Threads that pack a batch, the caller's among them."""
    is_narrow: bool | None = None
    """True makes keys of at most 32 bits travel as 32 bits; None: if the devices are GPUs."""
    is_split: bool = False
    """True if a process that has only this packer packs for all shards."""
    batches_per_call: int = 1
    """The most steps that a call of a pipeline takes: so many batches wait for one call, each in memory of its own."""

    def __init__(
        self,
        stores: Sequence[StoreSpec],
        features: Sequence[FeatureSpec],
        tag: str,
        numbers: Sequence[int],
        num_shards: int,
        num_processes: int,
    ):
        self._stores, self._features, self._tag = tuple(stores), tuple(features), tag
        self._numbers, self._num_shards, self._num_processes = numbers, num_shards, num_processes
        self._of_store = [raw_features.features_of(store, features) for store in stores]
        self._recipes: dict[Any, _Recipe | None] = {}
        self._sized: dict[Any, _Sized | None] = {}
        self._layouts: dict[Any, tuple[FeatureLayout, ...]] = {}
        self._buffers: HostBuffers | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_recipes": {}, "_sized": {}, "_layouts": {}, "_buffers": None}

    def may_narrow(self) -> bool:
        """Returns whether keys of at most 32 bits travel as 32 bits and are widened on the device."""
        return bool(self.is_narrow)

    def _client(self) -> Any:
        """Returns JAX's client of the GPUs that copy from the memory; None: there are none."""
        return None

    def start(self, raw: Mapping[str, Any], pad_to: int | None, is_split: bool) -> Begun:
        """Begins to pack a raw batch; what needs no key to be read is checked at once."""
        given = self._read(raw)
        recipe = None if given is None else self._recipes.get(self._key(given, pad_to, is_split))
        if given is None or recipe is None:
            raw = adapters.convert_features(raw, self._features)
            raw_features.require_features(raw, self._features)
            raw_features.require_samples(raw, self._features)
            return self.start_checked(raw, pad_to, is_split)
        raw_features.require_lines(raw_features.rest_of(raw, self._features), recipe.num_samples)
        return self._follow(recipe, given, Begun(raw, pad_to, is_split))

    def resolve(self, raw: Any, pad_to: PadTo, is_split: bool) -> int | None:
        """Returns the number of samples that `pad_to` asks for; "auto": the next multiple of this process's shards."""
        if pad_to is None:
            return None
        if pad_to != "auto":
            return checks.integer("batch: pad_to", pad_to, 1, wanted='a number of samples, at least 1, or "auto"')
        if isinstance(raw, HostBatch):
            return raw.pad_to
        raw = adapters.convert_features(raw, self._features)
        raw_features.require_features(raw, self._features)
        counts = (raw_features.count_samples(raw[spec.name]) for spec in self._features)
        num_parts = len(self._numbers) if is_split else 1
        return max(1, -(-next(filter(None, counts), 1) // num_parts)) * num_parts

    def start_checked(self, raw: Mapping[str, Any], pad_to: int | None, is_split: bool) -> Begun:
        """Begins to pack a checked batch, whose lists become arrays."""
        given = self._read({spec.name: _with_arrays(raw[spec.name]) for spec in self._features})
        begun = Begun(raw, pad_to, is_split)
        if given is None:
            return begun
        key = self._key(given, pad_to, is_split)
        recipe = _keep(self._recipes, key, lambda: self._make_recipe(given, pad_to, is_split))
        return begun if recipe is None else self._follow(recipe, given, begun)

    def _read(self, raw: Mapping[str, Any]) -> _Given | None:
        """Returns the arrays of a batch's features, store by store; None where NumPy has to read them."""
        is_batch = self._features and isinstance(raw, Mapping)
        if not is_batch or not kernel.is_available() or settings.mesh_of_thread() is None:
            return None
        given = _Given([], [], [], [])
        for store in self._of_store:
            for spec in store:
                value = raw.get(spec.name)
                if type(value) is np.ndarray and not spec.weighted:  # `_add` would take longer
                    given.keys.append(value)
                    given.kinds.append(_ONE)
                elif not _add(given, spec, value):
                    return None
        return given

    def _key(self, given: _Given, pad_to: int | None, is_split: bool) -> tuple:
        return given.signature(), pad_to, is_split, self.may_narrow()

    def _make_recipe(self, given: _Given, pad_to: int | None, is_split: bool) -> _Recipe | None:
        """Describes a batch by types and shapes; returns None where NumPy has to read it, or to say what is wrong."""
        numbers = self._numbers if is_split else [0]
        num_parts, num_shards = len(numbers), self._num_shards if is_split else 1
        specs = [spec for store in self._of_store for spec in store]
        sources = []
        for spec, arrays in zip(specs, given.by_feature(specs), strict=True):
            source = _describe(spec, *arrays, pad_to, num_parts, num_shards)
            if source is None:
                return None
            sources.append(source)
        num_samples, num_bags = sources[0].num_samples, sources[0].num_bags
        if num_bags == 0 or any(source.num_samples != num_samples for source in sources):
            return None
        ragged = [source for source in sources if source.kind]
        free = [i for i, source in enumerate(ragged) if not source.size]
        if free and is_split and self._num_processes > 1:
            return None  # no size can be agreed on
        remaining = iter(sources)
        stores = [[next(remaining) for _ in store] for store in self._of_store]

        memory, offsets, num_offsets = _Memory(num_parts), [], num_bags // num_parts + 1
        for store in stores:
            count = num_offsets * sum(source.has_offsets for source in store)
            offsets.append((memory.reserve(4 * count), count))
        ends = memory.num_bytes
        end, scratch = ends, ends + _align(8 * (num_parts + 1) * len(ragged))
        bags = []
        for store, (place, _) in zip(stores, offsets, strict=True):
            for source in store:
                if source.square:
                    bags.append(source.of_bags | {"offsets": scratch, "offsets_step": num_offsets, "ends": end})
                    scratch += 4 * num_offsets * num_parts
                elif source.kind:
                    bags.append(
                        source.of_bags | {"offsets": place, "offsets_step": memory.part_bytes // 4, "ends": end}
                    )
                    place += 4 * num_offsets
                end += 8 * (num_parts + 1) if source.kind else 0
        return _Recipe(
            stores,
            num_samples,
            num_bags,
            numbers,
            memory,
            scratch,
            ends,
            offsets,
            _make_items(kernel.BAGS, bags),
            np.flatnonzero([source.kind for source in sources]),
            np.flatnonzero([source.spec.weighted for source in sources]),
            np.array([source.limit for source in ragged], np.int64),
            free,
        )

    def _size(self, recipe: _Recipe, sizes: tuple[int, ...]) -> _Sized | None:
        """Lays out keys, with these sizes for the features without one; returns None for too many keys."""
        memory, places, keys, layouts, unsigned = _Memory(len(recipe.numbers)), [], [], [], []
        following, bags = iter(sizes), iter(recipe.bags)
        bags_of_part = recipe.num_bags // len(recipe.numbers)
        for spec, store in zip(self._stores, recipe.stores, strict=True):
            parts = [_part(source, source.size or next(following), bags_of_part) for source in store]
            num_keys = sum(part.words.shape[0] for part in parts)
            num_weights = sum(part.words.shape[0] for part in parts if part.weights is not None)
            if num_keys >= 2**31:
                return None
            is_narrow = bool(store) and self.may_narrow() and all(source.is_narrow for source in store)
            itemsize, width = (4, ()) if is_narrow else (8, (2,))
            at_keys, at_weights = memory.reserve(itemsize * num_keys), memory.reserve(4 * num_weights)
            places.append(((at_keys, np.uint32, num_keys, *width), (at_weights, np.float32, num_weights)))
            made = raw_features.layouts_of(spec, parts)
            # One object for equal layouts: JAX compares them for each batch.
            layouts.append(_keep(self._layouts, made, lambda made=made: made))
            unsigned.append(_unsigned_of(store, made) if is_narrow else None)
            for source, layout in zip(store, made, strict=True):
                places_of_part = {
                    "size": layout.num_keys,
                    "is_narrow": is_narrow,
                    "packed": at_keys + itemsize * layout.key_start,
                    "packed_weights": at_weights + 4 * max(0, layout.weights_start),
                }
                if source.kind:
                    of_bags = next(bags)
                    places_of_part |= {"ends": of_bags["ends"], "offsets": of_bags["offsets"]}
                keys.append(source.of_keys | places_of_part)
        items = _make_items(kernel.KEYS, keys)
        items["part_bytes"] = memory.part_bytes
        return _Sized(memory, places, items, layouts, tuple(unsigned))

    def _follow(self, recipe: _Recipe, given: _Given, begun: Begun) -> Begun:
        """Begins to pack a batch by its recipe; returns `begun` as it is where the data are refused."""
        num_parts, num_features, num_ragged = len(recipe.numbers), len(given.keys), len(given.bags)
        addresses = kernel.addresses([*given.keys, *given.bags, *given.weights])
        num_keys = [array.size for array, kind in zip(given.keys, given.kinds, strict=True) if kind]
        offsets, sizes = None, ()
        if num_ragged:
            if max(num_keys) >= 2**31:
                return begun
            offsets = self.host_buffers().take(recipe.num_bytes, self.batches_per_call)
            sizes = self._pack_bags(recipe, addresses[num_features:][:num_ragged], num_keys, offsets)
            if sizes is None:
                return begun
        sized = _keep(self._sized, (recipe, sizes), lambda: self._size(recipe, sizes))
        if sized is None:
            return begun
        memory, places = sized.memory, sized.places
        lent, keys = self.host_buffers().take(memory.num_bytes, self.batches_per_call), _copy(sized.keys)
        place = ctypes.addressof(lent)
        keys["keys"] = addresses[:num_features]
        keys["packed"] += place
        if given.weights:
            keys["weights"][recipe.weighted] = addresses[num_features + num_ragged :]
            keys["packed_weights"] += place
        if offsets is not None:
            place = ctypes.addressof(offsets)
            keys["num_keys"][recipe.ragged] = num_keys
            keys["ends"][recipe.ragged] += place
            keys["offsets"] += place
        job = kernel.KeysJob(keys, self.num_threads, (given, lent, offsets))
        arrays = []
        for store, (of_keys, of_weights), (begin, count) in zip(recipe.stores, places, recipe.offsets, strict=True):
            keys_by_part = memory.views(lent, *of_keys)
            is_weighted = any(source.spec.weighted for source in store)
            no_weights = [np.zeros(1, np.float32)] * num_parts if is_weighted else None
            weights = memory.views(lent, *of_weights) or no_weights
            offsets_by_part = recipe.memory.views(offsets, begin, np.int32, count) or None
            arrays.append((keys_by_part or [keys_lib.padding_words((1,))] * num_parts, offsets_by_part, weights))
        packed = HostBatch(
            arrays,
            tuple(sized.layouts),
            sized.unsigned,
            raw_features.rest_of(begun.raw, self._features),
            self._tag,
            num_parts,
            begun.is_split,
            recipe.num_samples,
            begun.pad_to,
        )
        return begun._replace(packed=packed, job=job)

    def _pack_bags(
        self, recipe: _Recipe, addresses: np.ndarray, num_keys: Sequence[int], lent: ctypes.Array
    ) -> tuple[int, ...] | None:
        """Writes the offsets of ragged features; returns the sizes that follow from the batch, or None if refused."""
        place, bags = ctypes.addressof(lent), _copy(recipe.bags)
        bags["given"] = addresses
        bags["num_keys"] = num_keys
        bags["offsets"] += place
        bags["ends"] += place
        if not kernel.pack_bags(bags, self.num_threads):
            return None
        shape = len(bags), len(recipe.numbers) + 1
        ends = np.frombuffer(lent, np.int64, math.prod(shape), recipe.ends).reshape(shape)
        longest = (ends[:, 1:] - ends[:, :-1]).max(axis=1)
        if (longest > recipe.limits).any():
            return None
        return tuple(raw_features.buffer_size(int(longest[i])) for i in recipe.free)

    def host_buffers(self) -> HostBuffers:
        if self._buffers is None or self._buffers.process_id != os.getpid():
            self._buffers = HostBuffers(self._client())
        return self._buffers


class Packer(HostPacker):
    """Packs the raw batches of one collection, and sends them to its devices."""

    def __init__(self, stores: Sequence[StoreSpec], features: Sequence[FeatureSpec], tag: str, shards: Shards):
        super().__init__(stores, features, tag, shards.local(), shards.num_shards, shards.num_processes)
        self.num_threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
        self._shards = shards
        widen = functools.partial(_widen, shards)
        self._widen = jax.jit(widen, static_argnums=0)
        if isinstance(shards, MeshShards):
            self._widen = jax.jit(widen, static_argnums=0, out_shardings=shards.place(2))

    def may_narrow(self) -> bool:
        return self._device().platform != "cpu" if self.is_narrow is None else self.is_narrow

    def _client(self) -> Any:
        device = self._device()
        return device.client if device.platform == "gpu" else None

    def _device(self) -> Any:
        return self._shards.mesh.local_devices[0] if isinstance(self._shards, MeshShards) else jax.local_devices()[0]

    @annotate("jaxsok.batch")
    def begin(self, raw: Mapping[str, Any], pad_to: PadTo) -> Begun:
        """Begins to pack a raw batch; then `complete`, `send` and `finish` make a batch of it.

        One that is packed already is refused if it was packed for others, or with another `pad_to`.
        """
        is_split = not self._shards.sees_parts()
        pad_to = self.resolve(raw, pad_to, is_split)
        if not isinstance(raw, HostBatch):
            return self.start(raw, pad_to, is_split)
        made_for = (raw.tag, raw.num_parts, raw.is_split, raw.pad_to)
        if made_for != (wanted := (self._tag, len(self._numbers) if raw.is_split else 1, is_split, pad_to)):
            raise ValueError(
                f"batch: raw: got a batch packed for (collection, shards of a process, mesh, pad_to) = {made_for}, "
                f"wanted {wanted}; make the PackBatch of this collection, in this process."
            )
        # One object for equal layouts: JAX compares them for each batch.
        layouts = tuple(_keep(self._layouts, made, lambda made=made: made) for made in raw.layouts)
        return Begun(raw, pad_to, is_split, dataclasses.replace(raw, layouts=layouts))

    def complete(self, begun: Begun) -> HostBatch | Batch:
        """Waits until a batch is packed; what the threads refuse, NumPy packs, or raises what is wrong with it."""
        return begun.wait() or self.pack_by_numpy(begun.raw, begun.pad_to, begun.is_split)

    @annotate("jaxsok.batch")
    def send(self, packed: HostBatch | Batch) -> Packing:
        """Begins the copy of a batch to the devices; NumPy's are there."""
        if isinstance(packed, Batch):
            return Packing(packed, ())
        pad_to = packed.pad_to
        if packed.is_split:
            arrays = [
                [parts and self._shards.put(dict(zip(self._numbers, parts, strict=True))) for parts in of_store]
                for of_store in packed.arrays
            ]
        else:
            arrays = jax.device_put([[parts and parts[0] for parts in of_store] for of_store in packed.arrays])
        stores = tuple(StoreFeatures(*arrays[s], layouts) for s, layouts in enumerate(packed.layouts))
        rest, mask = packed.rest, None
        if pad_to is not None:
            rest, mask = split_lib.pad_rest(rest, packed.num_samples, pad_to)
        if packed.is_split:
            rest, mask = split_lib.split_rest(rest, mask, pad_to or packed.num_samples, self._shards)
        elif mask is not None:
            mask = jnp.asarray(mask)
        return Packing(Batch(Features(stores, self._tag, self._num_shards), rest, mask), packed.unsigned)

    def finish(self, packing: Packing) -> Batch:
        """Widens keys of 32 bits, by a program that waits for the copy: dispatch the step before it first."""
        if all(unsigned is None for unsigned in packing.unsigned):
            return packing.batch
        features = packing.batch.features
        stores = list(features.stores)
        for s, (store, unsigned) in enumerate(zip(stores, packing.unsigned, strict=True)):
            if unsigned is not None:
                stores[s] = dataclasses.replace(store, keys=self._widen(unsigned, store.keys, store.offsets))
        return dataclasses.replace(packing.batch, features=dataclasses.replace(features, stores=tuple(stores)))

    def pack_by_numpy(self, raw: Mapping[str, Any], pad_to: int | None, is_split: bool) -> Batch:
        """Packs a checked batch feature by feature, or raises; `is_split`: for all shards of this process."""
        mask: Any = None
        if pad_to is not None:
            raw, mask = split_lib.pad(raw, self._features, pad_to)
        if is_split:
            return split_lib.pack_for_shards(raw, self._stores, self._features, self._tag, self._shards, mask)
        stores = jax.tree.map(jnp.asarray, raw_features.pack_stores(raw, self._stores, self._features))
        rest = raw_features.rest_of(raw, self._features)
        return Batch(Features(stores, self._tag, self._num_shards), rest, None if mask is None else jnp.asarray(mask))

    def for_workers(self) -> HostPacker:
        """Returns a packer that makes the same batches without devices, with one thread, and that can be pickled."""
        shards = self._numbers, self._num_shards, self._num_processes
        packer = HostPacker(self._stores, self._features, self._tag, *shards)
        packer.is_split, packer.is_narrow = not self._shards.sees_parts(), self.may_narrow()
        return packer


def _copy(items: np.ndarray) -> np.ndarray:
    """Copies items, which NumPy would do field by field."""
    return np.frombuffer(bytearray(items), items.dtype)


def _keep(kept: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """Returns the value that is kept for a key, or makes it; forgets all of them where there are too many."""
    try:
        return kept[key]
    except KeyError:  # another thread may empty it between a test and this
        value = make()
    if len(kept) >= _MOST_KEPT:
        kept.clear()
    kept[key] = value
    return value


# Descriptions of features ---------------------------------------------------------------------------------------------


def _with_arrays(value: Any) -> Any:
    """Converts lists of numbers to arrays; returns a feature as it is where that is not possible."""
    if isinstance(value, np.ndarray):
        return value
    bags = bags_of(value)
    names = ("keys", "lengths", "offsets", "weights")
    try:
        return dataclasses.replace(bags, **{name: _as_numpy(getattr(bags, name)) for name in names})
    except (TypeError, ValueError):  # on a device, or no array
        return value


def _as_numpy(given: Any) -> np.ndarray | None:
    if given is None or type(given) is np.ndarray:
        return given
    if isinstance(given, jax.Array):
        raise TypeError
    return keys_lib.as_array(given, "")


def _is_plain(array: Any) -> bool:
    """Returns whether the native packer may read an array: of a masked one it would read the hidden elements, too."""
    return isinstance(array, np.ndarray) and not isinstance(array, np.ma.MaskedArray)


def _add(given: _Given, spec: FeatureSpec, value: Any) -> bool:
    """Adds the arrays of a feature; returns False where NumPy has to read it, or to say what is wrong."""
    keys, weights, kind = value, None, _ONE
    if isinstance(value, Bags):
        keys, weights, bags = value.keys, value.weights, value.lengths
        if value.offsets is not None:
            kind, bags = _OFFSETS, value.offsets
        elif bags is not None:
            kind = _LENGTHS
        if value.inverse is not None or (value.lengths is not None and value.offsets is not None):
            return False
        if kind:
            if not _is_plain(bags):
                return False
            given.bags.append(bags)
    if not _is_plain(keys) or spec.weighted != (weights is not None):
        return False
    if weights is not None:
        if not _is_plain(weights) or weights.shape != keys.shape:
            return False
        given.weights.append(weights.astype(np.float32) if weights.dtype in _HALVES else weights)
    given.keys.append(keys)
    given.kinds.append(kind)
    return True


def _describe(
    spec: FeatureSpec,
    keys: np.ndarray,
    kind: int,
    bags: np.ndarray | None,
    weights: np.ndarray | None,
    pad_to: int | None,
    num_parts: int,
    num_shards: int,
) -> _Source | None:
    """Describes a feature by types and shapes; returns None where NumPy has to read it, or to say what is wrong."""
    key_type, bag_type, weight_type = (
        _TYPES.get(array.dtype, -1) if array is not None else 0 for array in (keys, bags, weights)
    )
    if key_type not in _INTEGERS or keys.ndim not in (1, 2):
        return None
    if weights is not None and weight_type not in _FLOATS:
        return None
    num_samples, width = keys.shape[0], keys.shape[1] if keys.ndim == 2 else 1
    if bags is not None:
        width = 0
        num_samples = bags.shape[0] - (kind == _OFFSETS) if bags.ndim == 1 else -1
        if keys.ndim != 1 or num_samples < 0 or bag_type not in _INTEGERS:
            return None
    elif width == 0 or keys.size >= 2**31:
        return None
    num_bags = pad_to or num_samples
    if num_samples > num_bags or num_bags % num_parts:
        return None
    limit = -(-spec.max_keys // num_shards) if spec.max_keys is not None else _NO_LIMIT
    of_part = num_bags // num_parts
    if kind == _ONE:
        size = of_part * width
        if size > limit:
            return None
    elif spec.max_hotness:
        size = of_part * spec.max_hotness
    else:
        size = 0 if limit == _NO_LIMIT else limit
    square = (spec.max_hotness or 0) if kind else 0
    of_keys = {"line_stride": keys.strides[0], "key_stride": keys.strides[-1], "type": key_type}
    of_keys |= {"width": max(1, width), "num_keys": num_samples * width}
    of_keys |= {"num_parts": num_parts, "num_bags": of_part, "square": square, "weight_type": weight_type}
    if weights is not None:
        of_keys |= {"weight_line_stride": weights.strides[0], "weight_stride": weights.strides[-1]}
    of_bags = {"type": bag_type, "is_offsets": kind == _OFFSETS}
    of_bags |= {"num_bags": num_samples, "num_parts": num_parts, "bags_of_part": of_part}
    if bags is not None:
        of_bags["stride"] = bags.strides[0]
    return _Source(
        spec, key_type, num_samples, num_bags, width, kind, square, limit, size, keys.ndim == 2, of_keys, of_bags
    )


def _part(source: _Source, size: int, num_bags: int) -> raw_features.Part:
    """Describes one part of a feature as `features.py` reads it, without arrays."""
    spec = source.spec
    offsets = jax.ShapeDtypeStruct((num_bags + 1,), jnp.int32) if source.has_offsets else None
    weights = jax.ShapeDtypeStruct((size,), jnp.float32) if spec.weighted else None
    if source.has_offsets:
        shape, hotness = (num_bags,) if spec.combiner else (size,), 0
    elif source.square:
        shape, hotness = (num_bags, source.square), 1
    else:
        shape = (num_bags, source.width) if source.has_lines and not spec.combiner else (num_bags,)
        hotness = source.width
    if spec.combiner is None:
        num_bags, hotness = size, 1
    words = jax.ShapeDtypeStruct((size, 2), jnp.uint32)
    return raw_features.Part(spec, words, offsets, weights, num_bags, hotness, shape)


def _make_items(dtype: np.dtype, items: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Makes the library's items; the batch fills in the fields that are not named."""
    return np.array([tuple(item.get(name, 0) for name in not_none(dtype.names)) for item in items], dtype)


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
    """Widens the low words of keys: by sign, or with zeros, where the keys behind the last bag are padding."""

    def widen_part(low: Array, offsets: Array | None) -> Array:
        high = jnp.where(lax.bitcast_convert_type(low, jnp.int32) < 0, PADDING_WORD, jnp.uint32(0))
        for start, size, last in unsigned:
            is_padding = jnp.arange(size, dtype=jnp.int32) >= (not_none(offsets)[last] if last else size)
            high = lax.dynamic_update_slice(high, jnp.where(is_padding, PADDING_WORD, jnp.uint32(0)), (start,))
        return jnp.stack([low, high], axis=-1)

    return shards.run(widen_part, (low, offsets), (shards.spec, shards.spec), shards.spec)
