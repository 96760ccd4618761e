"""Packs a process's batch into one part for each of its shards.

With n samples on this process's k shards, shard i gets samples i n/k to (i+1) n/k. Every part has the same static size,
in every process. features.py reads and packs a part; this module cuts, pads and puts the parts together as arrays split
over the mesh.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from jaxsok import keys as keys_lib, raw_features
from jaxsok.features import Bags, Batch, Features, StoreFeatures, bags_of
from jaxsok.raw_features import offsets_of
from jaxsok.shards import Shards
from jaxsok.specs import FeatureSpec, StoreSpec
from jaxsok.types import PADDING_KEY


def pack_for_shards(
    raw: Mapping[str, Any],
    stores: Sequence[StoreSpec],
    features: Sequence[FeatureSpec],
    tag: str,
    shards: Shards,
    mask: np.ndarray | None = None,
) -> Batch:
    """Packs this process's part of a batch for its shards; entries with a row per sample are split alike."""
    if any(_is_on_device(raw[spec.name]) for spec in features):
        return _pack_on_device(raw, stores, features, tag, shards)
    numbers = shards.local()
    parts: dict[str, list[Any]] = {}
    specs = []
    num_samples = None
    for spec in features:
        parts[spec.name], num_samples, size = _cut(spec, raw[spec.name], len(numbers), shards)
        specs.append(dataclasses.replace(spec, max_keys=size))
    packed = [
        raw_features.pack_stores({name: cut[i] for name, cut in parts.items()}, stores, specs)
        for i in range(len(numbers))
    ]
    leaves, trees = zip(*(jax.tree.flatten(part) for part in packed), strict=True)
    joined = [shards.put(dict(zip(numbers, same, strict=True))) for same in zip(*leaves, strict=True)]
    rest, split_mask = split_rest(raw_features.rest_of(raw, features), mask, num_samples, shards)
    return Batch(Features(jax.tree.unflatten(trees[0], joined), tag, shards.num_shards), rest, split_mask)


def split_rest(
    rest: dict[str, Any], mask: np.ndarray | None, num_samples: int | None, shards: Shards
) -> tuple[dict[str, Any], Any]:
    """Splits a batch's other entries and its mask as the samples are; `num_samples` is None without features."""
    numbers = shards.local()
    keys_lib.require_unmasked("batch", rest)
    if num_samples is not None:
        rest = {name: _split_rest(name, value, num_samples, numbers, shards) for name, value in rest.items()}
    return rest, None if mask is None else _split_rest("mask", mask, mask.shape[0], numbers, shards)


def pad(raw: Mapping[str, Any], features: Sequence[FeatureSpec], pad_to: int) -> tuple[dict[str, Any], np.ndarray]:
    """Adds samples without keys up to `pad_to`, and zeros to entries with a row per sample; marks real samples."""
    counts: dict[str, int] = {}
    padded = dict(raw)
    for spec in features:
        what = f'batch: feature "{spec.name}"'
        if _is_on_device(raw[spec.name]):
            raise TypeError(f"{what}: got a jax.Array with pad_to, wanted NumPy; pad device arrays before.")
        bags, num_bags = read_bags(spec, raw[spec.name], what)
        counts[spec.name] = num_bags if bags.inverse is None else bags.inverse.shape[0]
        num_added = pad_to - counts[spec.name]
        if num_added < 0:
            raise ValueError(f"{what}: keys: got {counts[spec.name]} samples, wanted at most pad_to = {pad_to}.")
        if bags.inverse is not None:
            bags = dataclasses.replace(bags, inverse=np.append(bags.inverse, np.full(num_added, num_bags, np.int32)))
        # With an inverse always one empty bag more: shapes must not depend on how many samples were added.
        padded[spec.name] = _add_empty_bags(bags, num_added if bags.inverse is None else 1)
    rest, mask = pad_rest(raw_features.rest_of(raw, features), next(iter(counts.values()), pad_to), pad_to)
    return padded | rest, mask


def pad_rest(rest: Mapping[str, Any], num_samples: int, pad_to: int) -> tuple[dict[str, Any], np.ndarray]:
    """Adds zeros to the entries that have a row per sample; also marks the samples that are real."""
    padded = dict(rest)
    for name, value in rest.items():
        if hasattr(value, "shape") and value.shape[:1] == (num_samples,):
            keys_lib.require_unmasked("batch", {name: value})
            value = np.asarray(value)
            padded[name] = np.concatenate([value, np.zeros((pad_to - num_samples, *value.shape[1:]), value.dtype)])
    return padded, np.arange(pad_to) < num_samples


