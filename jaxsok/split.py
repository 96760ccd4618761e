"""Packs a process's batch into one part for each of its shards.

With n samples on this process's k shards, shard i gets samples i n/k to (i+1) n/k. Every part has the same static size,
in every process. features.py reads and packs a part; this module cuts, pads and puts the parts together as arrays split
over the mesh.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from jaxsok import checks
from jaxsok import features as features_lib
from jaxsok import keys as keys_lib
from jaxsok.features import Bags, Batch, Features
from jaxsok.shards import Shards
from jaxsok.specs import FeatureSpec, StoreSpec
from jaxsok.types import PADDING_KEY


def pack_sharded(
    raw: Mapping[str, Any],
    stores: Sequence[StoreSpec],
    features: Sequence[FeatureSpec],
    tag: str,
    shards: Shards,
    mask: np.ndarray | None = None,
) -> Batch:
    """Packs this process's part of a batch for its shards; entries with a line for each sample are split alike.

    All features have one number of samples. `tag` is the collection's fingerprint; `mask` says which samples are real,
    if some were added. Errors name feature, argument, got and wanted.
    """
    features_lib.require_features(raw, features)
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
        features_lib.pack_stores({name: cut[i] for name, cut in parts.items()}, stores, specs)
        for i in range(len(numbers))
    ]
    leaves, trees = zip(*(jax.tree.flatten(part) for part in packed), strict=True)
    joined = [shards.put(dict(zip(numbers, same, strict=True))) for same in zip(*leaves, strict=True)]
    rest = features_lib.rest_of(raw, features)
    if num_samples is not None:
        rest = {name: _split_rest(value, num_samples, numbers, shards) for name, value in rest.items()}
    split_mask = None if mask is None else shards.put(dict(zip(numbers, np.split(mask, len(numbers)), strict=True)))
    return Batch(Features(jax.tree.unflatten(trees[0], joined), tag, shards.num_shards), rest, split_mask)


def pad(raw: Mapping[str, Any], features: Sequence[FeatureSpec], pad_to: int) -> tuple[dict[str, Any], np.ndarray]:
    """Adds samples without keys until there are `pad_to`; other entries with a line for each sample get zeros.

    Also returns which samples are real. TypeError, ValueError: device arrays, or more samples than `pad_to`.

    Example:
      >>> raw, mask = pad({"user": np.array([7, 9])}, [FeatureSpec("user", table="user")], 3)
      >>> raw["user"].tolist(), mask.tolist()
      ([7, 9, 18446744073709551615], [True, True, False])
    """
    checks.integer("batch: pad_to", pad_to, 1, wanted="a number of samples, at least 1")
    features_lib.require_features(raw, features)
    counts: dict[str, int] = {}
    padded = dict(raw)
    for spec in features:
        what = f'batch: feature "{spec.name}"'
        value = raw[spec.name]
        bags = features_lib.bags_of(value)
        if _is_on_device(value):
            raise TypeError(f"{what}: got a jax.Array with pad_to, wanted NumPy; pad device arrays before.")
        words = keys_lib.words_of(bags.keys, spec.key_dtype, what)
        keys = keys_lib.from_words(words)
        is_ragged = bags.lengths is not None or bags.offsets is not None
        lengths = np.diff(features_lib.read_offsets(bags, words, what)) if is_ragged else keys
        counts[spec.name] = lengths.shape[0]
        more = pad_to - lengths.shape[0]
        inverse = None
        if bags.inverse is not None:
            # Always one empty bag more: shapes must not depend on how many samples were added.
            inverse = features_lib.read_inverse(bags, lengths.shape[0], what)
            counts[spec.name] = inverse.shape[0]
            more, num_added = 1, pad_to - inverse.shape[0]
            inverse = np.concatenate([inverse, np.full(max(num_added, 0), lengths.shape[0], np.int32)])
        if counts[spec.name] > pad_to:
            raise ValueError(f"{what}: keys: got {counts[spec.name]} samples, wanted at most pad_to = {pad_to}.")
        if is_ragged:
            lengths = np.concatenate([lengths, np.zeros(more, lengths.dtype)])
            padded[spec.name] = Bags(keys, lengths=lengths, weights=bags.weights, inverse=inverse)
            continue
        keys = np.concatenate([keys, np.full((more, *keys.shape[1:]), PADDING_KEY, np.uint64)])
        weights = bags.weights
        if weights is not None:
            weights = np.asarray(weights)
            weights = np.concatenate([weights, np.zeros((more, *weights.shape[1:]), weights.dtype)])
        is_plain = weights is None and inverse is None
        padded[spec.name] = keys if is_plain else Bags(keys, weights=weights, inverse=inverse)
    num_samples = next(iter(counts.values()), pad_to)
    for name, value in features_lib.rest_of(raw, features).items():
        if hasattr(value, "shape") and value.shape[:1] == (num_samples,):
            value = np.asarray(value)
            padded[name] = np.concatenate([value, np.zeros((pad_to - num_samples, *value.shape[1:]), value.dtype)])
    return padded, np.arange(pad_to) < num_samples


def _is_on_device(value: Any) -> bool:
    bags = features_lib.bags_of(value)
    return any(
        isinstance(one, jax.Array) for one in (bags.keys, bags.lengths, bags.offsets, bags.weights, bags.inverse)
    )


def _require_even(what: str, num_samples: int, num_parts: int, shards: Shards) -> None:
    if num_samples == 0:
        raise ValueError(
            f"{what}: keys: got no samples, wanted at least one for each of {num_parts} shards ({shards}); leave the "
            f"batch out, or pad it: collection.batch(raw, pad_to={num_parts})."
        )
    if num_samples % num_parts:
        raise ValueError(
            f"{what}: keys: got {num_samples} samples, wanted a multiple of {num_parts}, the shards of this process "
            f"({shards}); pad the last batch: collection.batch(raw, pad_to={-(-num_samples // num_parts) * num_parts})."
        )


def _cut(spec: FeatureSpec, value: Any, num_parts: int, shards: Shards) -> tuple[list[Any], int, int | None]:
    """Returns a feature's parts, its number of samples, and the static size of a part's keys (None: as it comes)."""
    what = f'batch: feature "{spec.name}"'
    bags = features_lib.bags_of(value)
    words = keys_lib.words_of(bags.keys, spec.key_dtype, what)
    keys = keys_lib.from_words(words)
    weights = None if bags.weights is None else np.asarray(bags.weights)
    if weights is not None and weights.shape != keys.shape:
        raise ValueError(
            f"{what}: weights: got shape {list(weights.shape)}, wanted that of the keys, {list(keys.shape)}."
        )
    is_ragged = bags.lengths is not None or bags.offsets is not None
    offsets = features_lib.read_offsets(bags, words, what) if is_ragged else np.zeros(0, np.int32)
    num_bags = offsets.shape[0] - 1 if is_ragged else keys.shape[0]
    inverse = None if bags.inverse is None else features_lib.read_inverse(bags, num_bags, what)
    num_samples = num_bags if inverse is None else inverse.shape[0]
    _require_even(what, num_samples, num_parts, shards)
    if inverse is not None:
        # Several processes must agree on the number of bags of a part.
        most = num_samples // num_parts
        most = most if shards.num_processes > 1 else min(most, num_bags)
        pieces = np.split(inverse, num_parts)
        parts = [_picked(keys, offsets, weights, piece, most, is_ragged=is_ragged) for piece in pieces]
    elif is_ragged:
        bounds = np.arange(num_parts + 1) * (num_bags // num_parts)
        parts = []
        for first, last in itertools.pairwise(bounds.tolist()):
            begin, end = offsets[first], offsets[last]
            of_part = None if weights is None else weights[begin:end]
            parts.append(Bags(keys[begin:end], lengths=np.diff(offsets[first : last + 1]), weights=of_part))
    else:
        of_parts = [None] * num_parts if weights is None else np.split(weights, num_parts)
        parts = [Bags(k, weights=w) for k, w in zip(np.split(keys, num_parts), of_parts, strict=True)]
    limit = None if spec.max_keys is None else -(-spec.max_keys // shards.num_shards)
    if not is_ragged:
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
        size = max(1, 1 << (longest - 1).bit_length() if longest else 1)
    return parts, num_samples, size


def _picked(
    keys: np.ndarray,
    offsets: np.ndarray,
    weights: np.ndarray | None,
    inverse: np.ndarray,
    num_bags: int,
    *,
    is_ragged: bool,
) -> Bags:
    """Picks the bags that some samples share, in order, and adds empty ones until there are `num_bags`."""
    used, local = np.unique(inverse, return_inverse=True)
    more = num_bags - used.size
    if is_ragged:
        lengths = offsets[used + 1] - offsets[used]
        # Positions of the bags' keys, one bag after the other.
        place = np.repeat(offsets[used] - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())
        lengths = np.concatenate([lengths, np.zeros(more, lengths.dtype)])
        of_keys = None if weights is None else weights[place]
        return Bags(keys[place], lengths=lengths, weights=of_keys, inverse=local)
    padded = np.concatenate([keys[used], np.full((more, *keys.shape[1:]), PADDING_KEY, np.uint64)])
    if weights is not None:
        weights = np.concatenate([weights[used], np.zeros((more, *keys.shape[1:]), weights.dtype)])
    return Bags(padded, weights=weights, inverse=local)


def _split_rest(value: Any, num_samples: int, numbers: Sequence[int], shards: Shards) -> Any:
    """Splits an entry with a line for each sample as the samples are; returns anything else as it is."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return value
    if not hasattr(value, "shape") or value.shape[:1] != (num_samples,):
        return value
    value = np.asarray(value)
    if value.dtype.kind not in "fiub" and value.dtype != jnp.bfloat16:
        return value
    value = value.astype(jax.dtypes.canonicalize_dtype(value.dtype))
    return shards.put(dict(zip(numbers, np.split(value, len(numbers)), strict=True)))


