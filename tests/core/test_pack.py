"""Packing by threads: the batch of NumPy and of plain lists; its refusals; reused memory."""

import ctypes
import dataclasses
import functools
import gc
import itertools
import math
import os
import tempfile
import threading
import time
import tracemalloc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from hypothesis import given, strategies as st

import jaxsok
from jaxsok import host_buffers, pack as pack_lib
from jaxsok.host_buffers import HostBuffers
from jaxsok.kernels import pack as kernel

PADDING = jaxsok.PADDING_KEY
WIDTH, MAX_KEYS, MAX_HOTNESS = 3, 64, 4

KINDS = {
    "single": {},
    "single_weighted": {"weighted": True},
    "rectangle": {"combiner": "mean"},
    "rectangle_weighted": {"weighted": True},
    "rectangle_rows": {"combiner": None},
    "ragged": {},
    "ragged_weighted": {"weighted": True, "max_keys": MAX_KEYS},
    "ragged_bounded": {"max_keys": MAX_KEYS, "combiner": "mean"},
    "jagged": {"combiner": None, "max_keys": MAX_KEYS},
    "square": {"combiner": None, "max_hotness": MAX_HOTNESS},
    "square_bounded": {"combiner": None, "max_hotness": MAX_HOTNESS, "max_keys": MAX_KEYS},
}


@functools.cache
def declare(kinds, num_shards):
    """Declares features of these kinds, over two tables that share a store and one that does not."""
    sgd = jaxsok.optim.sgd(1.0)
    tables = [jaxsok.TableSpec("a", 4, sgd), jaxsok.TableSpec("b", 4, sgd), jaxsok.TableSpec("c", 8, sgd)]
    features = [jaxsok.FeatureSpec(f"{i} {kind}", "abc"[i % 3], **KINDS[kind]) for i, kind in enumerate(kinds)]
    if num_shards is None:
        return jaxsok.Collection(tables, features)
    return programs.over(num_shards, tables, features)


# --------------------------------------------------------------------------------------------------------------
# Random batches: as arrays with unusual layouts, and as the equivalent lists


def laid_out(draw, values, dtype):
    """Draws an array of these values with a layout: strided, reversed, a column of records, unaligned, read-only."""
    array = np.asarray(values, dtype)
    how = draw(st.sampled_from(["plain", "strided", "backwards", "fortran", "record", "read-only", "big-endian"]))
    if how == "strided":
        wide = np.zeros((*array.shape, 2), dtype)
        wide[..., 0] = array
        return wide[..., 0]
    if how == "backwards":
        return array[::-1].copy()[::-1]
    if how == "fortran":
        return np.asfortranarray(array)
    if how == "record":  # at an odd address
        records = np.zeros(array.shape, [("label", "i1"), ("value", dtype)])
        records["value"] = array
        return records["value"]
    if how == "big-endian":
        return array.astype(np.dtype(dtype).newbyteorder(">"))
    array.setflags(write=how == "plain")
    return array


def draw_keys(draw, shape, dtype, *, with_padding=True):
    info = np.iinfo(dtype)
    corners = sorted({0, 1, 7, info.max, info.max - 1, info.min, 5})
    if info.min < 0 and with_padding:
        corners.append(-1)
    flat = draw(st.lists(st.sampled_from(corners), min_size=math.prod(shape), max_size=math.prod(shape)))
    return np.array(flat, dtype).reshape(shape)


DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


@st.composite
def features(draw, kind, num_bags, dtypes=DTYPES):
    """Draws one feature: the user's input, and its bags as lists of (key, weight)."""
    dtype = draw(st.sampled_from(dtypes))
    is_weighted, spec = "weighted" in kind, KINDS[kind]
    if kind.startswith(("single", "rectangle")):
        shape = (num_bags,) if kind.startswith("single") else (num_bags, WIDTH)
        keys = draw_keys(draw, shape, dtype)
        bags = keys.reshape(num_bags, -1).tolist()
        weights = np.round(draw(st.floats(-4, 4)) + np.arange(keys.size).reshape(shape) / 8, 3)
        layout = {}
    else:
        most = min(spec.get("max_hotness", 9), 9)
        lengths = draw(st.lists(st.integers(0, most), min_size=num_bags, max_size=num_bags))
        while sum(lengths) > MAX_KEYS // 4:  # for any one of four shards
            lengths = [length // 2 for length in lengths]
        keys = draw_keys(draw, (sum(lengths),), dtype)
        ends = np.cumsum([0, *lengths])
        bags = [keys[begin:end].tolist() for begin, end in itertools.pairwise(ends)]
        weights = np.arange(keys.size) / 4 - 1
        number = draw(st.sampled_from(["int32", "int64", "uint8", "uint64"]))
        if draw(st.booleans()):
            layout = {"lengths": laid_out(draw, lengths, number)}
        else:
            layout = {"offsets": laid_out(draw, ends, number)}
        behind = draw(st.integers(0, 3)) if np.iinfo(dtype).min < 0 else 0
        keys = np.concatenate([keys, np.full(behind, -1, dtype)]) if behind else keys
        weights = np.concatenate([weights, np.full(behind, 9.0)])
    real = iter(weights.reshape(-1).astype(np.float32).tolist())
    pairs = [[(key % 2**64, next(real)) for key in bag] for bag in bags]
    keys = laid_out(draw, keys, dtype)
    if is_weighted:
        layout["weights"] = laid_out(draw, weights, draw(st.sampled_from(["float16", "float32", "float64"])))
        exact = np.asarray(layout["weights"], np.float64).reshape(-1).astype(np.float32).tolist()
        real = iter(exact)
        pairs = [[(key, next(real)) for key, _ in bag] for bag in pairs]
    value = jaxsok.Bags(keys, **layout) if layout else keys
    return value, pairs


@st.composite
def batches(draw, num_bags=8, dtypes=DTYPES):
    """Draws kinds of features, a raw batch, and its bags as lists, by name."""
    kinds = tuple(draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=4)))
    drawn = [draw(features(kind, num_bags, dtypes)) for kind in kinds]
    names = [f"{i} {kind}" for i, kind in enumerate(kinds)]
    raw = {name: value for name, (value, _) in zip(names, drawn, strict=True)}
    bags = {name: pairs for name, (_, pairs) in zip(names, drawn, strict=True)}
    return kinds, {**raw, "label": np.arange(num_bags, dtype=np.float32)}, bags


