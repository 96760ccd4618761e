"""Caches of tables in host memory: their counters, and estimates for caches of other sizes.

The expected values come from caches in plain Python and from the counters of the real cache.
"""

import collections
import functools

import jax
import numpy as np
import programs
import pytest

import jaxsok
from jaxsok import Bags, CacheStats, FeatureSpec, HostMemory, TableSpec, cache_estimate

ADAM = jaxsok.optim.adam(0.1)
RECORD_BYTES = 80  # 6 float32, Adam's two states of 6 and one of each, padded to whole units of 16 bytes


def tables_of(device_rows, names=("item",), **options):
    memory = None if device_rows is None else HostMemory(device_rows)
    return [TableSpec(name, 6, ADAM, capacity=1024, memory=memory, **options) for name in names]


def features_of(names=("item",)):
    return [FeatureSpec(name, table=name) for name in names]


def estimate_of(batches, device_rows=None, **options):
    """Returns the estimate of a table for such batches of keys."""
    raw = [{"item": np.asarray(keys)} for keys in batches]
    (estimate,) = cache_estimate(tables_of(device_rows), features_of(), raw, **options)
    return estimate


def zipf_batches(num_batches, batch_size, num_keys, seed=0):
    draw = np.random.default_rng(seed)
    return [draw.zipf(1.2, batch_size) % num_keys for _ in range(num_batches)]


BATCHES = zipf_batches(20, 32, 200)


# In plain Python -----------------------------------------------------------------------------------------------------


def lru_hits(batches, num_slots):
    """Returns the repeated keys that an ordinary LRU cache has, for batches of one distinct key each."""
    cache, hits = collections.OrderedDict(), 0
    for (key,) in batches:
        hits += key in cache
        cache[key] = None
        cache.move_to_end(key)
        if len(cache) > num_slots:
            cache.popitem(last=False)
    return hits


def draw_hits(batches, num_slots, draw):
    """Returns these hits for any batches: all rows of a batch are equally old, and which of them leave is drawn."""
    last, hits = {}, 0  # by row in the cache: its last batch
    for number, batch in enumerate(batches):
        keys = sorted(set(batch))
        hits += sum(key in last for key in keys)
        missing = [key for key in keys if key not in last]
        last |= {key: number for key in keys if key in last}
        draw.shuffle(missing)
        for key in missing:
            if len(last) >= num_slots:
                others = [row for row, used in last.items() if used < number]
                if not others:
                    break
                oldest = min(last[row] for row in others)
                del last[draw.choice([row for row in others if last[row] == oldest])]
            last[key] = number
    return hits


def bin_of(age, per_octave):
    """Returns the bin of an age: there are as many in each octave."""
    width = 1
    while age // width >= 2 * per_octave:
        width *= 2
    return per_octave * (width.bit_length() - 1) + age // width


def placed_hits(batches, num_slots, calls_per_batch=1):
    """Returns these hits as tier.h defines lookups, and updates that follow: the row whose mean use is the oldest
    leaves, before it rows with a single known use, and of equally old ones the first slot's.

    Also returns the rows read, except first uses.
    """
    slots, last, mean = [None] * num_slots, [0] * num_slots, [0] * num_slots  # a mean is negative: of a single use
    left, hits, read, now = {}, 0, 0, 1  # `left`: the means of rows that left

    def age(slot):
        if slots[slot] is None:
            return 1024
        return max(1, bin_of(now - mean[slot], 32)) if mean[slot] > 0 else 864 + bin_of(now + mean[slot], 8)

    def mean_after(old):
        return -old if old < 0 else now - (now - old) // 2

    for batch in batches:
        keys = list(dict.fromkeys(batch))
        for _ in range(calls_per_batch):
            now += 1
            used = [slot for slot, key in enumerate(slots) if key in keys]
            hits += len(used)
            for slot in used:
                if now - last[slot] >= 5:
                    last[slot], mean[slot] = now, mean_after(mean[slot])
            missing = [key for key in keys if key not in slots]
            read += sum(key in left for key in missing)
            others = sorted(set(range(num_slots)) - set(used), key=lambda slot: (-age(slot), slot))[: len(missing)]
            for key, slot in zip(missing, sorted(others), strict=False):
                left[slots[slot]] = mean[slot]
                slots[slot], last[slot] = key, now
                mean[slot] = mean_after(left[key]) if key in left else -now
    return hits, read


