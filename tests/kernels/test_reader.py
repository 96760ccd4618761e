"""Lookups for the host without XLA (kernels/reader.py), against dicts: on one device and in parts; memory, threads."""

import concurrent.futures
import gc
import resource
import signal

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from jaxsok import Records
from jaxsok.kernels.reader import Asked, Reader, Stores
from jaxsok.serving.frozen import SEED, FrozenSpec, FrozenTable, SizedRecords, freeze_records
from jaxsok.types import COUNTS, PADDING_KEY

FORMS = [("float32", 4), ("float32", 5), ("bfloat16", 4), ("int8", 128), ("float32", 4)]
FOUND, MISSING, PADDING = (COUNTS.index(name) for name in ("num_found", "num_missing", "num_padding"))
MASK = 2**64 - 1


def owner_of(key, num_parts):
    """Returns the part that owns a key: the top 12 bits of SplitMix64's finalizer, applied twice."""

    def mix(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
        return x ^ (x >> 31)

    return (mix((mix(key) + 0x9E3779B97F4A7C15) & MASK) >> 52) % num_parts


class World:
    """Tables of several stores with whole numbers, which all dtypes hold; key k of table t has row `row(t, k)`.

    Of several parts each has the rows of the keys that it owns.
    """

    def __init__(self, num_parts, num_rows=500):
        self.num_rows, device = num_rows, jax.devices()[0]
        keys = np.arange(num_rows, dtype=np.uint64) * 3
        owners = np.array([owner_of(int(key), num_parts) for key in keys])
        parts = []
        for part in range(num_parts):
            given = []
            for t, (dtype, dim) in enumerate(FORMS):
                mine = keys[owners == part]
                rows = np.array([self.row(t, int(key)) for key in mine], np.float32).reshape(-1, dim)
                table = FrozenTable(f"t{t}", dim=dim, dtype=dtype, default=-1.0 - t)
                given.append((table, SizedRecords(len(mine), [Records(mine, rows)])))
            tables, _ = freeze_records(given)
            words, seed = jax.device_put((tables.spec.words, SEED), device)
            parts.append((tables.stores, words, seed))
        self.stores, self.reader = Stores(parts), Reader([device] * num_parts)
        self.spec = FrozenSpec.of([table for table, _ in given])
        self.order = sorted(range(len(FORMS)), key=lambda t: self.spec.places[f"t{t}"])

    def row(self, t, key):
        row = np.arange(FORMS[t][1]) % 7 * (key % 11 + 1) + t
        return (row * (127 / row.max() if FORMS[t][0] == "int8" else 1)).round().astype(np.float32)

    def lookup(self, keys):
        """Looks up keys by number of table."""
        asked = [t for t in self.order if t in keys]
        dims, num_tables = [store[0].dim for store in self.spec.stores], list(map(len, self.spec.stores))
        tables = Asked([self.spec.places[f"t{t}"] for t in asked], dims, num_tables)
        return self.reader.lookup(self.stores, tables, [keys[t] for t in asked])

    def check(self, keys, result):
        rows, counts = result
        lines = []
        for t, found in zip([t for t in self.order if t in keys], rows, strict=True):
            wanted, mine = np.zeros((keys[t].size, FORMS[t][1]), np.float32), [0] * len(COUNTS)
            for i, key in enumerate(keys[t].reshape(-1).tolist()):
                is_there = key % 3 == 0 and key < 3 * self.num_rows
                kind = PADDING if key == PADDING_KEY else FOUND if is_there else MISSING
                mine[kind] += 1
                if kind != PADDING:
                    wanted[i] = self.row(t, key) if is_there else -1.0 - t
            rtol = 2**-6 if FORMS[t][0] == "int8" else 0
            np.testing.assert_allclose(found, wanted.reshape(*keys[t].shape, FORMS[t][1]), rtol=rtol)
            lines.append(mine)
        assert counts.tolist() == lines


@pytest.fixture(scope="module")
def worlds():
    return {num_parts: World(num_parts) for num_parts in (1, 2, 3)}


some_keys = st.lists(st.one_of(st.integers(0, 1600), st.sampled_from([PADDING_KEY, 2**63, 2**64 - 2])), max_size=40)
some_requests = st.dictionaries(st.integers(0, len(FORMS) - 1), some_keys, min_size=1)


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(keys=some_requests, num_parts=st.sampled_from([1, 2, 3]), is_square=st.booleans())
def test_any_keys(worlds, keys, num_parts, is_square):
    """Rows and counts are those of a dict, for any keys of any of the tables, on one device and in parts."""
    arrays = {t: np.array(mine, np.uint64) for t, mine in keys.items()}
    if is_square:
        arrays = {t: mine[: len(mine) // 2 * 2].reshape(2, -1) for t, mine in arrays.items()}
    worlds[num_parts].check(arrays, worlds[num_parts].lookup(arrays))


@pytest.mark.parametrize("num_parts", [1, 2, 3])
@pytest.mark.parametrize("num_keys", [1, 4095, 4096, 20_000])
def test_many_keys(worlds, num_parts, num_keys):
    """A large lookup, for which the host starts threads, has the same rows."""
    keys = {t: np.random.default_rng(t).integers(0, 1600, num_keys).astype(np.uint64) for t in (0, 1, 3)}
    worlds[num_parts].check(keys, worlds[num_parts].lookup(keys))


@pytest.mark.parametrize("num_parts", [1, 2])
def test_memory_is_used_again(worlds, num_parts):
    """An answer keeps its memory, and gives it back once no array of it is left."""
    world, keys = worlds[num_parts], {0: np.arange(100, dtype=np.uint64)}

    def place(result):
        return result[0][0].__array_interface__["data"][0]

    first = world.lookup(keys)
    others = [world.lookup(keys) for _ in range(5)]
    assert len({place(first), *map(place, others)}) == 6
    freed, row = place(others[0]), others[0][0][0][2:3]
    del others[0]
    gc.collect()
    again = [world.lookup(keys) for _ in range(10)]
    assert freed not in set(map(place, again)), "a part of the answer is still there"
    np.testing.assert_array_equal(row[0], np.full(4, -1.0))
    kept = {freed, *map(place, [*others, *again])}
    del others, row, again
    gc.collect()
    assert place(world.lookup(keys)) in kept
    world.check(keys, first)
    with pytest.raises(ValueError, match="read-only"):
        first[0][0][0] = 0


class Ended(Exception):
    pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it may come where memory is given back
def test_what_a_signal_interrupts_gives_its_memory_back(worlds):
    """A lookup that Ctrl-C or a timer ends keeps no memory."""
    world, keys = worlds[1], {3: np.arange(20_000, dtype=np.uint64)}  # 10 MB of rows
    is_under_way, num_ended = [False], 0

    def end(*_):
        if is_under_way[0]:
            is_under_way[0] = False
            raise Ended

    def most_kib():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    for _ in range(5):
        world.lookup(keys)
    before, former = most_kib(), signal.signal(signal.SIGALRM, end)
    try:
        for number in range(200):
            try:
                is_under_way[0] = True
                signal.setitimer(signal.ITIMER_REAL, 1e-4 + number % 20 * 2e-4)
                world.lookup(keys)
                is_under_way[0] = False
            except Ended:
                num_ended += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    assert num_ended > 0
    assert most_kib() - before < 400 << 10, "200 answers have 2 GB"


@pytest.mark.parametrize("num_parts", [1, 3])
def test_threads(worlds, num_parts):
    """Threads that look up at the same time get their own rows."""
    world = worlds[num_parts]

    def run(number):
        rng = np.random.default_rng(number)
        for _ in range(40):
            keys = {
                int(t): rng.integers(0, 1600, rng.integers(0, 300)).astype(np.uint64) for t in rng.permutation(5)[:3]
            }
            world.check(keys, world.lookup(keys))

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        list(pool.map(run, range(6)))


@pytest.mark.parametrize("num_parts", [1, 2])
def test_no_tables_are_refused(worlds, num_parts):
    with pytest.raises(RuntimeError, match=r"got 0 of 0 tables, wanted fewer than 2\^31 of one table or more"):
        worlds[num_parts].lookup({})


def test_answers_outlive_their_reader():
    world = World(1, 20)
    keys = {0: np.arange(30, dtype=np.uint64), 3: np.arange(30, dtype=np.uint64)}
    result, check = world.lookup(keys), world.check
    world.reader = world.stores = None
    gc.collect()
    check(keys, result)