def is_plain(value):
    """Returns whether the threads read a feature: NumPy reads numbers in another byte order."""
    bags = value if isinstance(value, jaxsok.Bags) else jaxsok.Bags(value)
    arrays = (bags.keys, bags.lengths, bags.offsets, bags.weights)
    return all(array is None or array.dtype.isnative for array in arrays)


def assert_same(got, want):
    """Requires trees to be equal: static parts, dtypes and bits."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        assert getattr(a, "sharding", None) == getattr(b, "sharding", None)
        assert getattr(a, "committed", None) == getattr(b, "committed", None)


def both(collection, raw, pad_to, is_narrow=None):
    """Returns the results of both packers for a raw batch: a batch or None, and a batch or an error."""
    packer, is_split = collection.packer, not collection.shards.sees_parts()
    packer.is_narrow, packer.num_threads = is_narrow, 3
    try:
        want = packer.pack_by_numpy(raw, pad_to, is_split)
    except (TypeError, ValueError) as error:
        want = error
    packed = packer.start_checked(raw, pad_to, is_split).wait()
    return packed and packer.finish(packer.send(packed)), want


# --------------------------------------------------------------------------------------------------------------
# Equal batches


@pytest.mark.parametrize("num_shards", [None, 1, 4])
@given(drawn=batches(), pad_to=st.sampled_from([None, 8, 12]), is_narrow=st.booleans())
def test_threads_pack_what_numpy_packs(num_shards, drawn, pad_to, is_narrow):
    """Batches are equal for every kind of feature, dtype and layout, padded or not, for one device and for shards."""
    kinds, raw, _ = drawn
    got, want = both(declare(kinds, num_shards), raw, pad_to, is_narrow)
    if all(is_plain(value) for name, value in raw.items() if name != "label"):
        assert got is not None and not isinstance(want, Exception)
        assert_same((got.features, got.mask, got.rest), (want.features, want.mask, want.rest))
    else:
        assert got is None


@pytest.mark.parametrize("num_shards", [None, 4])
@given(drawn=batches(dtypes=("int16", "int32", "uint32")), is_narrow=st.booleans(), pad_to=st.sampled_from([None, 12]))
def test_a_packed_batch_holds_what_lists_say(num_shards, drawn, is_narrow, pad_to):
    """Keys, offsets and weights of every part equal the drawn lists, without shared code."""
    kinds, raw, all_bags = drawn
    collection = declare(kinds, num_shards)
    collection.packer.is_narrow = is_narrow
    features = collection.batch(raw, pad_to=pad_to).features
    num_parts = num_shards or 1
    for spec in collection.features:
        bags = all_bags[spec.name] + [[]] * ((pad_to or 8) - 8)
        of_part = len(bags) // num_parts
        parts = [bags[i * of_part : (i + 1) * of_part] for i in range(num_parts)]
        kind = spec.name.split()[1]
        if kind.startswith(("single", "rectangle")):
            width = 1 if kind.startswith("single") else WIDTH
        elif kind.startswith("square"):
            width = MAX_HOTNESS
        else:
            width = None
            longest = max(sum(map(len, part)) for part in parts)
            size = MAX_KEYS // num_parts if spec.max_keys else max(1, 2 ** math.ceil(math.log2(longest or 1)))
        keys, weights, offsets = [], [], []
        for part in parts:
            flat = []
            for bag in part:
                flat += bag + ([(PADDING, 0.0)] * (width - len(bag)) if width else [])
            flat += [] if width else [(PADDING, 0.0)] * (size - len(flat))
            keys += [key for key, _ in flat]
            weights += [weight for _, weight in flat]
            offsets += np.cumsum([0, *map(len, part)]).tolist()
        assert programs.as_array(keys).tolist() == keys_of(features.keys(spec.name))
        if not width:
            assert np.asarray(features.offsets(spec.name)).tolist() == offsets
        if spec.weighted:
            assert weights_of(features, spec.name) == weights


@pytest.mark.parametrize("num_shards", [None, 4])
def test_keys_without_sign_behind_ragged_ones(num_shards):
    """All numbers of uint32 are keys; padding follows from the offsets of each feature and part."""
    collection = declare(("ragged_bounded", "rectangle", "ragged_bounded", "single"), num_shards)
    collection.packer.is_narrow = True
    top = np.array([2**32 - 1, 0, 2**31, 5, 2**32 - 1, 1, 2, 3], np.uint32)
    raw = {
        "0 ragged_bounded": BAGS(top[:6], lengths=[1, 2, 0, 3]),
        "1 rectangle": top.reshape(4, 2),
        "2 ragged_bounded": BAGS(top, offsets=[0, 0, 4, 8, 8]),
        "3 single": np.array([-1, 7, -2, 9], np.int16),
    }
    features = collection.batch(raw).features
    ends = {"0 ragged_bounded": [1, 2, 0, 3], "2 ragged_bounded": [0, 4, 4, 0]}
    for name, lengths in ends.items():
        lengths = lengths if num_shards else [sum(lengths)]
        keys, packed, size = iter(top.tolist()), [], MAX_KEYS // len(lengths)
        for length in lengths:
            packed += [next(keys) for _ in range(length)] + [PADDING] * (size - length)
        assert keys_of(features.keys(name)) == packed
    assert keys_of(features.keys("1 rectangle")) == top.tolist()
    assert keys_of(features.keys("3 single")) == [PADDING, 7, 2**64 - 2, 9]


def keys_of(words):
    words = np.asarray(words).astype(np.uint64)
    return (words[:, 0] | words[:, 1] << np.uint64(32)).tolist()


def weights_of(features, name):
    ((store, layout),) = ((s, y) for s in features.stores for y in s.layouts if y.name == name)
    parts = np.asarray(store.weights).reshape(features.num_parts, -1)
    return parts[:, layout.weights_start : layout.weights_start + layout.num_keys].reshape(-1).tolist()


# --------------------------------------------------------------------------------------------------------------
# Equal refusals

BAGS = jaxsok.Bags
KEYS = np.arange(8)
BAD = {
    "negative length": ("ragged", BAGS(KEYS, lengths=[3, -1, 6, 0])),
    "huge length": ("ragged", BAGS(KEYS, lengths=[2**63 - 1, 2, 2**63 - 1, 0])),
    "end behind the keys": ("ragged", BAGS(KEYS, lengths=[3, 3, 2, 1])),
    "keys behind the end": ("ragged", BAGS(KEYS, lengths=[3, 3, 1, 0])),
    "a key behind the end": ("ragged", BAGS(np.array([5, -1, -1, 7, -1, -1], np.int32), lengths=[1, 0, 0, 0])),
    "32 bits are no padding": ("ragged", BAGS(np.array([5, 2**32 - 1], np.uint32), lengths=[1, 0, 0, 0])),
    "falling offsets": ("ragged", BAGS(KEYS, offsets=[0, 5, 3, 8, 8])),
    "offsets begin at 1": ("ragged", BAGS(KEYS, offsets=[1, 2, 3, 4, 8])),
    "offsets end behind": ("ragged", BAGS(KEYS, offsets=[0, 2, 3, 4, 9])),
    "no offsets": ("ragged", BAGS(KEYS, offsets=np.zeros(0, int))),
    "float lengths": ("ragged", BAGS(KEYS, lengths=[2.0, 2.0, 2.0, 2.0])),
    "bool lengths": ("ragged", BAGS(KEYS[:2], lengths=[True, False, True, False])),
    "lengths of two axes": ("ragged", BAGS(KEYS, lengths=[[4], [4], [0], [0]])),
    "lengths and offsets": ("ragged", BAGS(KEYS, lengths=[4, 4, 0, 0], offsets=[0, 4, 8, 8, 8])),
    "lengths whose sum exceeds 64 bits": ("ragged", BAGS(KEYS, lengths=np.array([3, 2**64 - 1, 2, 4], np.uint64))),
    "huge lengths whose sum is that of the keys": ("ragged", BAGS(KEYS, lengths=[2**63 - 1, 2**63 - 1, 3, 7])),
    "huge offsets": ("ragged", BAGS(KEYS, offsets=np.array([0, 2**64 - 1, 2, 4, 8], np.uint64))),
    "too many keys": ("ragged_bounded", BAGS(np.arange(65), lengths=[60, 5, 0, 0])),
    "too many keys of a shard": ("ragged_bounded", BAGS(np.arange(17), lengths=[17, 0, 0, 0])),
    "a bag too long": ("square", BAGS(KEYS, lengths=[1, 2, 5, 0])),
    "NaN weights": ("ragged_weighted", BAGS(KEYS, lengths=[4, 4, 0, 0], weights=np.array([np.nan] + [1.0] * 7))),
    "infinite weights": ("single_weighted", BAGS(KEYS[:4], weights=np.array([1, 2, 3, -np.inf], np.float32))),
    "weights beyond float32": ("single_weighted", BAGS(KEYS[:4], weights=np.array([1.0, 2.0, -1e39, 4.0]))),
    "integer weights": ("single_weighted", BAGS(KEYS[:4], weights=KEYS[:4])),
    "weights of another shape": ("single_weighted", BAGS(KEYS[:4], weights=np.ones(5, np.float32))),
    "no weights": ("single_weighted", KEYS[:4]),
    "weights not declared": ("single", BAGS(KEYS[:4], weights=np.ones(4, np.float32))),
    "float keys": ("single", np.ones(4)),
    "bool keys": ("single", np.ones(4, bool)),
    "lists of different lengths": ("single", [[1], [2, 3], [4], [5]]),
    "three axes": ("single", np.ones((4, 1, 1), np.int64)),
    "no columns": ("rectangle", np.ones((4, 0), np.int64)),
    "rectangle with lengths": ("ragged", BAGS(KEYS.reshape(4, 2), lengths=[2, 2, 2, 2])),
    "a number of samples that does not divide": ("single", np.arange(6)),
    "no samples": ("single", np.zeros(0, np.int64)),
    "bad shared bags": ("single", BAGS(KEYS[:2], inverse=[0, 1, 2, 0])),
}


@pytest.mark.parametrize("num_shards", [None, 4])
@pytest.mark.parametrize("name", BAD)
def test_refusals_are_those_of_numpy(name, num_shards):
    """Both refuse and accept the same input with the same messages; the other features are valid."""
    kind, value = BAD[name]
    collection = declare(("ragged_weighted", kind, "single"), num_shards)
    num_samples = 6 if "divide" in name else 0 if name == "no samples" else 4
    good = np.arange(num_samples)
    raw = {
        "0 ragged_weighted": BAGS(good, lengths=np.ones(num_samples, int), weights=np.ones(num_samples, np.float32)),
        f"1 {kind}": value,
        "2 single": good,
    }
    got, want = both(collection, raw, None)
    assert got is None or not isinstance(want, Exception)
    if isinstance(want, Exception):
        with pytest.raises(type(want)) as caught:
            collection.batch(raw)
        if "one number of samples" not in str(caught.value):  # checked before either packs
            assert str(caught.value) == str(want)
    elif got is not None:
        assert_same(got.features, want.features)


@pytest.mark.parametrize("pad_to", [None, 4])
def test_no_bags(pad_to):
    """An empty list has no dtype, and is read as integers."""
    collection = declare(("ragged",), None)
    got, want = both(collection, {"0 ragged": BAGS([], lengths=[])}, pad_to)
    of_arrays = both(collection, {"0 ragged": BAGS(KEYS[:0], lengths=KEYS[:0])}, pad_to)[1]
    assert_same(want.features, of_arrays.features)
    if got is not None:
        assert_same(got.features, want.features)


def test_the_first_bad_feature_is_named():
    """The first bad feature is named, whichever thread finds it and whatever is wrong with later features."""
    collection = declare(("ragged", "single_weighted"), None)
    raw = {
        "0 ragged": BAGS(KEYS, lengths=[3, 3, 1, 0]),
        "1 single_weighted": BAGS(KEYS[:4], weights=np.array([1, 2, 3, np.inf], np.float32)),
    }
    with pytest.raises(ValueError, match='"0 ragged": lengths: got an end at 7 of 8 keys'):
        collection.batch(raw)
    raw["0 ragged"] = BAGS(KEYS, lengths=[3, 3, 2, 0])
    with pytest.raises(ValueError, match='"1 single_weighted": weights: got infinite or NaN'):
        collection.batch(raw)


@pytest.mark.parametrize("bad", [None, 3, 70_000, 99_999])
def test_all_of_a_long_feature_is_checked(bad):
    """Each of many tasks checks its own weights, and one task checks the keys behind the last bag."""
    collection = declare(("single_weighted",), None)
    weights = np.ones(100_000, np.float32)
    if bad is not None:
        weights[bad] = np.nan
    bags = BAGS(np.arange(100_000), weights=weights)
    got, want = both(collection, {"0 single_weighted": bags}, None)
    assert (got is None) == isinstance(want, ValueError) == (bad is not None)
    collection = declare(("ragged",), None)
    keys = np.full(100_000, -1)
    if bad is not None:
        keys[bad] = 5
    got, want = both(collection, {"0 ragged": BAGS(keys, lengths=[2, 0])}, None)
    assert (got is None) == isinstance(want, ValueError) == (bad is not None)


# --------------------------------------------------------------------------------------------------------------
# Batches after the first: facts that do not depend on their data are kept


@st.composite
def sequences(draw):
    """Draws kinds of features, and a sequence of batches, each with `pad_to`; most occur several times."""
    kinds = tuple(draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3)))
    raws = []
    for _ in range(draw(st.integers(2, 3))):
        num_bags = draw(st.sampled_from([4, 8]))
        raw = {f"{i} {kind}": draw(features(kind, num_bags))[0] for i, kind in enumerate(kinds)}
        raws.append({**raw, "label": np.arange(num_bags)} if draw(st.booleans()) else raw)
    turns = st.tuples(st.sampled_from(raws), st.sampled_from([None, None, 8, 12]), st.sampled_from([1, 3]))
    return kinds, draw(st.lists(turns, min_size=3, max_size=6))


@pytest.mark.parametrize("num_shards", [None, 4])
@given(drawn=sequences(), is_narrow=st.booleans())
def test_batches_in_turn_are_those_of_numpy(num_shards, drawn, is_narrow):
    """Dtypes, strides, lengths and padding change from batch to batch, and repeat."""
    kinds, turns = drawn
    collection = declare(kinds, num_shards)
    packer, is_split = collection.packer, num_shards is not None
    packer.is_narrow = is_narrow
    for raw, pad_to, num_threads in turns:
        packer.num_threads = num_threads
        got, want = collection.batch(raw, pad_to=pad_to), packer.pack_by_numpy(raw, pad_to, is_split)
        assert_same((got.features, got.mask, got.rest), (want.features, want.mask, want.rest))


@pytest.mark.parametrize("num_shards", [None, 4])
def test_what_a_batch_holds_may_change_its_type(num_shards):
    """A list, a column of another library or an array of JAX may replace an array, and an array may follow."""
    collection = declare(("single", "ragged"), num_shards)
    rows = np.arange(32, dtype=np.int32).reshape(8, 4)
    lengths = np.array([3, 0, 1, 0, 2, 1, 0, 1])
    ragged = BAGS(np.arange(8) + 50, lengths=lengths)
    with tempfile.TemporaryFile() as file:
        mapped = np.memmap(file, np.int32, "w+", shape=(8, 4))
    mapped[:] = rows
    columns = [rows[:, 1], rows[:, 1].tolist(), rows[:, 1], mapped[:, 1], rows[:, 1].copy(), mapped[:, 1]]
    values = [ragged, dataclasses.replace(ragged, keys=ragged.keys.tolist()), ragged, ragged]
    values += [dataclasses.replace(ragged, lengths=tuple(lengths.tolist())), BAGS(np.arange(8) + 50, lengths=lengths)]
    try:
        import pyarrow as pa

        columns += [pa.array(rows[:, 1]), rows[:, 1]]
        values += [ragged, BAGS(pa.array(np.arange(8) + 50), lengths=lengths)]
    except ImportError:
        pass
    if num_shards is None:
        columns += [jnp.asarray(programs.words(rows[:, 1])), rows[:, 1]]
        values += [ragged, ragged]
    first = collection.batch({"0 single": columns[0], "1 ragged": values[0]}).features
    for column, value in zip(columns, values, strict=True):
        assert_same(collection.batch({"0 single": column, "1 ragged": value}).features, first)
    assert keys_of(first.keys("0 single")) == rows[:, 1].tolist()


def test_a_reader_fills_its_arrays_again():
    """Reused arrays may have other contents: other lengths, fewer or more keys, in place or not."""
    collection = declare(("ragged", "square", "single_weighted"), None)
    rng, keys, weights = np.random.default_rng(0), np.zeros(4, np.int64), np.zeros(4, np.float32)
    lengths, of_square = np.zeros(4, np.int64), np.zeros(4, np.int32)
    for _ in range(40):
        keys[:], weights[:] = rng.integers(0, 2**40, 4), rng.random(4)
        lengths[:], of_square[:] = rng.integers(0, rng.choice([1, 3, 40]), 4), rng.integers(0, MAX_HOTNESS + 1, 4)
        long, short = rng.integers(0, 2**60, lengths.sum()), rng.integers(0, 2**60, of_square.sum())
        raw = {
            "0 ragged": BAGS(long, lengths=lengths),
            "1 square": BAGS(short, lengths=of_square),
            "2 single_weighted": BAGS(keys, weights=weights),
        }
        got = collection.batch(raw).features
        want = [long[end - length : end].tolist() for end, length in zip(np.cumsum(lengths), lengths, strict=True)]
        offsets, packed = np.asarray(got.offsets("0 ragged")), keys_of(got.keys("0 ragged"))
        assert [packed[begin:end] for begin, end in itertools.pairwise(offsets)] == want
        assert set(packed[offsets[-1] :]) <= {PADDING}
        square = np.array(keys_of(got.keys("1 square")), np.uint64).reshape(4, MAX_HOTNESS)
        assert square[square != np.uint64(PADDING)].tolist() == short.tolist()
        assert (square != np.uint64(PADDING)).sum(axis=1).tolist() == of_square.tolist()
        assert keys_of(got.keys("2 single_weighted")) == keys.tolist()
        assert weights_of(got, "2 single_weighted") == weights.tolist()


GOOD = {
    "ragged": [BAGS(KEYS, lengths=np.array([3, 3, 2, 0])), BAGS(KEYS, offsets=np.array([0, 3, 4, 8, 8]))],
    "ragged_bounded": [BAGS(np.arange(64), lengths=np.array([16, 16, 16, 16]))],
    "square": [BAGS(KEYS, lengths=np.array([4, 2, 2, 0]))],
    "ragged_weighted": [BAGS(KEYS, lengths=np.array([4, 2, 2, 0]), weights=np.ones(8))],
    "single_weighted": [BAGS(KEYS[:4], weights=np.ones(4, np.float32))],
    "single": [KEYS[:4]],
    "rectangle": [KEYS.reshape(4, 2)],
}
"""Batches that are taken; those of `BAD` that differ in values alone follow the same recipe."""


@pytest.mark.parametrize("num_shards", [None, 4])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_batch_after_good_ones(name, num_shards):
    """It is refused with NumPy's message, or accepted as by NumPy; the good batches stay valid."""
    kind, value = BAD[name]
    collection = declare((kind, "single"), num_shards)
    packer = collection.packer
    if isinstance(value, BAGS):  # as arrays, like the good batches
        arrays = {part: getattr(value, part) for part in ("lengths", "offsets", "inverse")}
        arrays = {part: None if array is None else np.asarray(array) for part, array in arrays.items()}
        value = dataclasses.replace(value, **arrays)
    second = np.arange(6 if "divide" in name else 0 if name == "no samples" else 4)
    bad = {f"0 {kind}": value, "1 single": second}
    goods = [{f"0 {kind}": value, "1 single": KEYS[:4]} for value in GOOD[kind]]
    wants = [packer.pack_by_numpy(good, None, num_shards is not None) for good in goods]
    for _ in range(2):
        for good, want in zip(goods, wants, strict=True):
            assert_same(collection.batch(good).features, want.features)
        try:
            want = packer.pack_by_numpy(bad, None, num_shards is not None)
        except (TypeError, ValueError) as error:
            with pytest.raises(type(error)) as caught:
                collection.batch(bad)
            if "one number of samples" not in str(caught.value):  # checked before either packs
                assert str(caught.value) == str(error)
        else:
            assert_same(collection.batch(bad).features, want.features)


