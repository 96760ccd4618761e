"""Reads the features of raw batches, and packs them into arrays of static size.

NumPy input is checked value by value; a `jax.Array` is checked by type and shape, and kernels clamp its offsets.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jaxsok import keys as keys_lib
from jaxsok.features import Bags, FeatureLayout, StoreFeatures, bags_of
from jaxsok.specs import FeatureSpec, StoreSpec
from jaxsok.types import PADDING_KEY


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
    part = _without_unused_keys(part, inverse)
    return dataclasses.replace(_with_more_bags(part, inverse.shape[0]), inverse=inverse)


def _without_unused_keys(part: Part, inverse: Any) -> Part:
    """Turns keys of bags that no sample has into padding, so that they are no uses of rows; in NumPy alone."""
    if not isinstance(inverse, np.ndarray) or not isinstance(part.words, np.ndarray):
        return part
    is_used = np.zeros(part.shape[0], bool)
    is_used[inverse] = True
    if is_used.all():
        return part
    # Offsets are of NumPy where words are.
    lengths = len(part.words) // len(is_used) if part.offsets is None else np.diff(part.offsets)
    place, words = np.flatnonzero(~np.repeat(is_used, lengths)), part.words.copy()
    words[place] = PADDING_KEY & 0xFFFFFFFF
    return dataclasses.replace(part, words=words)


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
    shape = words.shape[:-1]
    require_rectangle(shape, what)
    num_bags, hotness = (*shape, 1)[:2]
    if spec.combiner:
        shape = (num_bags,)
    words = words.reshape(-1, 2)
    weights = None if weights is None else weights.reshape(-1)
    _limit(spec, words.shape[0], what)
    if spec.combiner is None:
        num_bags, hotness = words.shape[0], 1
    return Part(spec, words, None, weights, num_bags, hotness, shape)


def require_rectangle(shape: Sequence[int], what: str) -> None:
    """Refuses keys without lengths or offsets that are no bags of one length, by their shape."""
    ragged = "ragged keys need lengths or offsets: Bags(keys, lengths=...)"
    if len(shape) not in (1, 2):
        raise ValueError(f"{what}: keys: got shape {list(shape)}, wanted [num_bags] or [num_bags, hotness]; {ragged}.")
    if shape[-1] == 0 and len(shape) == 2:
        raise ValueError(f"{what}: keys: got shape {list(shape)}, wanted at least one column; {ragged}.")


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
