"""Packed features: ragged features as arrays of static size.

A user's features (one key a sample, padded rectangles, ragged lists, weights) become, for each store, one buffer of
keys, one of offsets and one of weights: few arrays to transfer, one kernel launch to read them. `raw_features` reads
what a user gives, and packs it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from jaxsok import printed
from jaxsok.checks import not_none
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