def test_one_key_a_batch_is_an_ordinary_cache():
    """The estimate is exact at every size."""
    keys = np.random.default_rng(0).zipf(1.3, 300) % 40
    estimate = estimate_of(keys[:, None])
    wanted = [lru_hits(keys[:, None].tolist(), rows) if rows else 0 for rows in range(estimate.num_keys + 1)]
    np.testing.assert_allclose(estimate.num_hits, wanted, atol=1e-9)
    assert estimate.num_keys == len(set(keys.tolist())) and estimate.num_repeated == 300 - estimate.num_keys


def test_equally_old_rows_leave_by_chance():
    """The estimate equals the mean of many random runs, within four standard errors, for caches that hold any batch."""
    batches = [batch.tolist() for batch in zipf_batches(12, 10, 30)]
    estimate, draw = estimate_of(batches), np.random.default_rng(1)
    for rows in (estimate.largest_batch, 12, 15, 20, 25):
        drawn = [draw_hits(batches, rows, draw) for _ in range(400)]
        error = np.std(drawn) / np.sqrt(len(drawn))
        assert abs(np.mean(drawn) - estimate.num_hits[rows]) <= 4 * error + 1e-6, rows


def test_whole_batches_leave_together():
    """With three disjoint batches in turn, a cache of two has no hits on the third, and a cache of three has all."""
    estimate = estimate_of([np.arange(8) + 8 * (number % 3) for number in range(9)])
    assert (estimate.num_keys, estimate.num_repeated, estimate.largest_batch) == (24, 48, 8)
    assert estimate.num_hits[[0, 16, 20, 24]].tolist() == [0, 0, 24, 48]
    assert estimate.hit_rate(16) == 0 and estimate.hit_rate(24) == estimate.hit_rate(10**9) == 1
    assert estimate.rows_read(20) == 24 / 9 and estimate.rows_read(24) == 0
    assert [estimate.smallest_cache(rate) for rate in (0, 0.01, 0.5, 1)] == [0, 17, 20, 24]
    assert estimate.least_hit_rates[24] == 48 / 72


def test_the_curve_rises_to_all_repeats():
    estimate = estimate_of(zipf_batches(50, 200, 3000))
    assert (np.diff(estimate.num_hits) >= 0).all() and estimate.num_hits[0] == 0
    assert estimate.num_hits[-1] == pytest.approx(estimate.num_repeated, abs=1e-6)
    for rate in (0.3, 0.9, 1.0):
        rows = estimate.smallest_cache(rate)
        assert estimate.hit_rate(rows) >= rate - 1e-8 and estimate.hit_rate(rows - 1) < rate


def test_tables_of_a_store_share_a_cache():
    """Equal keys of two tables are two rows; padding is no row; bags and features of one table count together."""
    names = ("user", "item")
    features = [FeatureSpec("user", "user"), FeatureSpec("clicked", "item"), FeatureSpec("history", "item")]
    history = Bags(np.array([3, 2, 2]), lengths=np.array([1, 2]))
    sample = [{"user": np.array([1, -1]), "clicked": np.array([1, 2]), "history": history}] * 2
    (estimate,) = cache_estimate(tables_of(4, names), features, sample)
    assert estimate.tables == names and estimate.device_rows == 4
    assert (estimate.num_keys, estimate.largest_batch, estimate.num_repeated) == (4, 4, 4)
    apart = [*tables_of(0.5, ("user",)), *tables_of(None, ("item",))]
    assert [
        (estimate.tables, estimate.num_keys, estimate.device_rows)
        for estimate in cache_estimate(apart, features, sample)
    ] == [
        (("user",), 1, 512),
        (("item",), 3, None),
    ]


def test_tables_of_partial_bags_have_caches_of_their_own():
    """The estimates are those of the collection's stores."""
    memory = jaxsok.HostMemory(device_rows=8)
    tables = [jaxsok.TableSpec(n, 4, jaxsok.optim.sgd(0.1), capacity=64, memory=memory) for n in ("user", "item")]
    features = [
        jaxsok.FeatureSpec("user", "user"),
        jaxsok.FeatureSpec("item", "item", combiner="sum", exchange="bags", max_keys=64),
    ]
    raw = {"user": np.arange(8), "item": jaxsok.Bags(np.arange(100, 108), lengths=np.ones(8, np.int32))}
    estimates = jaxsok.cache_estimate(tables, features, [raw] * 3, num_shards=2)
    assert [estimate.tables for estimate in estimates] == [
        tuple(table.name for table in store.tables) for store in programs.over(2, tables, features).stores
    ]