def _pack_on_device(
    raw: Mapping[str, Any],
    stores: Sequence[StoreSpec],
    features: Sequence[FeatureSpec],
    tag: str,
    shards: Shards,
) -> Batch:
    """Packs features that are on the devices already where they are, split by their samples."""
    arrays: dict[str, Any] = {}
    specs = []
    for spec in features:
        what = f'batch: feature "{spec.name}"'
        bags = features_lib.bags_of(raw[spec.name])
        if bags.inverse is not None:
            raise ValueError(
                f"{what}: inverse: got one beside device arrays, wanted NumPy for all features: nobody can tell, when "
                "traced, which bags are of which shard."
            )
        if bags.lengths is not None or bags.offsets is not None:
            raise ValueError(
                f"{what}: got ragged keys beside device arrays, wanted NumPy for all features, or rectangles: nobody "
                "can tell, when traced, which keys are of which shard."
            )
        pair = {"keys": bags.keys} if bags.weights is None else {"keys": bags.keys, "weights": bags.weights}
        for name, array in pair.items():
            pair[name] = _placed(what, name, array, spec, shards)
        arrays[spec.name] = pair
        limit = None if spec.max_keys is None else -(-spec.max_keys // shards.num_shards)
        specs.append(dataclasses.replace(spec, max_keys=limit))

    def pack_part(parts: dict[str, dict[str, Any]]) -> Any:
        bags = {name: Bags(pair["keys"], weights=pair.get("weights")) for name, pair in parts.items()}
        return jax.tree.map(jnp.asarray, features_lib.pack_stores(bags, stores, specs))

    run = jax.jit(lambda parts: shards.run(pack_part, (parts,), (shards.spec,), shards.spec))
    return Batch(Features(run(arrays), tag, shards.num_shards), features_lib.rest_of(raw, features))


def _placed(what: str, name: str, array: Any, spec: FeatureSpec, shards: Shards) -> Any:
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
        return jax.device_put(array, shards.split)
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