def read_bags(spec: FeatureSpec, value: Any, what: str) -> tuple[Bags, int]:
    """Reads a feature on the host, checks it, and counts its bags: keys are uint64, ragged features have offsets."""
    bags = bags_of(value)
    words = keys_lib.words_of(bags.keys, spec.key_dtype, what)
    keys = keys_lib.from_words(words)
    weights = raw_features.weights_on_host(bags.weights, keys.shape, what)
    is_ragged = bags.lengths is not None or bags.offsets is not None
    offsets = raw_features.read_offsets(bags, words, what) if is_ragged else None
    if not is_ragged:
        raw_features.require_rectangle(keys.shape, what)
    num_bags = keys.shape[0] if offsets is None else offsets.shape[0] - 1
    inverse = None if bags.inverse is None else raw_features.read_inverse(bags, num_bags, what)
    return Bags(keys, offsets=offsets, weights=weights, inverse=inverse), num_bags


def cut_bags(bags: Bags, first: int, last: int) -> Bags:
    """Returns the bags of `read_bags` from `first` up to `last`."""
    weights, begin, end, offsets = bags.weights, first, last, None
    if bags.offsets is not None:
        begin, end = bags.offsets[first], bags.offsets[last]
        offsets = bags.offsets[first : last + 1] - begin
    of_part = None if weights is None else weights[begin:end]
    return Bags(bags.keys[begin:end], offsets=offsets, weights=of_part)


def pick_bags(bags: Bags, numbers: np.ndarray) -> Bags:
    """Returns some bags of `read_bags` by number."""
    place, offsets = numbers, None
    if bags.offsets is not None:
        lengths = bags.offsets[numbers + 1] - bags.offsets[numbers]
        offsets = offsets_of(lengths)
        # Positions of the bags' keys, one bag after the other.
        place = np.repeat(bags.offsets[numbers] - offsets[:-1], lengths) + np.arange(offsets[-1])
    weights = None if bags.weights is None else bags.weights[place]
    return Bags(bags.keys[place], offsets=offsets, weights=weights)


def _add_empty_bags(bags: Bags, more: int) -> Bags:
    if bags.offsets is not None:
        return dataclasses.replace(bags, offsets=np.append(bags.offsets, np.repeat(bags.offsets[-1:], more)))
    keys, weights = bags.keys, bags.weights
    keys = np.concatenate([keys, np.full((more, *keys.shape[1:]), PADDING_KEY, np.uint64)])
    if weights is not None:
        weights = np.concatenate([weights, np.zeros((more, *weights.shape[1:]), weights.dtype)])
    return dataclasses.replace(bags, keys=keys, weights=weights)


def _is_on_device(value: Any) -> bool:
    return any(isinstance(array, jax.Array) for array in vars(bags_of(value)).values())