def test_lengths_are_no_offsets():
    """Lengths and offsets in arrays of one shape have different meanings."""
    collection = declare(("ragged",), None)
    for _ in range(2):
        got = collection.batch({"0 ragged": BAGS(KEYS, lengths=np.array([0, 0, 0, 8]))}).features
        assert np.asarray(got.offsets("0 ragged")).tolist() == [0, 0, 0, 0, 8]
        got = collection.batch({"0 ragged": BAGS(KEYS, offsets=np.array([0, 0, 0, 8]))}).features
        assert np.asarray(got.offsets("0 ragged")).tolist() == [0, 0, 0, 8]


def test_columns_beside_known_features_are_checked():
    """Other entries, names and `pad_to` are checked for each batch."""
    collection = declare(("single", "ragged"), None)
    good = {"0 single": KEYS[:4], "1 ragged": BAGS(KEYS, lengths=np.array([3, 3, 2, 0])), "label": np.ones(4)}
    for _ in range(2):
        assert collection.batch(good)["label"].shape == (4,)
        assert collection.batch(good, pad_to=6)["label"].shape == (6,)
        assert collection.batch(good, pad_to=1 << 3).mask.sum() == 4
        with pytest.raises(ValueError, match=r'entry "label": got shape \[5\] with features of 4 samples'):
            collection.batch({**good, "label": np.ones(5)})
        with pytest.raises(ValueError, match="got 1 of 2 features, wanted also"):
            collection.batch({name: value for name, value in good.items() if name != "1 ragged"})
        with pytest.raises(ValueError, match=r"got features of .* samples, wanted one number"):
            collection.batch({**good, "0 single": KEYS[:5]}, pad_to=6)
        with pytest.raises(ValueError, match="got 4 samples, wanted at most pad_to = 3"):
            collection.batch(good, pad_to=3)
        pad_to: Any
        for pad_to in (True, 0, 6.0, [6]):
            with pytest.raises((TypeError, ValueError), match="pad_to"):
                collection.batch(good, pad_to=pad_to)


