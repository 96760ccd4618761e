"""Stats for logs: flat scalars, sums over the last steps without a wait, both kinds of writers."""

import collections
import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from hypothesis import given, strategies as st

import jaxsok
from jaxsok.stats import move_to_one_device, pack_words
from jaxsok.stats_window import StatsWindow, write_scalars

SGD = jaxsok.optim.sgd(1.0)
pytestmark = pytest.mark.filterwarnings("ignore:StatsWindow")  # most steps here refuse keys
ASKED = ("num_found", "num_inserted", "num_missing", "num_refused")
SUMMED = (*ASKED, "num_padding", "num_nonfinite")


@functools.cache
def three_tables(num_shards=1):
    """Declares two stores; the tables of one store are not adjacent."""
    tables = [
        jaxsok.TableSpec("user", 4, SGD, capacity=16, max_capacity=16),
        jaxsok.TableSpec("tag", 8, SGD, capacity=64, placement=jaxsok.REPLICATED),
        jaxsok.TableSpec("item", 4, SGD, capacity=16, max_capacity=16),
    ]
    features = [jaxsok.FeatureSpec(table.name, table.name) for table in tables]
    return programs.over(num_shards, tables, features) if num_shards > 1 else jaxsok.Collection(tables, features)


def steps_of(collection, num_steps, seed=0):
    """Yields states and Stats of random steps, waiting for each."""
    state, draw = collection.init(seed=0), np.random.default_rng(seed)
    for _ in range(num_steps):
        keys = {name: draw.integers(-1, 24, 16) for name in ("user", "tag", "item")}
        state, stats = programs.learn(collection, state, programs.batch(collection, **keys))
        yield state, jax.block_until_ready(stats)


def expected_scalars(stats, state, counts, prefix="jaxsok", num_shards=1):
    """Computes scalars from separately added counts by table, and from the state's arrays for the stores."""
    stores = {"user": 0, "item": 0, "tag": 1}
    expected = {}
    for table, by_name in counts.items():
        store = state.stores[stores[table]]
        num_copies = num_shards if stores[table] == 1 else 1
        rows = sum(counts[other]["num_rows"] for other in counts if stores[other] == stores[table])
        asked = sum(by_name[name] for name in ASKED)
        expected |= {f"{prefix}/{table}/{name}": value for name, value in by_name.items()}
        for name in ("longest_probe", "num_unplaced", "num_rounds"):
            expected[f"{prefix}/{table}/{name}"] = np.asarray(getattr(stats, name))[stores[table]]
        if asked:
            expected[f"{prefix}/{table}/hit_rate"] = by_name["num_found"] / asked
        expected[f"{prefix}/{table}/fill"] = rows / (sum(slab.shape[0] for slab in store.rows) / num_copies)
        expected[f"{prefix}/{table}/load"] = rows / (4 * store.index.shape[0] / num_copies)
    return expected


@pytest.mark.parametrize("num_shards", [1, 4])
def test_scalars_are_the_counts_and_what_follows_from_them(num_shards):
    """Rates, fill and load by table are floats, on one device and on a mesh."""
    collection = three_tables(num_shards)
    for state, stats in steps_of(collection, 3):
        scalars = stats.scalars("train")
        expected = expected_scalars(stats, state, stats.to_dict(), "train", num_shards)
        assert (scalars.pop("train/num_stale"), scalars.pop("train/num_misused_plans")) == (0.0, 0.0)
        assert scalars == pytest.approx(expected, rel=1e-12)
        assert all(type(value) is float for value in scalars.values())
    assert num_shards > 1 or scalars["train/user/num_refused"] > 0
    assert 0 < scalars["train/user/hit_rate"] < 1


