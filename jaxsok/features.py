"""Packs ragged features into batches of static size.

A user's features (one key a sample, padded rectangles, ragged lists, weights) become, for each store, one buffer of
keys, one of offsets and one of weights: few arrays to transfer, one kernel launch to read them. NumPy input is checked
value by value; a `jax.Array` is checked by type and shape, and kernels clamp its offsets.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from jaxsok import keys as keys_lib, printed
from jaxsok.checks import not_none
from jaxsok.specs import FeatureSpec, StoreSpec
from jaxsok.types import BAGS_PER_TILE, COMBINERS, KEY_WORDS, NUM_FEATURE_WORDS, PADDING_KEY, REQUEST_WORDS


@dataclasses.dataclass(frozen=True)
class Bags:
    """The keys of one feature of one batch, with their bags and weights.

    Example:
      >>> bags = Bags(np.array([7, 7, 9]), lengths=np.array([2, 1]))  # bags [7, 7] and [9]
    """

    keys: Any
    """`[num_bags]`: one key each. `[num_bags, hotness]`: padded. `[num_keys]`: with lengths or offsets."""
    _: dataclasses.KW_ONLY
    lengths: Any = None
    """`[num_bags]`: the number of keys of each bag."""
    offsets: Any = None
    """`[num_bags + 1]`: where each bag begins, and where the last one ends."""
    weights: Any = None
    """One float per key, in the shape of `keys`."""
    inverse: Any = None
    """`[num_samples]`: the bag of each sample, where samples share bags (TorchRec's variable batch).

    A bag is looked up once, its embedding is repeated for each sample, and its gradient is the sum of its samples'.
    Empty bags are added up to the next power of two, or to `num_samples`."""


def bags_of(value: Any) -> Bags:
    """Converts a feature of a raw batch to Bags; an array alone is the keys."""
    return value if isinstance(value, Bags) else Bags(value)


@dataclasses.dataclass(frozen=True)
class FeatureLayout:
    """The place of a feature's part of a batch in the buffers of its store. Static: it is part of the program."""

    name: str
    table: int
    combiner: str | None
    num_keys: int
    num_bags: int
    hotness: int
    """Keys per bag; 0: ragged."""
    embedding_shape: tuple[int, ...]
    """Without its last axis."""
    key_start: int = 0
    bag_start: int = 0
    offsets_start: int = 0
    num_offsets: int = 0
    """0: every bag has `hotness` keys."""
    weights_start: int = -1
    """-1: no weights."""
    tile_start: int = 0
    unknown_zeros: bool = False
    inverse_start: int = -1
    """-1: samples share no bags."""
    num_distinct: int = 0

    def __repr__(self) -> str:
        shape = ", ".join(map(str, (*self.embedding_shape, "dim")))
        return f"{self.name}: {self.num_keys:,} keys -> [{shape}]"

    @property
    def combined_shape(self) -> tuple[int, ...]:
        """The shape that kernels return: `embedding_shape`, or that of the distinct bags where samples share them."""
        return self.embedding_shape if self.inverse_start < 0 else (self.num_distinct, *self.embedding_shape[1:])

    @property
    def num_tiles(self) -> int:
        """Tiles of its bags; keys without any bag still have one, which counts them."""
        return max(-(-self.num_bags // BAGS_PER_TILE), 1 if self.num_keys else 0)

    def words(self, plan: int = 0) -> list[int]:
        """Returns its words in the features operand (FeatureWord in ffi/core/layout.h)."""
        # A bag of one key is its row whatever the combiner, so it takes the path without bags.
        single = self.hotness == 1 and self.weights_start < 0
        bags = self.bag_start, self.num_bags, self.hotness, self.offsets_start, self.weights_start, self.tile_start
        combiner = 0 if single else COMBINERS[self.combiner]
        return [self.table, combiner, self.key_start, self.num_keys, *bags, int(self.unknown_zeros), plan]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StoreFeatures:
    """The features of a batch that read one store; None for arrays without contents, which cost host time."""

    keys: UInt32[Array, "num_keys 2"]
    """At least one, perhaps not read: empty arrays crash XLA's compiler for several GPUs (jaxlib 0.11.2)."""
    offsets: Int32[Array, " num_offsets"] | None
    """Concatenated over the ragged features; None if there are none."""
    weights: Float32[Array, " num_weights"] | None
    """Concatenated over the weighted features; None if there are none."""
    layouts: tuple[FeatureLayout, ...] = dataclasses.field(metadata={"static": True})
    inverse: Int32[Array, " num_inverse"] | None = None
    """Concatenated over the features whose samples share bags; None if there are none."""

    def __repr__(self) -> str:
        return f"StoreFeatures({printed.join_items([*map(repr, self.layouts), *printed.condition_of(self)])})"

    def inverse_of(self, layout: FeatureLayout) -> Int32[Array, " num_samples"] | None:
        """Returns the bag of each sample of a feature; None where samples share no bags."""
        if self.inverse is None or layout.inverse_start < 0:
            return None
        return self.inverse[layout.inverse_start : layout.inverse_start + layout.embedding_shape[0]]

    @property
    def num_tiles(self) -> int:
        """Tiles of all features."""
        return sum(layout.num_tiles for layout in self.layouts)

    @property
    def is_weighted(self) -> bool:
        """Whether a feature has weights."""
        return any(layout.weights_start >= 0 for layout in self.layouts)

    @property
    def use_words(self) -> int:
        """Words in which a use travels to the owner of its row: its key, and with weights its table and weight."""
        return REQUEST_WORDS if self.is_weighted else KEY_WORDS

    def operands(self) -> tuple[Array, Array, Array, np.ndarray]:
        """Returns keys, offsets, weights and features, as the kernels take them."""
        words = np.array([layout.words() for layout in self.layouts], np.int32).reshape(-1, NUM_FEATURE_WORDS)
        is_ragged = any(layout.num_offsets for layout in self.layouts)
        # Kernels see from the size whether any feature is ragged.
        offsets = not_none(self.offsets) if is_ragged else jnp.zeros(0, jnp.int32)
        weights = not_none(self.weights) if self.is_weighted else jnp.zeros(0, jnp.float32)
        return self.keys, offsets, weights, words


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Features:
    """All features of a batch, packed by store: a pytree of arrays that `Collection.batch` makes.

    On a mesh each array holds one packed part for each shard, one after the other; layouts describe one part.
    """

    stores: tuple[StoreFeatures, ...]
    fingerprint: str = dataclasses.field(metadata={"static": True})
    num_parts: int = dataclasses.field(default=1, metadata={"static": True})

    def __repr__(self) -> str:
        stores = [store for store in self.stores if isinstance(store, StoreFeatures)]
        parts = [printed.join_items([repr(layout) for store in stores for layout in store.layouts])]
        parts += [f"for each of {self.num_parts} shards"] if self.num_parts > 1 else []
        return f"Features({'; '.join(parts + printed.condition_of(self))})"

    def _find(self, name: str) -> tuple[StoreFeatures, FeatureLayout]:
        for store in self.stores:
            for layout in store.layouts:
                if layout.name == name:
                    return store, layout
        known = [layout.name for store in self.stores for layout in store.layouts]
        raise KeyError(f'Features: got feature "{name}", wanted one of {known}.')

    @property
    def num_parts_here(self) -> int:
        """The parts in each array: inside shard_map one, whatever the batch was made for; the number of keys tells."""
        for store in self.stores:
            num_keys = sum(layout.num_keys for layout in store.layouts)
            if num_keys:
                return 1 if store.keys.shape[0] == num_keys else self.num_parts
        return 1

    def _parts(self, array: Array, start: int, size: int) -> Array:
        """Returns `size` lines of each part of a packed array: `[num_parts, size, ...]`."""
        lines = array.reshape(self.num_parts_here, array.shape[0] // self.num_parts_here, *array.shape[1:])
        return lines[:, start : start + size]

    def keys(self, name: str) -> UInt32[Array, "num_keys 2"]:
        """Returns the keys of a feature as words, padding included."""
        store, layout = self._find(name)
        return self._parts(store.keys, layout.key_start, layout.num_keys).reshape(-1, 2)

    def offsets(self, name: str) -> Int32[Array, " num_bags_plus_1"]:
        """Returns where each bag of a feature begins among its keys, and where the last one ends.

        Bags `[7, 7]` and `[9]` give `[0, 2, 3]`. On a mesh the offsets of all parts follow each other, each counting
        from 0.
        """
        store, layout = self._find(name)
        if layout.num_offsets:
            return self._parts(not_none(store.offsets), layout.offsets_start, layout.num_offsets).reshape(-1)
        num_bags = layout.combined_shape[0]
        hotness = layout.num_keys // max(1, num_bags)
        return jnp.tile(jnp.arange(num_bags + 1, dtype=jnp.int32) * hotness, self.num_parts_here)

    def inverse(self, name: str) -> Int32[Array, " num_samples"]:
        """Returns the bag of each sample of a feature; 0, 1, 2, ... where samples share no bags.

        Keys, offsets and mask have an entry per bag: `mask[inverse]` has one per sample. On a mesh the parts follow
        each other, each counting its own bags.
        """
        store, layout = self._find(name)
        if layout.inverse_start >= 0:
            return self._parts(not_none(store.inverse), layout.inverse_start, layout.embedding_shape[0]).reshape(-1)
        return jnp.tile(jnp.arange(layout.embedding_shape[0], dtype=jnp.int32), self.num_parts_here)

    def mask(self, name: str) -> Bool[Array, "..."]:
        """Marks the keys of a feature that are no padding: `[num_keys]`, or `[num_bags, hotness]` if padded to several.

        Keys `[[7, 9], [3, PADDING_KEY]]` give `[[True, True], [True, False]]`.
        """
        _, layout = self._find(name)
        real = ~(self.keys(name) == jnp.uint32(PADDING_KEY & 0xFFFFFFFF)).all(axis=-1)
        if layout.combiner is None:
            return real.reshape(-1, *layout.embedding_shape[1:])
        return real.reshape(-1, layout.hotness) if layout.hotness > 1 else real


NO_FEATURES = Features((), "")
"""Stands in a result for features that the caller has."""


def single_key_layouts(tables: Sequence[int], sizes: Sequence[int]) -> tuple[FeatureLayout, ...]:
    """Makes undeclared features of single keys, one after the other: `sizes` keys of `tables`."""
    layouts, start, tile = [], 0, 0
    for number, (table, size) in enumerate(zip(tables, sizes, strict=True)):
        layout = FeatureLayout(str(number), table, None, size, size, 1, (size,), start, start, tile_start=tile)
        layouts.append(layout)
        start, tile = start + size, tile + layout.num_tiles
    return tuple(layouts)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """A packed batch: its features, and its other entries, untouched."""

    features: Features
    rest: dict[str, Any]
    mask: Any = None
    """bool `[num_samples]`, False for the samples that `pad_to` added; None without it."""

    def __repr__(self) -> str:
        rest = printed.join_items([f"{name!r}: {printed.describe_value(value)}" for name, value in self.rest.items()])
        mask = "" if self.mask is None else f", mask={printed.describe_value(self.mask)}"
        return f"Batch({self.features!r}, {{{rest}}}{mask})"

    def __getitem__(self, name: str) -> Any:
        if name not in self.rest:
            raise KeyError(f'Batch: got "{name}", wanted one of {sorted(self.rest)}; features are in batch.features.')
        return self.rest[name]


@dataclasses.dataclass
class Part:
    """A feature that is read and checked, before it is packed."""

    spec: FeatureSpec
    words: Any
    offsets: Any
    weights: Any
    num_bags: int
    hotness: int
    shape: tuple[int, ...]
    inverse: Any = None


def require_features(raw: Mapping[str, Any], features: Sequence[FeatureSpec]) -> None:
    """Refuses a raw batch that is no mapping, or lacks a feature."""
    if not isinstance(raw, Mapping):
        columns = next((name for name in ("column_names", "columns") if hasattr(raw, name)), None)
        remedy = "" if columns is None else f"; pass its columns: {{name: raw[name] for name in raw.{columns}}}"
        raise TypeError(f"batch: raw: got {type(raw).__name__}, wanted a mapping from names to arrays{remedy}.")
    missing = [spec.name for spec in features if spec.name not in raw]
    if missing:
        raise ValueError(
            f"batch: raw: got {len(features) - len(missing)} of {len(features)} features, wanted also {missing}; "
            f"it holds {sorted(map(str, raw))}."
        )


def require_samples(raw: Mapping[str, Any], features: Sequence[FeatureSpec]) -> None:
    """Refuses features with different numbers of samples, and columns with another number of rows."""
    counts = {spec.name: count_samples(raw[spec.name]) for spec in features}
    counts = {name: count for name, count in counts.items() if count is not None}
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"batch: raw: got features of {counts} samples, wanted one number of samples for all; a sample without "
            "keys has PADDING_KEY or an empty bag. For keys that belong to no sample declare combiner=None and pass "
            "them as [num_samples, n]."
        )
    num_samples = next(iter(counts.values()), None)
    if num_samples is None or any(_is_global(raw[spec.name]) for spec in features):
        return  # the process of each row of a global array is not known here
    require_lines(rest_of(raw, features), num_samples)


def require_lines(rest: Mapping[str, Any], num_samples: int) -> None:
    """Refuses columns `[n]` or `[n, 1]`, among the entries that are no features, with other than `num_samples` rows."""
    if any(_is_global(value) for value in rest.values()):
        return
    for name, value in rest.items():
        shape = getattr(value, "shape", None)
        if isinstance(shape, tuple) and shape and shape[0] != num_samples and shape[1:] in ((), (1,)):
            raise ValueError(
                f'batch: entry "{name}": got shape {list(shape)} with features of {num_samples} samples, wanted '
                f"[{num_samples}], a line for each sample; if it is no data of samples, pass it in a tuple: "
                f'"{name}": (array,).'
            )


def _is_global(value: Any) -> bool:
    keys = value.keys if isinstance(value, Bags) else value
    return isinstance(keys, jax.Array) and not isinstance(keys, jax.core.Tracer) and not keys.is_fully_addressable


def count_samples(value: Any) -> int | None:
    """Returns the number of samples that a feature's shapes give; None if none, which `_read` refuses."""
    if isinstance(value, np.ndarray):
        return value.shape[0] if value.ndim else None
    bags = bags_of(value)
    for given, more in ((bags.inverse, 0), (bags.lengths, 0), (bags.offsets, 1), (bags.keys, 0)):
        if given is not None and hasattr(given, "shape"):
            return max(0, given.shape[0] - more) if len(given.shape) else None
        if isinstance(given, (list, tuple)):
            return max(0, len(given) - more)
    return None


def rest_of(raw: Mapping[str, Any], features: Sequence[FeatureSpec]) -> dict[str, Any]:
    """Returns the entries of a raw batch that are no features; it has all features."""
    if len(raw) == len(features):
        return {}
    own = {spec.name for spec in features}
    return {name: value for name, value in raw.items() if name not in own}


def pack_stores(
    raw: Mapping[str, Any], stores: Sequence[StoreSpec], features: Sequence[FeatureSpec]
) -> tuple[StoreFeatures, ...]:
    """Packs the features of a raw batch by store; NumPy input stays NumPy."""
    read = {spec.name: _read(spec, raw[spec.name]) for spec in features}
    return tuple(_join_parts(store, [read[spec.name] for spec in features_of(store, features)]) for store in stores)


def _join_parts(store: StoreSpec, parts: Sequence[Part]) -> StoreFeatures:
    return StoreFeatures(
        join([part.words for part in parts]) if parts else keys_lib.padding_words((1,)),
        _join_some([part.offsets for part in parts], np.int32),
        _join_some([part.weights for part in parts], np.float32),
        layouts_of(store, parts),
        _join_some([part.inverse for part in parts], np.int32),
    )


def features_of(store: StoreSpec, features: Sequence[FeatureSpec]) -> list[FeatureSpec]:
    """Returns the features that read tables of a store."""
    names = {table.name for table in store.tables}
    return [spec for spec in features if spec.table in names]


def shapes_of(store: StoreSpec, features: Sequence[FeatureSpec], sizes: Mapping[str, tuple[int, int]]) -> StoreFeatures:
    """Makes the shapes and dtypes of a batch to come, by each feature's keys and samples; single keys if equal."""

    def make(spec: FeatureSpec) -> Part:
        num_keys, num_bags = sizes[spec.name]
        is_ragged = num_keys != num_bags and spec.max_hotness is None
        words = jnp.zeros((num_keys, 2), jnp.uint32)
        offsets = jnp.zeros(num_bags + 1, jnp.int32) if is_ragged else None
        weights = jnp.zeros(num_keys, jnp.float32) if spec.weighted else None
        num_bags = num_bags if spec.combiner else num_keys
        return Part(spec, words, offsets, weights, num_bags, 0 if spec.combiner and is_ragged else 1, (num_bags,))

    return jax.eval_shape(lambda: _join_parts(store, [make(spec) for spec in features_of(store, features)]))


def layouts_of(store: StoreSpec, parts: Sequence[Part]) -> tuple[FeatureLayout, ...]:
    """Lays out the features of a store, one after the other; reads only the shapes of their arrays."""
    layouts: list[FeatureLayout] = []
    names = [table.name for table in store.tables]
    key_start = bag_start = offsets_start = weights_start = tile_start = inverse_start = 0
    for part in parts:
        num_keys, spec = part.words.shape[0], part.spec
        table = names.index(spec.table)
        has_inverse = part.inverse is not None
        layout = FeatureLayout(
            name=spec.name,
            table=table,
            combiner=spec.combiner,
            num_keys=num_keys,
            num_bags=part.num_bags,
            hotness=part.hotness,
            embedding_shape=(part.inverse.shape[0], *part.shape[1:]) if has_inverse else part.shape,
            key_start=key_start,
            bag_start=bag_start,
            offsets_start=offsets_start,
            num_offsets=0 if part.offsets is None else part.offsets.shape[0],
            weights_start=weights_start if part.weights is not None else -1,
            tile_start=tile_start,
            unknown_zeros=store.tables[table].unknown == "zeros",
            inverse_start=inverse_start if has_inverse else -1,
            num_distinct=part.shape[0] if has_inverse else 0,
        )
        layouts.append(layout)
        key_start += num_keys
        bag_start += part.num_bags
        tile_start += layout.num_tiles
        offsets_start += layout.num_offsets
        weights_start += 0 if part.weights is None else num_keys
        inverse_start += part.inverse.shape[0] if has_inverse else 0
    if key_start >= 2**31 or bag_start >= 2**31:
        raise ValueError(f"batch: raw: got {key_start} keys and {bag_start} bags for one store, wanted below 2**31.")
    return tuple(layouts)


def _join_some(arrays: Sequence[Any], dtype: Any) -> Any:
    """Joins the arrays that are not None; without elements the result has one that is not read."""
    some = [array for array in arrays if array is not None]
    if not some:
        return None
    joined = join(some)
    return joined if joined.shape[0] else np.zeros(1, dtype)


def join(arrays: Sequence[Any]) -> Any:
    """Joins arrays; NumPy parts are joined on the host, so that one transfer carries them.

    A single one is copied, too: it may be the caller's, who may fill it again while a device still reads it.
    """
    if any(isinstance(array, jax.Array) for array in arrays):
        return jnp.concatenate([jnp.asarray(array) for array in arrays])
    return np.concatenate(arrays)


def _read(spec: FeatureSpec, value: Any) -> Part:
    what = f'batch: feature "{spec.name}"'
    bags = bags_of(value)
    part = _read_bags(spec, bags, what)
    if bags.inverse is None:
        return part
    is_ragged = bags.lengths is not None or bags.offsets is not None
    if is_ragged and spec.combiner is None and spec.max_hotness is None:
        raise ValueError(
            f"{what}: inverse: got one with combiner None and ragged keys, whose embedding has no line for each bag; "
            "declare FeatureSpec(max_hotness=...)."
        )
    inverse = read_inverse(bags, part.shape[0], what)
    return dataclasses.replace(_with_more_bags(part, inverse.shape[0]), inverse=inverse)


def _with_more_bags(part: Part, num_samples: int) -> Part:
    """Adds empty bags up to the next power of two, or the number of samples, so that programs are few."""
    num_bags = part.shape[0]
    if num_bags == 0:
        return part
    wanted = 1 << (num_bags - 1).bit_length()
    wanted = wanted if num_bags > num_samples else min(wanted, num_samples)
    is_ragged, keys_per_bag = part.offsets is not None, part.words.shape[0] // num_bags
    if not is_ragged and part.spec.max_keys is not None and part.spec.max_hotness is None:
        wanted = max(num_bags, min(wanted, part.spec.max_keys // keys_per_bag))
    more = wanted - num_bags
    if more == 0:
        return part
    kernel_bags = part.num_bags // num_bags  # of each bag: kernels take the keys of a rectangle for bags
    part = dataclasses.replace(part, num_bags=wanted * kernel_bags, shape=(wanted, *part.shape[1:]))
    if is_ragged:
        xp = jnp if isinstance(part.offsets, jax.Array) else np
        return dataclasses.replace(part, offsets=xp.concatenate([part.offsets, xp.repeat(part.offsets[-1:], more)]))
    words, weights = _pad(part.words, part.weights, wanted * keys_per_bag)
    return dataclasses.replace(part, words=words, weights=weights)


def _read_integers(given: Any, what: str) -> Any:
    """Reads integers as NumPy; only traced ones are left to the kernels, which clamp them."""
    if isinstance(given, list | tuple) and not given:
        return np.zeros(0, np.int64)
    given = given if isinstance(given, jax.core.Tracer) else np.asarray(given)
    if not jnp.issubdtype(given.dtype, jnp.integer):
        raise TypeError(f"{what}: got {given.dtype}{list(given.shape)}, wanted integers.")
    return given


def read_inverse(bags: Bags, num_bags: int, what: str) -> Any:
    """Reads the bag of each sample: int32 NumPy, checked; or traced, with `num_bags` for positions without a bag."""
    given = _read_integers(bags.inverse, f"{what}: inverse")
    if given.ndim != 1:
        raise ValueError(f"{what}: inverse: got shape {list(given.shape)}, wanted [num_samples].")
    if not isinstance(given, np.ndarray):
        given = given.astype(jnp.int32) if given.dtype.itemsize <= 4 else given
        is_bag = (given >= 0) & (given < num_bags)
        return jnp.where(is_bag, given, num_bags).astype(jnp.int32)
    outside = given[(given < 0) | (given >= num_bags)]
    if outside.size:
        raise ValueError(f"{what}: inverse: got {outside[0]}, wanted 0 to {num_bags - 1}, one of {num_bags} bags.")
    return given.astype(np.int32)


def _read_bags(spec: FeatureSpec, bags: Bags, what: str) -> Part:
    words = keys_lib.words_of(bags.keys, spec.key_dtype, what)
    weights = _read_weights(spec, bags, words.shape[:-1], what)
    if bags.lengths is not None or bags.offsets is not None:
        return _read_ragged(spec, bags, words, weights, what)
    if words.ndim == 2:
        num_bags, hotness, shape = words.shape[0], 1, (words.shape[0],)
    elif words.ndim == 3:
        num_bags, hotness = words.shape[:2]
        if hotness == 0:
            raise ValueError(
                f"{what}: keys: got shape {[num_bags, 0]}, wanted at least one column; ragged keys "
                "need lengths or offsets: Bags(keys, lengths=...)."
            )
        shape = (num_bags,) if spec.combiner else (num_bags, hotness)
    else:
        raise ValueError(
            f"{what}: keys: got shape {list(words.shape[:-1])}, wanted [num_bags] or [num_bags, hotness]; ragged keys "
            "need lengths or offsets: Bags(keys, lengths=...)."
        )
    words = words.reshape(-1, 2)
    weights = None if weights is None else weights.reshape(-1)
    _limit(spec, words.shape[0], what)
    if spec.combiner is None:
        num_bags, hotness = words.shape[0], 1
    return Part(spec, words, None, weights, num_bags, hotness, shape)


def _limit(spec: FeatureSpec, num_keys: int, what: str) -> None:
    if spec.max_keys is not None and num_keys > spec.max_keys:
        raise ValueError(
            f"{what}: keys: got {num_keys} keys, wanted at most max_keys = {spec.max_keys}; split the batch, or "
            "declare a larger FeatureSpec(max_keys=...)."
        )


def require_declared(spec: FeatureSpec, bags: Bags, what: str) -> None:
    """Refuses more keys than a feature declares, weights that it does not, and weights that it lacks."""
    _limit(spec, bags.keys.size, what)
    _read_weights(spec, bags, bags.keys.shape, what)


def _read_weights(spec: FeatureSpec, bags: Bags, shape: tuple[int, ...], what: str) -> Any:
    if bags.weights is None:
        if spec.weighted:
            raise ValueError(f"{what}: weights: got none, wanted one per key; pass Bags(keys, weights=...).")
        return None
    if not spec.weighted:
        raise ValueError(f"{what}: weights: got some, but none are declared; declare FeatureSpec(weighted=True).")
    return read_weights(bags.weights, shape, what)


def read_weights(given: Any, shape: tuple[Any, ...], what: str) -> Any:
    """Reads weights of keys, whose shape may be symbolic: float32 NumPy, checked to be finite, or traced."""
    weights = given if isinstance(given, jax.Array) else np.asarray(given)
    if not jnp.issubdtype(weights.dtype, jnp.floating):
        raise TypeError(f"{what}: weights: got {weights.dtype}{list(weights.shape)}, wanted floats.")
    _require_weights_shape(weights, shape, what)
    with np.errstate(over="ignore"):  # float64 beyond float32 becomes infinite, and is refused
        weights = weights.astype(jnp.float32)
    if isinstance(weights, np.ndarray) and not np.isfinite(weights).all():
        raise ValueError(f"{what}: weights: got infinite or NaN in float32, wanted finite numbers.")
    return weights


def weights_on_host(given: Any, shape: tuple[int, ...], what: str) -> np.ndarray | None:
    """Returns weights of keys as NumPy, in any dtype; None stays None."""
    weights = None if given is None else np.asarray(given)
    if weights is not None:
        _require_weights_shape(weights, shape, what)
    return weights


def _require_weights_shape(weights: Any, shape: tuple[Any, ...], what: str) -> None:
    if weights.shape != shape:
        raise ValueError(f"{what}: weights: got shape {list(weights.shape)}, wanted that of the keys, {list(shape)}.")


def read_places(bags: Bags, words: Any, what: str) -> tuple[str, Any]:
    """Reads the lengths or the offsets of ragged keys, with the name of what there is; only their form is checked."""
    if bags.lengths is not None and bags.offsets is not None:
        raise ValueError(f"{what}: got both lengths and offsets, wanted one of them.")
    if words.ndim != 2:
        raise ValueError(
            f"{what}: keys: got shape {list(words.shape[:-1])} with lengths or offsets, wanted [num_keys]."
        )
    name = "lengths" if bags.lengths is not None else "offsets"
    given = _read_integers(getattr(bags, name), f"{what}: {name}")
    if given.ndim != 1 or (name == "offsets" and given.shape[0] == 0):
        wanted = "[num_bags]" if name == "lengths" else "[num_bags + 1]"
        raise ValueError(f"{what}: {name}: got shape {list(given.shape)}, wanted {wanted}.")
    return name, given


def read_offsets(bags: Bags, words: Any, what: str) -> Any:
    """Reads offsets of ragged keys: int32 NumPy, checked to rise within the keys; or traced, made to rise."""
    name, given = read_places(bags, words, what)
    if isinstance(given, np.ndarray):
        return _check_offsets(given, name, words, what)
    if name == "offsets":
        return make_rise(given, words.shape[0])
    return make_rise(jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(given.astype(jnp.int32))]), words.shape[0])


def _read_ragged(spec: FeatureSpec, bags: Bags, words: Any, weights: Any, what: str) -> Part:
    offsets = read_offsets(bags, words, what)
    if isinstance(offsets, jax.Array) or isinstance(words, jax.Array):
        place = jnp.arange(words.shape[0], dtype=jnp.int32)
        inside = (place >= offsets[0]) & (place < offsets[-1])
        words = jnp.where(inside[:, None], words, jnp.uint32(PADDING_KEY & 0xFFFFFFFF))
    else:
        words = words[: offsets[-1]]
        weights = None if weights is None else weights[: offsets[-1]]
    num_bags = offsets.shape[0] - 1
    _limit(spec, words.shape[0], what)
    if spec.max_hotness is not None:
        return _to_rectangle(spec, words, offsets, num_bags, what)
    size = spec.max_keys or buffer_size(words.shape[0])
    words, weights = _pad(words, weights, size)
    if spec.combiner is None:
        return Part(spec, words, offsets, None, size, 1, (size,))
    return Part(spec, words, offsets, weights, num_bags, 0, (num_bags,))


def buffer_size(num_keys: int) -> int:
    """Returns the size of a buffer of ragged keys without `max_keys`: powers of two, so that programs are few."""
    return 1 << (num_keys - 1).bit_length() if num_keys else 1


def make_rise(offsets: Array, num_keys: int) -> Int32[Array, " num_bags_plus_1"]:
    """Makes traced offsets rise within the keys, so that no kernel strays whatever their values are."""
    return jax.lax.cummax(jnp.clip(offsets.astype(jnp.int32), 0, num_keys))


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """Returns the offsets of bags of these lengths: int64."""
    return np.append(0, np.cumsum(lengths, dtype=np.int64))


def bag_offsets(given: np.ndarray, name: str, num_keys: int, what: str) -> np.ndarray:
    """Returns the offsets of bags from their lengths (int64) or offsets (as they are), `name` says which.

    Offsets may begin behind 0; whether every key is in a bag is left to the caller.

    Raises:
      ValueError: a negative number, offsets that decrease, or an end after the last key.
    """
    if given.size and given.min() < 0:
        raise ValueError(f"{what}: {name}: got {int(given.min())}, wanted no negative number.")
    if name == "offsets":
        offsets, falls = given, np.flatnonzero(given[1:] < given[:-1])  # no difference: it could exceed the dtype
        if falls.size:
            i = int(falls[0])
            raise ValueError(
                f"{what}: offsets: got {offsets[i]} then {offsets[i + 1]} at {i}, wanted never decreasing."
            )
    else:
        longest = int(given.max(initial=0))
        if longest > num_keys:  # the sum could exceed int64
            raise ValueError(f"{what}: lengths: got a bag of {longest} keys, past the end of {num_keys} keys.")
        offsets = offsets_of(given)
    if offsets[-1] > num_keys:
        raise ValueError(f"{what}: {name}: got an end at {offsets[-1]}, past the end of {num_keys} keys.")
    return offsets


def _check_offsets(given: np.ndarray, name: str, words: Any, what: str) -> np.ndarray:
    """Returns offsets as int32 after checking that they rise from 0 to the number of keys."""
    num_keys = words.shape[0]
    offsets = bag_offsets(given, name, num_keys, what)
    if offsets[0] != 0:
        raise ValueError(f"{what}: offsets: got {offsets[0]} first, wanted 0.")
    if offsets[-1] < num_keys and not isinstance(words, jax.core.Tracer):
        tail = np.asarray(words[offsets[-1] :])
        if not (tail == np.uint32(PADDING_KEY & 0xFFFFFFFF)).all():
            raise ValueError(
                f"{what}: {name}: got an end at {offsets[-1]} of {num_keys} keys, wanted all keys in bags, or "
                "PADDING_KEY after the last bag."
            )
    return offsets.astype(np.int32)


def _pad(words: Any, weights: Any, size: int) -> tuple[Any, Any]:
    more = size - words.shape[0]
    if more == 0:
        return words, weights
    xp = jnp if isinstance(words, jax.Array) else np
    words = xp.concatenate([words, keys_lib.padding_words((more,))])
    if weights is not None:
        xp = jnp if isinstance(weights, jax.Array) else np
        weights = xp.concatenate([weights, np.zeros(more, np.float32)])
    return words, weights


def _to_rectangle(spec: FeatureSpec, words: Any, offsets: Any, num_bags: int, what: str) -> Part:
    width = spec.max_hotness
    if isinstance(offsets, np.ndarray):
        lengths = np.diff(offsets)
        if lengths.size and lengths.max() > width:
            raise ValueError(
                f"{what}: got a bag of {int(lengths.max())} keys, wanted at most max_hotness = {width}; cut it, or "
                "declare a larger FeatureSpec(max_hotness=...)."
            )
    xp = np if isinstance(words, np.ndarray) and isinstance(offsets, np.ndarray) else jnp
    offsets = xp.asarray(offsets)
    place = offsets[:-1, None] + xp.arange(width, dtype=np.int32)[None, :]
    inside = place < offsets[1:, None]
    padded = xp.concatenate([words, keys_lib.padding_words((1,))])
    square = padded[xp.where(inside, place, words.shape[0])]
    return Part(spec, square.reshape(-1, 2), None, None, num_bags * width, 1, (num_bags, width))