def _require_even(what: str, num_samples: int, num_parts: int, shards: Shards) -> None:
    if num_samples == 0:
        raise ValueError(
            f"{what}: keys: got no samples, wanted at least one for each of {num_parts} shards ({shards}); leave the "
            f"batch out, or pad it: collection.batch(raw, pad_to={num_parts})."
        )
    if num_samples % num_parts:
        pad_to = -(-num_samples // num_parts) * num_parts
        raise ValueError(
            f"{what}: keys: got {num_samples} samples, wanted a multiple of {num_parts}, the shards of this process "
            f'({shards}); pad the last batch: collection.batch(raw, pad_to={pad_to}), or pad_to="auto".'
        )


def _cut(spec: FeatureSpec, value: Any, num_parts: int, shards: Shards) -> tuple[list[Any], int, int | None]:
    """Returns a feature's parts, its number of samples, and the static size of a part's keys (None: as it comes)."""
    what = f'batch: feature "{spec.name}"'
    bags, num_bags = read_bags(spec, value, what)
    num_samples = num_bags if bags.inverse is None else bags.inverse.shape[0]
    _require_even(what, num_samples, num_parts, shards)
    most = num_samples // num_parts
    if bags.inverse is None:
        parts = [cut_bags(bags, part * most, (part + 1) * most) for part in range(num_parts)]
    else:
        # Several processes must agree on the number of bags of a part.
        most = most if shards.num_processes > 1 else min(most, num_bags)
        parts = []
        for piece in np.split(bags.inverse, num_parts):
            used, inverse = np.unique(piece, return_inverse=True)
            parts.append(_add_empty_bags(dataclasses.replace(pick_bags(bags, used), inverse=inverse), most - used.size))
    limit = None if spec.max_keys is None else -(-spec.max_keys // shards.num_shards)
    if bags.offsets is None:
        return parts, num_samples, limit
    longest = max(part.keys.shape[0] for part in parts)
    if limit is not None and longest > limit:
        raise ValueError(
            f"{what}: keys: got {longest} keys for one shard, wanted at most {limit} (max_keys = {spec.max_keys} over "
            f"{shards.num_shards} shards); declare a larger FeatureSpec(max_keys=...)."
        )
    size = limit
    if limit is None and spec.max_hotness is None:
        if shards.num_processes > 1:
            raise ValueError(
                f"{what}: max_keys: got None in {shards.num_processes} processes, wanted a number: all of them must "
                "give their keys one size; declare FeatureSpec(max_keys=...)."
            )
        size = raw_features.buffer_size(longest)
    return parts, num_samples, size


def _split_rest(name: str, value: Any, num_samples: int, numbers: Sequence[int], shards: Shards) -> Any:
    """Splits an entry with a row per sample as the samples are; returns anything else as it is."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return value
    if not hasattr(value, "shape") or value.shape[:1] != (num_samples,):
        return value
    value = np.asarray(value)
    if value.dtype.kind not in "fiub" and value.dtype != jnp.bfloat16:
        return value
    dtype = jax.dtypes.canonicalize_dtype(value.dtype)
    if value.dtype.kind in "iu" and dtype != value.dtype and value.size:
        ends, limits = (int(value.min()), int(value.max())), np.iinfo(dtype)
        if ends[0] < limits.min or ends[1] > limits.max:
            raise ValueError(
                f'batch: entry "{name}": got {ends[0]} to {ends[1]}, wanted numbers of {dtype}, to which JAX cuts '
                f"{value.dtype} without jax_enable_x64; make them smaller (hours in place of microseconds) or floats, "
                "or leave the entry out."
            )
    value = value.astype(dtype)
    return shards.put(dict(zip(numbers, np.split(value, len(numbers)), strict=True)))


def _pack_on_device(
    raw: Mapping[str, Any], stores: Sequence[StoreSpec], features: Sequence[FeatureSpec], tag: str, shards: Shards
) -> Batch:
    """Packs features that are on the devices already where they are, split by their samples."""
    arrays: dict[str, Any] = {}
    specs = []
    for spec in features:
        what = f'batch: feature "{spec.name}"'
        bags = bags_of(raw[spec.name])
        if bags.inverse is not None:
            raise ValueError(
                f"{what}: inverse: got one together with device arrays, wanted NumPy for all features: when traced, it "
                "is not known which bags are of which shard."
            )
        if bags.lengths is not None or bags.offsets is not None:
            raise ValueError(
                f"{what}: got ragged keys together with device arrays, wanted NumPy for all features, or rectangles: "
                "when traced, it is not known which keys are of which shard."
            )
        keys = bags.keys if isinstance(bags.keys, jax.Array) else keys_lib.as_array(bags.keys, what)
        raw_features.require_rectangle(keys_lib.shape_of(keys, spec.key_dtype, what), what)
        pair = {"keys": keys} if bags.weights is None else {"keys": keys, "weights": bags.weights}
        for name, array in pair.items():
            pair[name] = _place(what, name, array, spec, shards)
        arrays[spec.name] = pair
        limit = None if spec.max_keys is None else -(-spec.max_keys // shards.num_shards)
        specs.append(dataclasses.replace(spec, max_keys=limit))
    packed = _pack_parts(tuple(stores), tuple(specs), shards, arrays)
    return Batch(Features(packed, tag, shards.num_shards), raw_features.rest_of(raw, features))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _pack_parts(
    stores: tuple[StoreSpec, ...], features: tuple[FeatureSpec, ...], shards: Shards, arrays: dict[str, dict[str, Any]]
) -> tuple[StoreFeatures, ...]:
    def pack_part(parts: dict[str, dict[str, Any]]) -> Any:
        bags = {name: Bags(pair["keys"], weights=pair.get("weights")) for name, pair in parts.items()}
        return jax.tree.map(jnp.asarray, raw_features.pack_stores(bags, stores, features))

    return shards.run(pack_part, (arrays,), (shards.spec,), shards.spec)


def _place(what: str, name: str, array: Any, spec: FeatureSpec, shards: Shards) -> Any:
    """Splits a feature's array over the shards; refuses one that is split over other axes."""
    if not isinstance(array, jax.Array):
        array = keys_lib.words_of(array, spec.key_dtype, what) if name == "keys" else np.asarray(array)
    if array.shape[0] % shards.num_shards:
        raise ValueError(
            f"{what}: {name}: got {array.shape[0]} samples, wanted a multiple of {shards.num_shards}, the shards "
            f"({shards}); pad the last batch."
        )
    if isinstance(array, jax.core.Tracer):
        sharding = getattr(jax.typeof(array), "sharding", None)
    elif isinstance(array, jax.Array):
        sharding = array.sharding
    else:
        # A copy: devices may read it where it lies, and the caller fill it again.
        return jax.device_put(array.copy(), shards.split)
    first = sharding.spec[0] if isinstance(sharding, NamedSharding) and len(sharding.spec) else None
    names = (first,) if isinstance(first, str) else tuple(first or ())
    if names and names != shards.axis:
        raise ValueError(
            f"{what}: {name}: got samples split over axis {list(names)}, wanted {list(shards.axis)}, the collection's; "
            "put them there with jax.device_put."
        )
    if isinstance(sharding, SingleDeviceSharding) and not isinstance(array, jax.core.Tracer):
        return jax.device_put(array, shards.split)
    return array
