"""Lookups for the host without XLA (kernels/reader.py), against dicts; memory, threads and misuse."""

import concurrent.futures
import gc

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from jaxsok import Records
from jaxsok.kernels.reader import Asked, Reader
from jaxsok.serving.frozen import SEED, FrozenTable, SizedRecords, freeze_records, stores_of
from jaxsok.types import COUNTS, PADDING_KEY

FORMS = [("float32", 4), ("float32", 5), ("bfloat16", 4), ("int8", 128), ("float32", 4)]
FOUND, MISSING, PADDING = (COUNTS.index(name) for name in ("num_found", "num_missing", "num_padding"))


class World:
    """Tables of several stores with whole numbers, which all dtypes hold; key k of table t has row `row(t, k)`."""

    def __init__(self, num_rows=500):
        self.num_rows = num_rows
        given = []
        for t, (dtype, dim) in enumerate(FORMS):
            keys = np.arange(num_rows, dtype=np.uint64) * 3
            rows = np.stack([self.row(t, int(key)) for key in keys])
            table = FrozenTable(f"t{t}", dim=dim, dtype=dtype, default=-1.0 - t)
            given.append((table, SizedRecords(num_rows, [Records(keys, rows)])))
        tables, _ = freeze_records(given)
        words, seed = jax.device_put((tables.spec.words, SEED))
        self.stores = stores_of(tables, words, seed)
        self.spec, self.reader = tables.spec, Reader(jax.devices()[0])
        self.order = sorted(range(len(FORMS)), key=lambda t: self.spec.places[f"t{t}"])

    def row(self, t, key):
        row = np.arange(FORMS[t][1]) % 7 * (key % 11 + 1) + t
        return (row * (127 / row.max() if FORMS[t][0] == "int8" else 1)).round().astype(np.float32)

    def begin(self, keys, **options):
        """Begins a lookup of keys by number of table."""
        asked = [t for t in self.order if t in keys]
        dims, num_tables = [store[0].dim for store in self.spec.stores], list(map(len, self.spec.stores))
        tables = Asked([self.spec.places[f"t{t}"] for t in asked], dims, num_tables)
        return self.reader.begin(self.stores, tables, [keys[t] for t in asked], **options)

    def check(self, keys, result):
        rows, counts = result
        asked = [t for t in self.order if t in keys]
        lines = []
        for t, found in zip(asked, rows, strict=True):
            wanted, mine = np.zeros((len(keys[t]), FORMS[t][1]), np.float32), [0] * len(COUNTS)
            for i, key in enumerate(keys[t].tolist()):
                is_there = key % 3 == 0 and key < 3 * self.num_rows
                kind = PADDING if key == PADDING_KEY else FOUND if is_there else MISSING
                mine[kind] += 1
                if kind != PADDING:
                    wanted[i] = self.row(t, key) if is_there else -1.0 - t
            np.testing.assert_allclose(found, wanted, rtol=2**-6 if FORMS[t][0] == "int8" else 0)
            lines.append(mine)
        assert counts.tolist() == lines


@pytest.fixture(scope="module")
def world():
    return World()


some_keys = st.lists(st.one_of(st.integers(0, 1600), st.sampled_from([PADDING_KEY, 2**63, 2**64 - 2])), max_size=40)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    keys=st.dictionaries(st.integers(0, len(FORMS) - 1), some_keys, min_size=1),
    waits=st.booleans(),
    times=st.integers(1, 3),
)
def test_any_keys(world, keys, waits, times):
    """Rows and counts are those of a dict, for any keys of any of the tables, also for several lookups under way."""
    keys = {t: np.array(mine, np.uint64) for t, mine in keys.items()}
    for begun in [world.begin(keys, waits=waits) for _ in range(times)]:
        world.check(keys, begun.result())


@pytest.mark.parametrize("num_keys", [1, 4095, 4096, 20_000])
def test_many_keys(world, num_keys):
    """A large lookup, for which the host starts threads, has the same rows."""
    keys = {t: np.random.default_rng(t).integers(0, 1600, num_keys).astype(np.uint64) for t in (0, 1, 3)}
    world.check(keys, world.begin(keys, waits=True).result())


def test_memory_is_used_again(world):
    """An answer keeps its memory, and gives it back once no array of it is left; also one that nobody waited for."""
    keys = {0: np.arange(100, dtype=np.uint64)}

    def place(result):
        return result[0][0].__array_interface__["data"][0]

    first = world.begin(keys, waits=True).result()
    others = [world.begin(keys, waits=True).result() for _ in range(5)]
    assert len({place(first), *map(place, others)}) == 6
    world.check(keys, first)
    freed, row = place(others[0]), others[0][0][0][2:3]
    del others[0]
    gc.collect()
    assert place(world.begin(keys, waits=True).result()) != freed, "a part of the answer is still there"
    np.testing.assert_array_equal(row[0], np.full(4, -1.0))
    kept = {place(other) for other in others}
    del others, row
    world.begin(keys)
    gc.collect()
    assert place(world.begin(keys, waits=True).result()) in kept | {freed}
    world.check(keys, first)


def test_keys_may_change_after_the_beginning(world):
    keys = np.arange(50, dtype=np.uint64)
    begun, asked = world.begin({1: keys}), keys.copy()
    keys[:] = PADDING_KEY
    world.check({1: asked}, begun.result())


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(data=st.data(), num_parts=st.integers(1, 4))
def test_lines_of_several_answers(world, data, num_parts):
    """Arrays that are joined from pieces have each line where its place says."""
    shapes = data.draw(st.lists(st.tuples(st.integers(0, 30), st.sampled_from([1, 3, 16])), min_size=1, max_size=4))
    rng = np.random.default_rng(0)
    wanted = [rng.random(shape, np.float32) for shape in shapes]
    pieces = []
    for number, whole in enumerate(wanted):
        owners = rng.integers(0, num_parts, len(whole))
        for part in range(num_parts):
            places = np.flatnonzero(owners == part)
            pieces.append((number, places, whole[places]))
    for found, whole in zip(world.reader.join(shapes, pieces), wanted, strict=True):
        np.testing.assert_array_equal(found, whole)


def test_threads(world):
    """Threads that look up at the same time get their own rows."""

    def run(number):
        rng = np.random.default_rng(number)
        for _ in range(50):
            keys = {
                int(t): rng.integers(0, 1600, rng.integers(0, 300)).astype(np.uint64) for t in rng.permutation(5)[:3]
            }
            world.check(keys, world.begin(keys, waits=bool(rng.integers(2))).result())

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        list(pool.map(run, range(6)))


def test_no_tables_are_refused(world):
    with pytest.raises(RuntimeError, match=r"got 0 of 0 tables, wanted fewer than 2\^31 of one table or more"):
        world.begin({})


def test_answers_outlive_their_reader():
    world = World(20)
    keys = {0: np.arange(30, dtype=np.uint64), 3: np.arange(30, dtype=np.uint64)}
    result, check = world.begin(keys, waits=True).result(), world.check
    world.reader = None
    gc.collect()
    check(keys, result)