def test_recipes_are_made_once_and_few_are_kept(monkeypatch):
    """Batches that differ only in their data share a recipe; recipes that are not kept are made again."""
    made = []
    make = pack_lib.Packer._make_recipe
    monkeypatch.setattr(pack_lib.Packer, "_make_recipe", lambda *args: made.append(1) or make(*args))
    monkeypatch.setattr(pack_lib, "_MOST_KEPT", 3)
    collection = jaxsok.Collection(
        [jaxsok.TableSpec("a", 4, jaxsok.optim.sgd(1.0))], [jaxsok.FeatureSpec("f", "a", combiner="sum")]
    )
    for size in (3, 9, 0, 40, 3):
        lengths = np.array([size, 1])
        got = collection.batch({"f": BAGS(np.arange(size + 1), lengths=lengths)}).features
        assert np.asarray(got.offsets("f")).tolist() == [0, size, size + 1]
    assert len(made) == 1
    for num_samples in (*range(1, 9), *range(1, 9)):
        got = collection.batch({"f": np.arange(num_samples)}).features
        assert keys_of(got.keys("f")) == list(range(num_samples))
    packer = collection.packer
    assert max(len(packer._recipes), len(packer._sized), len(packer._layouts)) <= 3


# --------------------------------------------------------------------------------------------------------------
# Sources that already have the layout