def test_rows_of_all_tables_compete():
    """Two tables of a store count like one table of other keys, also on four shards, whose caches count together."""
    names = ("user", "item")
    sample = [{name: keys for name, keys in zip(names, np.split(batch, 2), strict=True)} for batch in BATCHES]
    (estimate,) = cache_estimate(tables_of(41, names), features_of(names), sample, num_shards=4)
    alone = estimate_of([np.concatenate([raw["user"], raw["item"] + 1000]) for raw in sample])
    np.testing.assert_array_equal(estimate.num_hits, alone.num_hits)
    assert estimate.device_rows == 44  # 11 for each shard


def test_without_repeats_nothing_is_known():
    for batches in ([], [[1, 2]], [[-1]]):
        estimate = estimate_of(batches)
        assert np.isnan(estimate.hit_rates).all() and (estimate.least_hit_rates == 0).all()
        assert estimate.rows_read(3) == 0 and estimate.smallest_cache(0.9) == 0
        assert f"{len(batches)} batches" in str(estimate)


def test_what_is_printed():
    text = str(estimate_of([np.arange(8) + 8 * (number % 3) for number in range(9)], device_rows=20))
    title, _, *rows = text.splitlines()
    assert title == "item: 9 batches of at most 8 distinct keys, 24 in all"
    assert [row.split() for row in rows if "declared" in row] == [["20", "83.3%", "0.500", "0.333", "2.7", "declared"]]
    assert rows[-1].split() == ["24", "100.0%", "1.000", "0.667", "0.0"]


def test_wrong_samples_name_the_batch():
    with pytest.raises(ValueError, match=r"got 0 of 1 features, wanted also \['item'\]"):
        cache_estimate(tables_of(4), features_of(), [{"user": np.arange(3)}])
    with pytest.raises((TypeError, ValueError), match=r'cache_estimate: batches\[1\]: feature "item"'):
        estimate_of([np.arange(3), np.ones(3)])


# The real cache ------------------------------------------------------------------------------------------------------


@functools.cache
def collection_of(device_rows, num_shards=None):
    if num_shards is None:
        return jaxsok.Collection(tables_of(device_rows), features_of())
    return programs.over(num_shards, tables_of(device_rows), features_of())


def train(collection, batches, updates=True):
    """Returns readings of the cache before and after each batch."""
    state = collection.init(seed=0, salt=1)
    readings = [collection.cache_stats(state)]
    for keys in batches:
        features = programs.batch(collection, item=np.asarray(keys))
        if updates:
            state, _, stats = programs.donated_step(collection)(state, features)
            stats.check()
        else:
            _, state, _ = programs.lookup(collection)(state, features)
        readings.append(collection.cache_stats(state))
    return state, [reading for (reading,) in readings]


@pytest.mark.parametrize(("device_rows", "updates"), [(16, True), (40, False), (100, True), (1000, False)])
def test_counters_are_those_of_a_cache(device_rows, updates):
    """Counters are exact, and updates find the lookup's rows. The estimate is near, though other rows leave."""
    batches = [batch.tolist() for batch in zipf_batches(40, 16, 300)]
    _, readings = train(collection_of(device_rows), batches, updates)
    hits, read = placed_hits(batches, device_rows, 1 + updates)
    distinct = sum(len(set(batch)) for batch in batches)
    counts = readings[-1]
    assert (counts.num_hits, counts.num_read) == (hits, read)
    estimate, hits = estimate_of(batches, device_rows), hits - updates * distinct
    assert estimate.num_repeated == hits + read
    assert estimate.num_hits[min(device_rows, estimate.num_keys)] == pytest.approx(
        hits, abs=0.1 * estimate.num_repeated
    )
    assert counts.num_written == distinct - hits - counts.num_cached


def test_rows_of_one_use_leave_first():
    """Rows that are used again and again stay, however many rows pass once; in an LRU cache they would leave."""
    often, batches = np.arange(8), []
    for number in range(30):
        batches.append(often if number % 6 == 0 else 8 + 16 * number + np.arange(16))
    _, readings = train(collection_of(40), batches)
    # Before their second use is known, they leave once, like all others.
    assert readings[7].num_read == readings[-1].num_read == 8
    assert lru_hits([(key,) for batch in batches for key in batch.tolist()], 40) == 0