@pytest.mark.filterwarnings("error:StatsWindow")
def test_a_window_tells_of_refused_keys():
    """It warns once for each table, when the counts have arrived, and not about keys that an admission excludes."""
    tables = [
        jaxsok.TableSpec("full", 4, SGD, capacity=8, max_capacity=8),
        jaxsok.TableSpec("kept_out", 8, SGD, capacity=64, admission=jaxsok.policies.AdmitByCount(9)),
    ]
    collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec(table.name, table.name) for table in tables])
    state, window, warned = collection.init(seed=0), StatsWindow(3), []
    for step in range(6):
        keys = np.arange(4) + 4 * step
        state, stats = programs.learn(collection, state, programs.batch(collection, full=keys, kept_out=keys))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            window.push(jax.block_until_ready(stats))
        warned += [(step, str(warning.message), warning.filename) for warning in caught]
    ((step, message, filename),) = warned
    assert step == 2 and filename == __file__ and 'got 4 keys of table "full" refused' in message


def test_nothing_asked_has_no_hit_rate():
    """For a batch of padding the rate is absent, not a misleading number."""
    collection = three_tables()
    padding = dict.fromkeys(("user", "tag", "item"), np.array([-1, -1]))
    _, stats = programs.learn(collection, collection.init(), programs.batch(collection, **padding))
    assert stats.scalars()["jaxsok/user/num_padding"] == 2
    assert not [name for name in stats.scalars() if "hit_rate" in name]


def test_one_array_brings_all_counts():
    """A step therefore has one additional result, and there is one transfer from the device."""
    for num_shards in (1, 4):
        _, stats = next(steps_of(three_tables(num_shards), 1))
        (words,) = jax.tree.leaves(stats)
        assert words.dtype == np.int32 and words.shape == (3 * 9 + 2 + 2 + 2 + 2 * num_shards,)
        assert len(move_to_one_device(stats).words.devices()) == 1
        fetched = jax.device_get(stats)
        for name in ("num_found", "num_evicted", "longest_probe", "num_stale"):
            assert isinstance(fetched.count(name), np.ndarray | np.generic)
            np.testing.assert_array_equal(fetched.count(name), getattr(stats, name))


def test_counts_of_a_scan_have_its_axis():
    """Each name of Stats stacked by a scan gives counts step by step."""
    singles = [stats for _, stats in steps_of(three_tables(), 3)]
    stacked = jax.tree.map(lambda *words: jnp.stack(words), *singles)
    for name in ("num_inserted", "num_rows", "num_evicted", "longest_probe", "num_stale"):
        np.testing.assert_array_equal(getattr(stacked, name), [np.asarray(getattr(stats, name)) for stats in singles])


def test_counts_are_reported_by_name():
    """A reader gets every count, and the tables."""
    text = repr(make_stats([(i, 10 + i) for i in range(6)], (7, 2**32 - 1), stale=5))
    for part in ("num_found=[ 0 10]", "num_nonfinite=[ 5 15]", f"num_evicted=[         7 {2**32 - 1}]", "num_stale=5"):
        assert part in text, text
    assert text.startswith("Stats(") and text.endswith("tables=('user', 'item'))")


def test_traced_counts_are_refused():
    """Scalars are available only on the host."""
    _, stats = next(steps_of(three_tables(), 1))
    with pytest.raises(TypeError, match="traced"):
        jax.jit(lambda stats: stats.scalars() and stats)(stats)


def make_stats(counts, evicted, *, stale=0, num_rows=(0, 0), rounds=0):
    """Returns Stats of two tables of one store."""
    *by_table, nonfinite = np.int32(counts)
    single = np.int32([1])
    words = pack_words(
        counts=np.stack([*by_table, np.int32([0, 0])], axis=1),  # no key is unadmitted
        num_nonfinite=nonfinite,
        num_rows=np.int32(num_rows),
        num_evicted=np.uint32(evicted).view(np.int32),
        num_unplaced=single,
        num_rounds=np.int32([rounds]),
        num_stale=np.int32([stale]),
        num_misused_plans=np.int32([0]),
        longest_probe=single,
    )
    return jaxsok.Stats(words, tables=("user", "item"), capacities=(64, 64), stores=(0, 0), entries=(128, 128))


COUNTS_OF_STEPS = st.lists(
    st.tuples(
        st.lists(st.tuples(*[st.integers(0, 2**31 - 1)] * 2), min_size=6, max_size=6),
        st.tuples(*[st.integers(0, 1000)] * 2),
        st.integers(0, 100),
    ),
    min_size=1,
    max_size=8,
)