def flat(bags):
    return list(itertools.chain.from_iterable(bags))


def make_jagged(rng):
    """Returns one array of keys for both features, as in TorchRec, and the bags as lists."""
    lengths = rng.integers(0, 5, (2, 5000))
    keys = rng.integers(0, 2**40, lengths.sum())
    ends = np.cumsum([0, *lengths.reshape(-1)])
    bags = [keys[begin:end].tolist() for begin, end in itertools.pairwise(ends)]
    raw = jaxsok.from_kjt(keys, lengths.reshape(-1), ["0 ragged", "1 ragged"])
    return ("ragged", "ragged"), raw, [flat(bags[:5000]), flat(bags[5000:])]


def arrow(rng):
    """Returns columns of lists, slices of larger columns, one with 64-bit offsets."""
    pa = pytest.importorskip("pyarrow")
    lists = [rng.integers(0, 2**31, rng.integers(0, 5)).tolist() for _ in range(5010)]
    column, large = pa.array(lists, pa.list_(pa.int64()))[5:-5], pa.array(lists, pa.large_list(pa.int32()))[10:]
    return ("ragged", "ragged"), {"0 ragged": column, "1 ragged": large}, [flat(lists[5:-5]), flat(lists[10:])]


def records(rng):
    """Returns Criteo's binary records: a label, 13 numbers and 26 keys per row, int32."""
    with tempfile.TemporaryFile() as file:
        rows = np.memmap(file, np.int32, "w+", shape=(20_000, 40))
    rows[:] = rng.integers(0, 2**31 - 1, rows.shape)
    return (
        ("single", "rectangle"),
        {"0 single": rows[:, 14], "1 rectangle": rows[:, 15:40]},
        [
            rows[:, 14].tolist(),
            rows[:, 15:40].reshape(-1).tolist(),
        ],
    )