def test_readings_and_their_differences():
    collection = collection_of(40)
    batches = zipf_batches(10, 16, 300, seed=3)
    state, readings = train(collection, batches)
    assert [reading.num_slots for reading in readings] == [40] * 11
    cached = [int((np.asarray(state.stores[0].tier[0].owners)[:, 3] != 2**32 - 1).sum())]
    assert readings[0].num_cached == 0 and cached == [readings[-1].num_cached]
    assert readings[-1].num_rows == collection.num_rows(state)["item"] == len(set(np.concatenate(batches).tolist()))
    assert readings[-1].record_bytes == RECORD_BYTES
    first, second = readings[5] - readings[0], readings[10] - readings[5]
    for name in ("num_hits", "num_read", "num_written", "bytes_read", "bytes_written"):
        assert getattr(first, name) + getattr(second, name) == getattr(readings[10], name) > 0, name
    assert second.bytes_read == RECORD_BYTES * second.num_read
    assert second.bytes_written == RECORD_BYTES * second.num_written
    assert second.hit_rate == second.num_hits / (second.num_hits + second.num_read)
    assert (second.num_cached, second.num_rows) == (readings[10].num_cached, readings[10].num_rows)
    assert np.isnan((readings[3] - readings[3]).hit_rate)
    assert f"{second.num_read:,} rows read" in str(second) and "in a cache of 40;" in str(second)


def test_counters_wrap_around():
    """Counters wrap by shard, since each shard counts modulo 2**32."""
    earlier = CacheStats(("item",), 9, 8, 7, 100, ((5, 2**32 - 10, 2**32 - 1, 3), (5, 100, 0, 0)))
    later = CacheStats(("item",), 9, 8, 7, 100, ((6, 20, 4, 5), (6, 103, 1, 0)))
    between = later - earlier
    assert (between.num_hits, between.num_read, between.num_written) == (33, 6, 2)
    assert between.words == ((1, 30, 5, 2), (1, 3, 1, 0))
    with pytest.raises(ValueError, match=r"tables \['item'\] and \['user'\]"):
        later - CacheStats(("user",), 9, 8, 7, 100, earlier.words)


@pytest.mark.parametrize("num_shards", [1, 4])
def test_shards_are_counted_together(num_shards):
    """With room for all rows, the shards' counts equal those of one device."""
    if len(jax.devices()) < num_shards:
        pytest.skip(f"needs {num_shards} devices")
    batches = zipf_batches(6, 16, 60)
    _, (*_, alone) = train(collection_of(1024), batches)
    _, (*_, together) = train(collection_of(1024, num_shards), batches)
    assert len(together.words) == num_shards
    for name in ("num_rows", "num_cached", "num_slots", "num_hits", "num_read", "num_written"):
        assert getattr(together, name) == getattr(alone, name), name


def test_readings_with_lookups_in_flight():
    """Readings between steps that look a batch ahead count each batch's rows in its own step, found or read."""
    collection, counts = collection_of(40), []
    state = collection.init(seed=0, salt=1)
    for batch, plan in collection.pipeline(({"item": keys} for keys in BATCHES), lookahead=1):
        state, _, _ = programs.donated_step(collection)(collection.grow(state, batch), plan)
        (reading,) = collection.cache_stats(state)
        counts.append((reading.num_hits + reading.num_read, reading.num_read > 0))
    _, readings = train(collection, BATCHES)
    assert [count for count, _ in counts] == [reading.num_hits + reading.num_read for reading in readings[1:]]
    assert counts[-1][1] and readings[-1].num_read > 0


def test_a_cache_of_nothing():
    """The lookup and the update read all rows, except new rows."""
    _, readings = train(collection_of(0), [[1, 2, 3], [1, 2, 3]])
    assert (readings[-1].num_slots, readings[-1].num_cached, readings[-1].num_hits) == (0, 0, 0)
    assert (readings[-1] - readings[-2]).num_read == 6


def test_tables_on_the_device_have_no_cache():
    collection = collection_of(None)
    assert collection.cache_stats(collection.init()) == ()
    with pytest.raises(ValueError, match=r"cache_stats: state"):
        collection.cache_stats(collection_of(40).init())
    with pytest.raises(TypeError, match=r"cache_stats: state: got one that is traced"):
        jax.eval_shape(collection.cache_stats, collection.init())