@given(COUNTS_OF_STEPS, st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_sums_over_the_window_are_exact(steps, num_steps, evicted_before):
    """Sums of Python integers agree; evictions to date wrap at 2**32, and sums exceed 2**31."""
    window, evicted = StatsWindow(num_steps), [evicted_before] * 2
    deltas = []
    for i, (counts, more, stale) in enumerate(steps):
        evicted = [(before + delta) % 2**32 for before, delta in zip(evicted, more, strict=True)]
        deltas.append(more if i else (0, 0))  # the evictions before the first push are unknown
        window.push(make_stats(counts, evicted, stale=stale, num_rows=(i, 2 * i), rounds=i))
        window.wait()
        last = steps[max(0, i + 1 - num_steps) : i + 1]
        assert window.num_pushed == i + 1
        sums = window.sums()
        for t, table in enumerate(("user", "item")):
            for n, name in enumerate(SUMMED):
                assert sums[table][name] == sum(counts[n][t] for counts, _, _ in last)
            assert sums[table]["num_evicted"] == sum(more[t] for more in deltas[-len(last) :])
            assert sums[table]["num_rows"] == (1 + t) * i
        scalars = window.scalars()
        assert scalars["jaxsok/num_steps"] == len(last)
        assert scalars["jaxsok/num_stale"] == sum(stale for _, _, stale in last)
        assert scalars["jaxsok/item/num_rounds"] == i
        assert scalars["jaxsok/item/load"] == 3 * i / 128
        asked = sum(sums["user"][name] for name in ASKED)
        assert scalars.get("jaxsok/user/hit_rate", 0) == (sums["user"]["num_found"] / asked if asked else 0)


def test_a_state_made_anew_evicted_nothing_negative():
    """Counts to date that decrease start again."""
    window = StatsWindow(4)
    for evicted in ((5, 7), (9, 7), (2, 0), (3, 4)):
        window.push(make_stats([(0, 0)] * 6, evicted))
    window.wait()
    assert [counts["num_evicted"] for counts in window.sums().values()] == [4 + 2 + 1, 0 + 0 + 4]


@pytest.mark.parametrize("num_shards", [1, 4])
def test_a_window_over_real_steps(num_shards):
    """The sums are those of the steps' own counts, and the scalars follow from them."""
    collection, window = three_tables(num_shards), StatsWindow(3)
    kept = collections.deque(maxlen=3)
    for state, stats in steps_of(collection, 5, seed=1):
        window.push(stats)
        window.wait()
        kept.append(stats.to_dict())
        expected = {
            table: {name: sum(stats[table][name] for stats in kept) for name in kept[0][table]} for table in kept[0]
        }
        for table in expected:
            expected[table]["num_rows"] = kept[-1][table]["num_rows"]
        assert window.sums() == expected
        scalars = window.scalars()
        assert (scalars.pop("jaxsok/num_steps"), scalars.pop("jaxsok/num_stale")) == (len(kept), 0)
        assert scalars.pop("jaxsok/num_misused_plans") == 0
        assert scalars == pytest.approx(expected_scalars(stats, state, expected, num_shards=num_shards), rel=1e-12)


class Words:
    """Counts in transfer: reading them before they have arrived fails."""

    def __init__(self, words):
        self.words, self.has_arrived, self.num_copies = np.asarray(words), False, 0

    def copy_to_host_async(self):
        self.num_copies += 1

    def is_deleted(self):
        return False

    def is_ready(self):
        return self.has_arrived

    def block_until_ready(self):
        self.has_arrived = True
        return self

    def __array__(self, dtype=None, copy=None):
        assert self.has_arrived and self.num_copies == 1, "read before it arrived, or never sent for"
        return self.words


def num_arrived(window):
    """Returns how many steps are in the sums."""
    return window.scalars()["jaxsok/num_steps"]


def test_push_does_not_wait(monkeypatch):
    """Counts that have not arrived are requested and skipped; later counts wait for them, so a window has no gap."""
    sent = []

    def words_to_come(stats):
        sent.append(Words(stats.words))
        return dataclasses.replace(stats, words=sent[-1])

    monkeypatch.setattr(jaxsok.stats_window, "move_to_one_device", words_to_come)
    window = StatsWindow(2)
    for i in range(6):
        window.push(make_stats([(i, 10 * i)] * 6, (3 * i, 0), num_rows=(i, i)))
    assert window.num_pushed == 6 and window.sums() == window.scalars() == {}
    sent[0].has_arrived = sent[2].has_arrived = True
    assert num_arrived(window) == 1 and window.sums()["item"]["num_found"] == 0
    sent[1].has_arrived = True
    assert num_arrived(window) == 2 and window.sums()["item"]["num_found"] == 10 + 20
    assert window.sums()["user"]["num_evicted"] == 3 + 3 and window.sums()["user"]["num_rows"] == 2
    window.wait()
    assert num_arrived(window) == 2 and window.sums()["item"]["num_found"] == 40 + 50
    assert window.sums()["user"]["num_evicted"] == 3 + 3


def test_a_window_keeps_no_more_than_it_needs():
    """It keeps one step in addition to the window, however many were pushed."""
    window, stats = StatsWindow(3), make_stats([(1, 1)] * 6, (0, 0))
    for _ in range(50):
        window.push(stats)
        window.wait()
    window.push(stats)
    assert len(window._steps) <= 3 + 2


def test_a_window_starts_empty():
    """There is nothing to sum or log."""
    window = StatsWindow()
    assert (window.sums(), window.scalars()) == ({}, {})


def test_what_a_window_refuses():
    """The window is unchanged after a refusal."""
    for num_steps in (0, -1, 1.5, True, None):
        with pytest.raises(ValueError, match="num_steps"):
            StatsWindow(num_steps)
    window, stats = StatsWindow(3), make_stats([(1, 1)] * 6, (0, 0))
    window.push(stats)
    with pytest.raises(TypeError, match="dict"):
        window.push(stats.to_dict())
    with pytest.raises(ValueError, match="user"):
        window.push(dataclasses.replace(stats, tables=("user", "tag")))
    with pytest.raises(ValueError, match="2 steps stacked"):
        window.push(dataclasses.replace(stats, words=jnp.stack([stats.words] * 2)))
    window.wait()
    assert window.num_pushed == num_arrived(window) == 1


class Clu:
    """A writer like clu.metric_writers.MetricWriter."""

    def __init__(self):
        self.seen = []

    def write_scalars(self, step, scalars):
        self.seen.append((step, dict(scalars)))


class TensorBoard:
    """A writer like tensorboardX.SummaryWriter."""

    def __init__(self):
        self.seen = []

    def add_scalar(self, tag, scalar_value, global_step=None):
        self.seen.append((tag, scalar_value, global_step))


def test_writers_of_either_kind():
    """They get all scalars of a step or of a window, under their names."""
    stats, window = make_stats([(1, 2)] * 6, (0, 0)), StatsWindow(2)
    window.push(stats)
    window.wait()
    for source in (stats, window, {"loss": 0.5}):
        expected = source if isinstance(source, dict) else source.scalars("train")
        clu, board = Clu(), TensorBoard()
        write_scalars(clu, 7, source, prefix="train")
        write_scalars(board, 7, source, prefix="train")
        assert clu.seen == [(7, expected)]
        assert board.seen == [(name, value, 7) for name, value in expected.items()]
    assert "train/item/num_found" in window.scalars("train")
    with pytest.raises(TypeError, match="add_scalar"):
        write_scalars(object(), 7, stats)


def test_a_window_of_stats_that_were_donated():
    """An error states it; jaxlib itself ends the process if a deleted array's readiness is queried."""
    window, stats = StatsWindow(1), make_stats([(1, 1)] * 6, (0, 0))
    window.push(stats)
    stats.words.delete()
    with pytest.raises(ValueError, match="StatsWindow: stats: got counts that were donated"):
        window.scalars()