@pytest.mark.parametrize("make", [make_jagged, arrow, records], ids=lambda make: make.__name__)
def test_sources_are_read_in_place(make):
    """Their keys are packed without an intermediate copy, and the batch equals that of lists."""
    kinds, raw, keys = make(np.random.default_rng(0))
    collection = declare(kinds, None)
    collection.batch(raw)  # the first call includes JAX's own allocations
    tracemalloc.start()
    features = collection.batch(raw).features
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    for spec, want in zip(collection.features, keys, strict=True):
        got = keys_of(features.keys(spec.name))
        assert got[: len(want)] == want and set(got[len(want) :]) <= {PADDING}
    assert peak < 8 * len(keys[0])  # NumPy's memory is traced; lent memory is not


# --------------------------------------------------------------------------------------------------------------
# Batches that NumPy packs


def test_without_the_library_numpy_packs(monkeypatch):
    """A source tree that was never built can pack; functions that need kernels report it."""
    collection = declare(("ragged", "single"), None)
    raw = {"0 ragged": BAGS(KEYS, lengths=[3, 3, 2, 0]), "1 single": KEYS[:4]}
    want = collection.batch(raw)

    def load():
        raise ImportError("not built")

    monkeypatch.setattr(kernel.library, "load_cpu", load)
    kernel._functions.cache_clear()
    try:
        assert not kernel.is_available()
        assert collection.packer.start_checked(raw, None, False).wait() is None
        assert_same(collection.batch(raw).features, want.features)
    finally:
        monkeypatch.undo()
        kernel._functions.cache_clear()


def test_numpy_packs_what_is_on_the_device_or_shared():
    """NumPy packs arrays of JAX, and features whose samples share bags."""
    collection = declare(("single", "single"), None)
    for value in (jnp.asarray(programs.words(KEYS)), BAGS(np.arange(4), inverse=np.array([0, 1, 2, 3] * 2))):
        raw = {"0 single": KEYS, "1 single": value}
        got, want = both(collection, raw, None)
        assert got is None
        assert_same(collection.batch(raw).features, want.features)


def test_a_batch_of_constants_inside_a_program():
    """In a trace, a batch of NumPy arrays is a constant, so no memory is lent for it."""
    collection = declare(("single",), None)
    words = jax.jit(lambda: collection.batch({"0 single": KEYS}).features.keys("0 single"))()
    np.testing.assert_array_equal(words, programs.words(KEYS))


# --------------------------------------------------------------------------------------------------------------
# Reused memory


def test_memory_is_lent_until_nothing_refers_to_it():
    """Views keep it; memory that is returned is lent again."""
    buffers = HostBuffers()
    first = np.frombuffer(buffers.take(100_000), np.uint8)
    address = first.ctypes.data
    view = first[10:].view(np.uint16)[1::2]
    del first
    gc.collect()
    assert buffers.num_free == 0 and np.frombuffer(buffers.take(100_000), np.uint8).ctypes.data != address
    del view
    gc.collect()
    assert address in [
        np.frombuffer(lent, np.uint8).ctypes.data for lent in (buffers.take(70_000), buffers.take(1 << 17))
    ]


@pytest.mark.parametrize("how", ["dropped", "donated", "deleted"])
def test_memory_is_lent_while_a_program_reads_it(how):
    """Packing trusts only JAX's reference to the memory it reads, whatever happens to the array."""

    def work(x, a):
        a = jax.lax.fori_loop(0, 40, lambda _, a: a @ a * jnp.float32(1e-3), a)
        return x * (2 + a[0, 0] * 0)  # read at the end

    step = jax.jit(work, donate_argnums=0 if how == "donated" else ())
    a, buffers = jnp.ones((400, 400)), HostBuffers()
    for _ in range(3):  # the first iteration compiles
        keys = np.frombuffer(buffers.take(400_000), np.float32)
        keys[:] = 3
        address, x = keys.ctypes.data, jax.device_put(keys)
        result = step(x, a)
        if how == "deleted":
            x.delete()
        del keys, x
        others = [np.frombuffer(buffers.take(400_000), np.uint8) for _ in range(buffers.num_free)]
        if jax.default_backend() == "cpu":  # here x is a view; a GPU has a copy of memory that is not pinned
            assert address not in [other.ctypes.data for other in others] or result.is_ready()
        for other in others:
            other[:] = 255
        np.testing.assert_array_equal(result, 6)


def test_few_blocks_are_kept():
    """A burst of batches does not keep its memory permanently."""
    buffers = HostBuffers()
    lent = [buffers.take(1) for _ in range(20)]
    del lent
    gc.collect()
    assert 1 <= buffers.num_free <= 6


class Client:
    """A fake of JAX's client of a GPU that counts pinned blocks."""

    def __init__(self):
        self.num_pinned = 0

    def dma_map(self, address, size):
        self.num_pinned += 1

    def dma_unmap(self, address):
        self.num_pinned -= 1


def test_pinned_memory_is_waited_for(monkeypatch):
    """It is returned when another thread releases it, or by garbage collection, as JAX does after reading."""
    monkeypatch.setattr(host_buffers, "_PATIENCE_S", 30)
    client = Client()
    buffers = HostBuffers(client)
    lent = [buffers.take(1) for _ in range(6)]
    timer = threading.Timer(0.05, lent.pop)
    timer.start()
    lent.append(buffers.take(1))
    timer.join()
    assert client.num_pinned == 6

    def collect(phase, _):
        if len(lent) == 6:
            lent.pop()

    gc.callbacks.append(collect)
    try:
        begin = time.monotonic()
        taken = buffers.take(1)
    finally:
        gc.callbacks.remove(collect)
    assert time.monotonic() - begin < 10 and client.num_pinned == 6
    monkeypatch.setattr(host_buffers, "_PATIENCE_S", 0.05)
    for count in (7, 8, 9):  # all are permanently in use: each request pins one more
        lent.append(buffers.take(1))
        assert client.num_pinned == count
    lent.append(taken)
    del taken
    lent.clear()
    monkeypatch.setattr(host_buffers, "_PATIENCE_S", 30)
    begin = time.monotonic()
    lent.extend(buffers.take(1) for _ in range(9))  # returned blocks are lent again without waiting
    assert client.num_pinned == 9 and time.monotonic() - begin < 10


def test_calls_of_several_steps_have_memory_for_their_batches(monkeypatch):
    """Copies wait for whole calls; a pipeline that waited for memory in turn would hold up each call."""
    monkeypatch.setattr(host_buffers, "_PATIENCE_S", 30)
    client = Client()
    buffers = HostBuffers(client)
    begin = time.monotonic()
    lent = [buffers.take(1, batches_per_call=8) for _ in range(32)]
    assert client.num_pinned == len(lent) == 32 and time.monotonic() - begin < 10
    collection = declare(("single",), None)
    collection.pipeline([], steps_per_call=8)
    collection.pipeline([])
    assert collection.packer.batches_per_call == 8


@pytest.mark.parametrize("num_shards", [None, 4])
def test_batches_do_not_change_when_others_are_packed(num_shards):
    """Kept batches keep their contents, whatever is packed after them and however they are passed on."""
    collection = declare(("ragged", "single"), num_shards)

    def raw(i):
        return {"0 ragged": BAGS(np.arange(8) + 100 * i, lengths=[3, 3, 2, 0]), "1 single": np.arange(4) + 1000 * i}

    kept, sums = {}, {}
    add_up, give_back = jax.jit(lambda f: f.keys("1 single").sum()), jax.jit(lambda f: f, donate_argnums=0)
    for i in range(40):
        batch = collection.batch(raw(i))
        sums[i] = add_up(batch.features)
        if i % 3 == 0:
            kept[i] = jax.tree.map(lambda leaf: leaf + 0, batch.features) if i % 2 else batch.features
        if i % 7 == 0:  # donated, and returned unchanged
            kept[i] = give_back(collection.batch(raw(i)).features)
    for i, features in kept.items():
        assert sorted(keys_of(features.keys("0 ragged")))[:8] == (np.arange(8) + 100 * i).tolist()
        assert keys_of(features.keys("1 single")) == (np.arange(4) + 1000 * i).tolist()
    assert [int(total) for total in sums.values()] == [4000 * i + 6 for i in range(40)]


def test_a_stream_of_batches_allocates_once():
    """Dropped batches leave their memory to the next batches."""
    collection = declare(("single",), None)
    raw = {"0 single": np.arange(100_000)}
    seen = set()
    for _ in range(20):
        batch = collection.batch(raw)
        jax.block_until_ready(batch.features)
        seen.add(batch.features.stores[0].keys.unsafe_buffer_pointer() if jax.default_backend() == "cpu" else 0)
        del batch
        gc.collect(1)  # of what is new: older objects are many
    assert len(seen) <= 3


def test_many_python_threads_pack_at_once():
    """Calls share the library's threads, and each gets its own batch."""
    collection = declare(("ragged", "single"), None)
    collection.packer.num_threads = 4
    failures = []

    def work(number):
        rng = np.random.default_rng(number)
        for _ in range(10):
            keys = rng.integers(0, 2**40, 200_000)
            raw = {
                "0 ragged": BAGS(keys, lengths=np.full(50_000, 4)),
                "1 single": keys[:50_000],
            }
            features = collection.batch(raw).features
            packed = np.asarray(features.keys("0 ragged"))[:200_000].view(np.uint64)[:, 0]
            if not np.array_equal(packed, keys):
                failures.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
def test_a_forked_process_packs_with_threads_of_its_own():
    """The child has none of the parent's threads and does not wait for them."""
    collection = declare(("single",), None)
    collection.packer.num_threads = 4
    collection.batch({"0 single": np.arange(300_000)})  # the parent has threads now
    keys = np.arange(300_000)
    packed = np.empty(300_000, np.int64)
    of_keys = (keys.ctypes.data, 8, 8, kernel.TYPES[keys.dtype], 1, 300_000)
    item = (*of_keys, 0, 1, 0, 300_000, packed.ctypes.data, *[0] * 9)
    child = os.fork()
    if child == 0:
        is_right = kernel.KeysJob(np.array([item], kernel.KEYS), 4, ()).wait() and (packed == keys).all()
        os._exit(0 if is_right else 1)
    assert os.waitpid(child, 0)[1] == 0


# --------------------------------------------------------------------------------------------------------------
# Batches that are packed while their caller does other work


def test_ctrl_c_leaves_no_job_behind(monkeypatch):
    """Ctrl-C may come as soon as a job has begun: it has ended before its arrays are freed."""
    collection, seen, functions = declare(("single",), None), [], kernel._functions()

    def begin(*given):
        functions[2](*given)
        seen.append(bool(ctypes.c_void_p.from_address(given[-1])))  # it has begun
        raise KeyboardInterrupt

    def end(cell):
        seen.append(bool(ctypes.c_void_p.from_address(cell)))
        return functions[3](cell)

    monkeypatch.setattr(kernel, "_functions", lambda: (*functions[:2], begin, end))
    with pytest.raises(KeyboardInterrupt):
        collection.batch({"0 single": np.arange(300_000)})
    gc.collect()
    assert seen == [True, True]


@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize("num_shards", [None, 4])
def test_batches_are_completed_in_any_order(num_shards, num_threads):
    """Each holds its own keys, and raises its own error, however many are being packed."""
    collection = declare(("single_weighted", "ragged"), num_shards)
    packer = collection.packer
    packer.num_threads = num_threads

    def raw(i):
        keys = np.arange(80_000) + 10**6 * i
        weights = np.full(len(keys), np.nan if i == 3 else i, np.float32)
        return {"0 single_weighted": BAGS(keys, weights=weights), "1 ragged": BAGS(keys, lengths=np.ones(80_000, int))}

    want = collection.batch(raw(1))
    begun = [packer.begin(raw(i), None) for i in range(6)]  # nothing else refers to these arrays
    for i in (4, 0, 3, 5, 1, 2):
        if i == 3:
            with pytest.raises(ValueError, match='"0 single_weighted": weights: got infinite or NaN'):
                packer.complete(begun[i])
            continue
        got = packer.finish(packer.send(packer.complete(begun[i])))
        assert keys_of(got.features.keys("0 single_weighted")) == (np.arange(80_000) + 10**6 * i).tolist()
        assert set(weights_of(got.features, "0 single_weighted")) == {i}
        if i == 1:
            assert_same(got.features, want.features)


def test_a_batch_that_nobody_completes():
    """The arrays that threads read are kept until they have ended, and not longer."""
    collection = declare(("single",), None)
    packer = collection.packer
    packer.num_threads = 4
    collection.batch({"0 single": np.arange(400_000)})
    for i in range(20):
        keys = np.arange(400_000) + i
        is_alive = weakref.ref(keys)
        begun = packer.begin({"0 single": keys}, None)
        job = begun.job
        del begun, keys
        assert is_alive() is not None
        if i % 2:
            assert job.wait()
        del job
        assert is_alive() is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
def test_a_forked_process_does_not_wait_for_the_threads_of_its_parent():
    """A child refuses to end a job that its parent has begun; it may pack the batch itself."""
    collection = declare(("single",), None)
    collection.packer.num_threads = 4
    begun = collection.packer.begin({"0 single": np.arange(3_000_000)}, None)
    child = os.fork()
    if child == 0:
        os._exit(0 if begun.wait() is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert begun.wait() is not None


# --------------------------------------------------------------------------------------------------------------
# GPUs


@pytest.mark.gpu
@pytest.mark.parametrize("num_shards", [None, 2])
def test_memory_is_pinned_and_given_back(num_shards):
    """JAX copies from it without staging, and keeps it exactly until the copy has ended."""
    collection = declare(("single", "single"), num_shards)
    batches = []
    for i in range(24):
        keys = np.arange(400_000) + i
        batches.append(collection.batch({"0 single": keys, "1 single": keys * 2}).features)
    buffers = collection.packer.host_buffers()
    assert buffers.is_pinned
    for i, packed in enumerate(batches):
        keys = np.asarray(packed.keys("1 single")).copy().view(np.uint64)[:, 0]
        np.testing.assert_array_equal(keys, (np.arange(400_000) + i) * 2)
    del batches, packed
    for _ in range(3):
        jax.block_until_ready(collection.batch({"0 single": KEYS, "1 single": KEYS}).features)
        gc.collect()
    assert 1 <= buffers.num_free <= 12  # six of each size


@pytest.mark.gpu
def test_32_bits_travel():
    """Half the bytes are transferred; the batch still has words."""
    collection = declare(("single", "ragged"), None)
    raw = {"0 single": np.array([-2, -1, 5, 2**31 - 1], np.int32), "1 ragged": BAGS(KEYS, lengths=[3, 3, 2, 0])}
    raw["1 ragged"] = dataclasses.replace(raw["1 ragged"], keys=KEYS.astype(np.uint32))
    packer = collection.packer
    packing = packer.send(packer.complete(packer.begin(raw, None)))
    assert [store.keys.ndim for store in packing.batch.features.stores if store.layouts] == [1]
    got = packer.finish(packing).features
    assert keys_of(got.keys("0 single")) == [2**64 - 2, PADDING, 5, 2**31 - 1]
    assert keys_of(got.keys("1 ragged")) == KEYS.tolist()
