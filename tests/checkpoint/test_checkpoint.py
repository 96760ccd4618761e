"""Checkpoints: a saved state is restored onto any mesh; damaged or unfitting files are refused."""

import collections
import dataclasses
import json
import logging
import os
import pathlib
import re
import resource
import shutil
import subprocess
import sys
import threading
import warnings
import zlib

import checkpoint_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import programs
import pyarrow as pa
import pytest
from checkpoint_cases import assert_same, collection_of, content, tables_of, train, train_step, waiting
from waiting import free_port, wait_for_end

import jaxsok
from jaxsok import checkpoint, optim, policies
from jaxsok.checkpoint import TablesRestore, TablesSave, files, manifest, save, snapshot
from jaxsok.types import COUNTERS, NUM_PARTITIONS

WORKER = pathlib.Path(cases.__file__)
TABLES = [table.name for table in tables_of()]
pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="eight devices are made of a CPU")


@pytest.fixture(scope="module")
def eight():
    """Returns a collection over eight devices and its trained state, which must not be donated."""
    collection = collection_of(tables_of(), 8)
    return collection, train(collection, collection.init(seed=2**40 + 7), 4)


@pytest.fixture(scope="module")
def saved(eight, tmp_path_factory):
    """Returns the folder of its tables, saved with a parameter by an asynchronous manager."""
    folder = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patch, ocp.CheckpointManager(folder) as manager:
        patch.setattr(save, "LEAST_BATCH_BYTES", 1)  # so that small tables have many batches
        items = ocp.args.Composite(
            tables=TablesSave(*eight, compression="lz4"), params=ocp.args.StandardSave({"w": np.arange(3.0)})
        )
        manager.save(4, args=items)
        manager.wait_until_finished()
    return folder / "4" / "tables"


def restore(folder, collection, **options):
    """Restores a folder without a manager."""
    return checkpoint.TablesCheckpointHandler().restore(folder, args=TablesRestore(collection, **options))


def test_what_cannot_be_saved_is_refused_before_orbax_begins(eight):
    """Once it has begun, a thread of its own would keep the process from ending."""
    collection, state = eight
    with pytest.raises(TypeError, match="TablesSave: collection: got State, wanted"):
        TablesSave(state, collection)
    gone = jax.tree.map(jnp.array, state)
    jax.tree.map(lambda leaf: leaf.delete(), gone)
    with pytest.raises(ValueError, match="TablesSave: state: got one whose arrays are deleted"):
        TablesSave(collection, gone)
    with pytest.raises(TypeError, match="TablesSave: state: got one of NumPy arrays"):
        TablesSave(collection, jax.device_get(state))
    with pytest.raises(ValueError, match="TablesSave: compression: got 'zip'"):
        TablesSave(collection, state, compression="zip")


def save_to(folder, collection, state, **options):
    """Saves synchronously, without a manager."""
    args = TablesSave(collection, state, **options)
    ocp.Checkpointer(checkpoint.TablesCheckpointHandler()).save(folder, args=args)
    return args.report


@pytest.mark.parametrize(("clock", "warns"), [(None, True), (28_000_000, True), (29_000_000, False)])
def test_a_save_without_the_clock_of_lookups_warns(clock, warns, tmp_path, caplog):
    """Ages would be counted from the step."""
    collection = collection_of(
        [jaxsok.TableSpec(name, 4, optim.sgd(0.1), capacity=64, statistics=True) for name in ("item", "user")]
    )
    features = collection.batch(cases.one_batch(collection, 0)).features
    _, state, _ = collection.lookup(collection.init(), features, clock=29_000_000)
    with caplog.at_level(logging.WARNING, logger="jaxsok.checkpoint"):
        save_to(tmp_path / "saved", collection, state, clock=clock)
    wanted = f"TablesSave: clock: got {clock or 0}, but rows were used at 29000000; pass clock= if lookups have one"
    assert (wanted in caplog.text) == warns and bool(caplog.records) == warns


# Onto other meshes, capacities, stores --------------------------------------------------------------------------------


@pytest.mark.parametrize("num_devices", [8, 3, pytest.param(1, marks=pytest.mark.slow), None])
def test_every_row_counter_and_waiting_key_is_restored(eight, saved, num_devices):
    """The other capacity is too small for the rows of one device, and larger than before on three."""
    collection, state = eight
    other = collection_of(tables_of(capacity=300 if num_devices == 3 else 24), num_devices)
    again = restore(saved, other)
    assert_same(content(other, again), content(collection, state))
    assert waiting(other, again, "ad") == waiting(collection, state, "ad") != {}
    assert int(again.step) == int(state.step) == 4
    np.testing.assert_array_equal(np.asarray(again.seed), np.asarray(state.seed))
    assert other.num_rows(again) == collection.num_rows(state)


def test_training_goes_on_as_if_nothing_had_been(eight, saved):
    """New, old and waiting keys train to the same bits on a mesh of equal size; new rows come from the old seed."""
    collection, state = eight
    other = collection_of(tables_of(), 8)
    went_on = train(other, restore(saved, other), 2)
    wanted = train(collection, collection.init(seed=2**40 + 7), 6)
    assert_same(content(other, went_on), content(collection, wanted))
    assert waiting(other, went_on, "ad")


def test_tables_are_regrouped(eight, saved):
    """Tables that shared a store are separate, others share a store, and placements differ."""
    collection, state = eight
    tables = [
        jaxsok.TableSpec("user", cases.DIM, cases.ADAM, eviction=policies.LeastRecentlyUsed(), placement=jaxsok.on(1)),
        jaxsok.TableSpec("item", cases.DIM, cases.ADAM, statistics=True, placement=jaxsok.REPLICATED),
        jaxsok.TableSpec("day", 2 * cases.DIM, cases.ROWWISE, dtype="bfloat16", statistics=True),
        jaxsok.TableSpec("ad", cases.DIM, cases.ROWWISE, statistics=True, admission=policies.AdmitByCount(2)),
    ]
    other = collection_of(tables[::-1], 2)
    again = restore(saved, other)
    assert [[table.name for table in store.tables] for store in other.stores] == [["ad"], ["day"], ["item"], ["user"]]
    got, want = content(other, again), content(collection, state)
    assert_same({name: got[name] for name in want}, want)
    assert waiting(other, again, "ad") == waiting(collection, state, "ad")


def test_through_a_manager_beside_parameters(eight, saved):
    """Items are restored together, and the tables are those that the handler restores alone."""
    collection, state = eight
    other = collection_of(tables_of(), 2)
    with ocp.CheckpointManager(saved.parents[1]) as manager:
        items = manager.restore(
            4,
            args=ocp.args.Composite(tables=TablesRestore(other), params=ocp.args.StandardRestore({"w": np.zeros(3)})),
        )
    np.testing.assert_array_equal(items["params"]["w"], np.arange(3.0))
    assert_same(content(other, items["tables"]), content(collection, state))


def test_an_empty_collection(tmp_path):
    collection = collection_of(tables_of(), 2)
    save_to(tmp_path / "empty", collection, collection.init(seed=1))
    again = restore(tmp_path / "empty", collection_of(tables_of()))
    assert all(rows == 0 for rows in collection_of(tables_of()).num_rows(again).values())


# While training continues ---------------------------------------------------------------------------------------------


def test_what_is_saved_is_the_state_of_the_call(tmp_path):
    """The state is donated to later steps while the files are written; the pause is reported."""
    collection = collection_of(tables_of(), 4)
    state = train(collection, collection.init(seed=1), 2)
    want = content(collection, state)
    with ocp.AsyncCheckpointer(checkpoint.TablesCheckpointHandler()) as checkpointer:
        args = TablesSave(collection, state)
        checkpointer.save(tmp_path / "saved", args=args)
        assert 0 < args.report.pause_s < 60
        state = train(collection, state, 2)
        checkpointer.wait_until_finished()
    assert args.report.total_s >= args.report.pause_s
    assert args.report.num_rows == {name: want[f"{name}.keys"].size for name in TABLES}
    other = collection_of(tables_of())
    assert_same(content(other, restore(tmp_path / "saved", other)), want)
    assert content(collection, state)["user.keys"].size > want["user.keys"].size


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_host_memory_is_bounded(eight, tmp_path, compression):
    """With a queue of a few KiB, further pieces wait until files are written, and nothing is lost."""
    collection, state = eight
    report = save_to(tmp_path / "saved", collection, state, host_bytes=24_000, compression=compression)
    assert report.peak_bytes <= 24_000 < report.num_bytes
    other = collection_of(tables_of(), 3)
    assert_same(content(other, restore(tmp_path / "saved", other)), content(collection, state))


def test_a_piece_that_is_larger_than_the_queue_is_written_before_the_next_one_comes(tmp_path):
    """The writer prepares a second piece only if there is one: it does not wait for what waits for it."""
    collection = collection_of([jaxsok.TableSpec("item", 4, optim.sgd(0.1), capacity=64)])
    batch = collection.batch({"item": np.arange(40, dtype=np.uint64)})
    state = collection.lookup(collection.init(seed=0), batch.features)[1]
    report = save_to(tmp_path / "saved", collection, state, host_bytes=1)
    assert report.num_rows == {"item": 40} and report.peak_bytes < report.num_bytes / 30
    assert_same(content(collection, restore(tmp_path / "saved", collection)), content(collection, state))


def test_pieces_that_overlap_have_each_row_once(tmp_path):
    """The last piece of a full slab begins earlier, and the rows that it shares with the one before are left out."""
    collection = collection_of([jaxsok.TableSpec("item", 4, optim.sgd(0.1), capacity=64)])
    batch = collection.batch({"item": np.arange(64, dtype=np.uint64)})
    state = collection.lookup(collection.init(seed=0), batch.features)[1]
    report = save_to(tmp_path / "saved", collection, state, piece_bytes=7 * 4 * (4 + 4))
    assert report.num_rows == {"item": 64}
    assert_same(content(collection, restore(tmp_path / "saved", collection)), content(collection, state))


@pytest.mark.parametrize("num_tables", [16, 17])
def test_many_tables_of_one_store_are_sorted_by_table_and_partition(tmp_path, num_tables):
    """Up to 16 tables' partitions are numbers of 16 bits."""
    collection = collection_of([jaxsok.TableSpec(f"t{i}", 4, optim.sgd(0.1), capacity=64) for i in range(num_tables)])
    batch = collection.batch({f"t{i}": np.arange(i, 20 + i, dtype=np.uint64) for i in range(num_tables)})
    state = collection.lookup(collection.init(seed=0), batch.features)[1]
    save_to(tmp_path / "saved", collection, state)
    assert_same(content(collection, restore(tmp_path / "saved", collection)), content(collection, state))


def test_an_export_goes_on_where_no_thread_begins_any_more(tmp_path, monkeypatch):
    """At Python's end a thread that saves still writes everything."""

    class Ended(save.concurrent.futures.ThreadPoolExecutor):
        def submit(self, *args, **kwargs):
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    collection = collection_of([jaxsok.TableSpec("item", 4, optim.sgd(0.1), capacity=64)])
    batch = collection.batch({"item": np.arange(40, dtype=np.uint64)})
    state = collection.lookup(collection.init(seed=0), batch.features)[1]
    saving = save.Saving("test", collection, state, save.SaveOptions(host_bytes=1))
    feeding = threading.Thread(target=saving.feed)
    feeding.start()
    monkeypatch.setattr(save.concurrent.futures, "ThreadPoolExecutor", Ended)
    (tmp_path / "saved").mkdir()
    saving.write(tmp_path / "saved")
    feeding.join()
    assert saving.report.num_rows == {"item": 40}


def test_a_piece_keeps_no_more_memory_than_it_counts():
    """The last rows of a slab and the few rows of a delta keep no larger array alive."""
    collection = collection_of([jaxsok.TableSpec("item", 4, optim.sgd(0.1), capacity=64, statistics=True)])
    features = [collection.batch({"item": np.arange(*ends, dtype=np.uint64)}).features for ends in ((0, 35), (35, 38))]
    state = collection.init(seed=0)
    state = collection.lookup(state, features[0], clock=1)[1]
    state = collection.lookup(state, features[1], clock=2)[1]
    (spec,), (store,) = collection.stores, state.stores
    for since in (None, 2):
        size = 16 * (3 + 4 + 2) * 4
        found = list(snapshot.pieces(0, spec, store, state.seed, collection.shards, piece_bytes=size, since=since))
        assert sum(len(piece.arrays.records) for piece in found) >= 3
        for piece in found:
            for array in jax.tree.leaves(piece.arrays):
                whole = array
                while isinstance(whole.base, np.ndarray):
                    whole = whole.base
                assert whole.nbytes == array.nbytes


def test_the_writer_waits_for_the_folder_and_the_copy_for_the_writer(eight, tmp_path):
    """Without a writer the copy stops at the bound of the queue; with a writer it continues."""
    saving = save.Saving("test", *eight, save.SaveOptions(host_bytes=24_000))
    thread = threading.Thread(target=saving.feed, daemon=True)
    thread.start()
    thread.join(timeout=2)
    assert thread.is_alive() and saving.report.num_bytes <= 24_000
    saving.write(tmp_path)
    thread.join(timeout=30)
    assert not thread.is_alive() and saving.report.num_bytes > 24_000


def test_an_error_of_the_writer_ends_the_save(eight, tmp_path):
    """A missing folder raises an error in the caller, and no thread waits forever."""
    saving = save.Saving("test", *eight, save.SaveOptions(host_bytes=24_000))
    with pytest.raises(FileNotFoundError):
        saving.begin(tmp_path / "absent").result()


def test_the_copy_raises_the_error_of_a_writer_that_failed_before(eight, tmp_path, monkeypatch):
    """Whichever thread is first, a save has one error: other processes are given the same words."""
    saving = save.Saving("test", *eight, save.SaveOptions())
    monkeypatch.setattr(jax, "process_index", lambda: 1)  # which must find the folder that process 0 has made
    with pytest.raises(FileNotFoundError) as written:
        saving.write(tmp_path / "absent")
    with pytest.raises(FileNotFoundError) as copied:
        saving.feed()
    assert copied.value is written.value


@pytest.mark.parametrize("how", ["export", "orbax"])
def test_a_full_disk_ends_a_save_of_more_than_the_queue_holds(tmp_path, how):
    """Closing a file after a failed write fails once more, and the thread that copies rows waits for room."""
    collection = jaxsok.Collection([jaxsok.TableSpec("item", 4, optim.adam(0.1), capacity=16)], [])
    rows = np.ones((20_000, 4), np.float32)
    state = collection.import_table(collection.init(), "item", jaxsok.Records(np.arange(20_000, dtype=np.uint64), rows))
    options, limits = {"host_bytes": 100_000, "piece_bytes": 5_000}, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            if how == "export":
                checkpoint.export_full(tmp_path / "saved", collection, state, **options)
            else:
                save_to(tmp_path / "saved", collection, state, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "saved").exists()


# What is saved alongside rows -----------------------------------------------------------------------------------------


def test_salts_evictions_and_optimizer_state_of_no_row(tmp_path):
    """Salts, evictions and scalar optimizer state follow their table onto another mesh."""
    import optax

    lifted = optim.lift(optax.scale_by_schedule(lambda count: -0.1 / (1.0 + count)))
    tables = [jaxsok.TableSpec("item", 4, lifted, capacity=64, eviction=policies.LeastRecentlyUsed())]
    collection = collection_of(tables, 4)
    state = train(collection, collection.init(seed=3), 3)
    (store,) = state.stores
    evicted = jnp.arange(4, dtype=jnp.uint32) + 10
    evicted = jax.device_put(evicted, store.table_evicted[0].sharding)
    state = dataclasses.replace(state, stores=(dataclasses.replace(store, table_evicted=(evicted,)),))
    save_to(tmp_path / "saved", collection, state)
    for num_devices in (2, None):
        other = collection_of(tables, num_devices)
        (again,) = restore(tmp_path / "saved", other).stores
        assert int(np.asarray(again.table_evicted[0]).sum()) == 46
        shards = num_devices or 1
        for leaf, was in zip(again.globals_, store.globals_, strict=True):
            np.testing.assert_array_equal(np.asarray(leaf), np.asarray(was)[:shards])
            assert np.asarray(leaf).max() == 3
        words = np.asarray(again.counters).reshape(shards, -1)
        for name in ("salt_low", "salt_high"):
            assert (words[:, COUNTERS.index(name)] == np.asarray(store.counters)[COUNTERS.index(name)]).all()


def test_bloom_filters_stay_where_the_shards_are_the_same(tmp_path, caplog):
    """Filters are restored to the bit on a mesh of the same size; elsewhere they start empty, with a warning."""
    tables = [
        jaxsok.TableSpec("item", 4, optim.sgd(0.1), capacity=64, admission=policies.AdmitByBloom(3, num_keys=500))
    ]
    collection = collection_of(tables, 4)
    state = train(collection, collection.init(seed=3), 3)
    save_to(tmp_path / "saved", collection, state)
    again = restore(tmp_path / "saved", collection_of(tables, 4))
    was = np.asarray(state.stores[0].bloom[0])
    np.testing.assert_array_equal(np.asarray(again.stores[0].bloom[0]), was)
    assert was.any() and not caplog.records
    other = restore(tmp_path / "saved", collection_of(tables, 2))
    assert not np.asarray(other.stores[0].bloom[0]).any()
    assert 'table "item": its Bloom filter starts empty' in caplog.text


def test_another_admission(tmp_path, caplog):
    """With a lower threshold, keys wait for one more sight; counts of another kind are lost, with a warning."""

    def by(admission):
        return collection_of([jaxsok.TableSpec("item", 2, optim.sgd(0.1), capacity=64, admission=admission)])

    collection, keys = by(policies.AdmitByCount(5)), np.arange(10, dtype=np.uint64)
    state = collection.init(seed=0)
    for _ in range(3):
        state = collection.lookup(state, collection.batch({"item": keys}).features)[1]
    save_to(tmp_path / "saved", collection, state)
    assert waiting(collection, state, "item") == dict.fromkeys(range(10), 3)
    lower = by(policies.AdmitByCount(3))
    again = restore(tmp_path / "saved", lower)
    assert waiting(lower, again, "item") == dict.fromkeys(range(10), 2)
    again = lower.lookup(again, lower.batch({"item": keys}).features)[1]
    assert lower.num_rows(again) == {"item": 10} and not caplog.records
    plain = by(None)
    assert plain.num_rows(restore(tmp_path / "saved", plain)) == {"item": 0} and not caplog.records
    restore(tmp_path / "saved", by(policies.AdmitByBloom(3, num_keys=50)))
    assert 'table "item": admission by count was saved, wanted by bloom' in caplog.text


def test_all_files_are_on_the_disk_before_they_get_their_names(tmp_path, monkeypatch):
    """Rows, Bloom filters, manifest parts and manifest are synced first, then the folder and its parent."""
    real_sync, real_rename, done = os.fsync, os.rename, []

    def sync(descriptor):
        real_sync(descriptor)
        done.append(pathlib.Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    def rename(path, target):
        done.append(f"{pathlib.Path(path).name} -> {pathlib.Path(target).name}")
        return real_rename(path, target)

    collection = collection_of(
        [jaxsok.TableSpec("item", 2, optim.sgd(0.1), capacity=64, admission=policies.AdmitByBloom(1, num_keys=50))]
    )
    state = train(collection, collection.init(seed=0), 1)
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", rename)
    checkpoint.export_full(tmp_path / "full", collection, state)
    assert sorted(done[:2]) == ["store_0000.process_00000.bloom", "table_0000.process_00000.arrow"]
    assert [re.sub("[0-9a-f]{16}", "<token>", line) for line in done[2:]] == [
        "manifest.process_00000.json",
        "manifest.json.writing",
        "manifest.json.writing -> manifest.json",
        "full.<token>.writing",
        "full.<token>.writing -> full",
        tmp_path.name,
    ]


def test_rows_that_are_not_finite_are_reported(tmp_path, caplog):
    """The log, the report and the manifest count them by table; the rows are saved unchanged."""
    tables = [jaxsok.TableSpec(name, 4, optim.sgd(0.1), capacity=64) for name in ("item", "user")]
    collection = collection_of(tables)
    state = train(collection, collection.init(), 1)
    store = state.stores[0]
    keys = content(collection, state)["item.keys"]
    lines = np.asarray(collection.export_table(state, "item")["row_ids"])[:2]
    rows = np.array(store.rows[0])
    rows[lines[0], 1], rows[lines[1], 0] = np.nan, np.inf
    state = dataclasses.replace(state, stores=(dataclasses.replace(store, rows=(jnp.asarray(rows),)),))
    with caplog.at_level(logging.WARNING, logger="jaxsok.checkpoint"):
        report = save_to(tmp_path / "saved", collection, state)
    assert f'table "item": 2 of {keys.size} rows have numbers that are infinite or NaN' in caplog.text
    assert report.num_nonfinite == {"item": 2, "user": 0}
    tables = manifest.read("test", tmp_path / "saved")["tables"]
    assert {name: table["num_nonfinite"] for name, table in tables.items()} == report.num_nonfinite
    other = collection_of([jaxsok.TableSpec(name, 4, optim.sgd(0.1)) for name in ("item", "user")])
    assert_same(content(other, restore(tmp_path / "saved", other)), content(collection, state))


# Other optimizers, dtypes, tables -------------------------------------------------------------------------------------


def test_another_optimizer_is_refused_unless_it_is_meant(eight, saved):
    """Restoring rows alone, or state of equal names, needs an explicit choice."""
    collection, state = eight
    want = content(collection, state)

    def other(optimizer):
        tables = [jaxsok.TableSpec(name, cases.DIM, optimizer, statistics=True) for name in ("user", "item")]
        return collection_of(tables, 2)

    chosen = {"tables": ["user", "item"]}
    with pytest.raises(
        ValueError, match=r'table "user": optimizer: got state of optim\.adam .* wanted that of optim\.'
    ):
        restore(saved, other(optim.adagrad(0.1)), **chosen)
    for optimizer, mode, kept in (
        (optim.adagrad(0.1), "initial", ()),
        (optim.sgd(0.1), "matching", ()),
        (optim.adamw(0.1, weight_decay=0.1), "matching", ("m", "v")),
        (optim.adam(0.2), "initial", ()),
    ):
        target = other(optimizer)
        got = content(target, restore(saved, target, optimizer_state=mode, **chosen))
        assert_same(got, want, names=["user.keys", "user.rows", "item.keys", "item.rows", "user.statistics"])
        for piece in target.stores[0].state_specs:
            name = f"user.state.{piece.name}"
            assert (got[name] == (want[name] if piece.name in kept else piece.initial_value)).all(), (name, mode)


INJECT = optax.inject_hyperparams


def test_lifted_state_of_no_row_is_restored_by_its_place(tmp_path, caplog):
    """Counts stay, and injected numbers are those declared; what is elsewhere in another transformation is initial."""
    schedule = optax.constant_schedule(0.5)
    for number, (saved, declared, mode, wanted, new) in enumerate(
        (
            (INJECT(optax.sgd)(0.5), INJECT(optax.sgd)(0.25), "require", {"count": 3, "['learning_rate']": 0.25}, ""),
            (
                INJECT(optax.adam)(schedule, b1=0.5),
                INJECT(optax.adam)(schedule, b1=0.25),
                "require",
                {"inner_state[0].count": 3, "hyperparams_states['learning_rate'].count": 3, "['b1']": 0.25},
                "",
            ),
            (optax.adam(0.5), optax.adam(schedule), "matching", {"[0].count": 3, "[1].count": 0}, "[1].count"),
            (
                INJECT(optax.rmsprop)(0.5, eps=0.5),
                INJECT(optax.adadelta)(2.0, rho=0.25),
                "matching",
                {"count": 3, "['learning_rate']": 2.0, "['rho']": 0.25},
                "",
            ),
        )
    ):
        first, second = (
            collection_of([jaxsok.TableSpec("item", 4, optim.lift(tx), capacity=64)]) for tx in (saved, declared)
        )
        path = tmp_path / str(number)
        checkpoint.export_full(path, first, train(first, first.init(), 3))
        caplog.clear()
        state = checkpoint.load(path, second, optimizer_state=mode)
        initial = jax.tree_util.tree_flatten_with_path(declared.init(jnp.zeros((1, 4))))[0]
        places = [jax.tree_util.keystr(path).lstrip(".") for path, leaf in initial if np.ndim(leaf) == 0]
        found = dict(zip(places, [leaf[0].item() for leaf in state.stores[0].globals_], strict=True))
        for end, value in wanted.items():
            assert [found[place] for place in found if place.endswith(end)][:1] == [value], (number, end, found)
        assert ("begins with its initial value: " + new in caplog.text) if new else not caplog.text
        third = collection_of(second.tables)
        assert checkpoint.load(path, third, optimizer_state="initial").stores[0].globals_[0].item() == 0


def _pull(rate, name):
    """A transformation whose state begins as a copy of the row, and pulls it back there."""
    kept = collections.namedtuple("Kept", [name])

    def init(params):
        return kept(jax.tree.map(jnp.array, params))

    def update(gradients, state, params):
        pulled = jax.tree.map(lambda gradient, now, first: gradient + rate * (now - first), gradients, params, state[0])
        return pulled, state

    return optax.GradientTransformation(init, update)


def test_state_that_begins_as_the_row_begins_again_unless_it_was_saved(tmp_path):
    """The mark of a started row alone is not taken from another optimizer: its copy of the row would be 0."""
    saved, other = (optim.lift(optax.chain(_pull(0.5, name), optax.sgd(0.1))) for name in ("first", "anchor"))
    first, second = (
        collection_of([jaxsok.TableSpec("item", 4, kind, capacity=64, initializer="ones")]) for kind in (saved, other)
    )
    state = train(first, first.init(), 3)
    exported = first.export_table(state, "item")
    checkpoint.export_full(tmp_path / "saved", first, state)
    state = checkpoint.load(tmp_path / "saved", second, optimizer_state="matching")
    assert not second.export_table(state, "item")["state"]["started"].any()
    batch = second.batch({"item": exported["keys"].astype(np.int64)})
    for _ in range(2):
        embeddings, state, plan = second.lookup(state, batch.features)
        state, _ = second.update(state, plan, jax.tree.map(jnp.zeros_like, embeddings))
    got = second.export_table(state, "item")
    order, wanted = np.argsort(got["keys"]), np.argsort(exported["keys"])
    np.testing.assert_array_equal(got["rows"][order], exported["rows"][wanted])
    np.testing.assert_array_equal(got["state"]["anchor"][order], exported["rows"][wanted])

    records = jaxsok.Records(got["keys"], got["rows"], {"started": got["state"]["started"]})
    with pytest.raises(ValueError, match=r"got \['started'\] with \[\] alone, wanted all of \['anchor', 'started'\]"):
        second.import_table(second.init(), "item", records)
    whole = dataclasses.replace(records, state=got["state"])
    again = second.export_table(second.import_table(second.init(), "item", whole), "item")
    np.testing.assert_array_equal(np.sort(again["state"]["anchor"], axis=0), np.sort(got["state"]["anchor"], axis=0))


def test_rows_of_another_dtype_are_converted(eight, saved, caplog):
    """Numbers are rounded to nearest, with a warning."""
    collection, state = eight
    want = content(collection, state)
    table = jaxsok.TableSpec("user", cases.DIM, cases.ADAM, statistics=True, dtype="bfloat16")
    other = collection_of([table, jaxsok.TableSpec("day", 2 * cases.DIM, cases.ROWWISE, statistics=True)], 2)
    got = content(other, restore(saved, other, tables=["user", "day"]))
    bits = want["user.rows"].view(np.uint32).astype(np.uint64)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)  # to even, in integers
    np.testing.assert_array_equal(got["user.rows"].view(np.uint16), nearest)
    wide = (want["day.rows"].view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(got["day.rows"], wide)
    assert 'table "user": rows of float32 become bfloat16, rounded to nearest' in caplog.text
    caplog.clear()
    restore(saved, other, state=other.init(), tables=["user"])
    assert caplog.text.count("become bfloat16") == 1


def test_statistics_that_nobody_kept(tmp_path):
    """Rows saved without statistics count as used at the time of saving, so none of them is evicted first."""
    plain = collection_of([jaxsok.TableSpec("item", 4, optim.sgd(0.1), capacity=64)])
    state = train(plain, plain.init(), 3)
    save_to(tmp_path / "saved", plain, state)
    other = collection_of([jaxsok.TableSpec("item", 4, optim.sgd(0.1), statistics=True)])
    got = content(other, restore(tmp_path / "saved", other))
    assert (got["item.statistics"] == [3, 0]).all()
    np.testing.assert_array_equal(got["item.rows"], content(plain, state)["item.rows"])


def test_some_tables_into_a_state_that_there_is(eight, saved, tmp_path):
    """They replace the rows of their tables; other tables, step and seed stay. Earlier plans are stale.

    The state is of fewer steps than the one that was saved, and can be exported all the same.
    """
    collection, state = eight
    other = collection_of(tables_of(), 3)
    mine = train(other, other.init(seed=1), 2)
    before, generations = content(other, mine), [np.asarray(store.generation) for store in mine.stores]
    again = restore(saved, other, state=mine, tables=["user", "day"])
    got, want = content(other, again), content(collection, state)
    for name in ("user", "day"):
        want[f"{name}.statistics"][:, 0] = 2  # as restored rows count as used now
    assert_same(got, want, names=[name for name in want if name.split(".")[0] in ("user", "day")])
    assert_same(got, before, names=[name for name in want if name.split(".")[0] in ("item", "ad")])
    assert int(again.step) == 2 and int(again.seed[0]) == 1
    assert all(int(store.generation) > int(was) for store, was in zip(again.stores[:2], generations, strict=False))
    checkpoint.export_full(tmp_path / "full", other, again)


@pytest.mark.parametrize("num_devices", [None, 2])
def test_what_has_no_room_changes_nothing(tmp_path, num_devices):
    """The restore is refused before any row of the state is removed; removed rows make room."""

    def of(capacity):
        options = {"capacity": capacity, "max_capacity": capacity}
        return collection_of([jaxsok.TableSpec(name, 2, optim.sgd(0.1), **options) for name in "ab"], num_devices)

    def step(collection, state, a, b):
        return train_step(collection)(state, collection.batch({"a": a, "b": b}).features)[0]

    large, small = of(512), of(64)
    keys = np.arange(200, dtype=np.uint64)
    saved = step(large, large.init(seed=0), keys, keys[:2].repeat(100))
    save_to(tmp_path / "saved", large, saved)
    state = step(small, small.init(seed=1), keys[:100].repeat(2), keys[:4].repeat(50))
    before = content(small, state)
    with pytest.raises(jaxsok.TableFullError, match="max_capacity: got"):
        restore(tmp_path / "saved", small, state=state)
    assert_same(content(small, state), before)
    save_to(tmp_path / "mine", small, state)
    state = step(small, small.init(seed=2), keys[100:].repeat(2), keys[:4].repeat(50))
    again = restore(tmp_path / "mine", small, state=state, tables=["a"])
    assert_same(content(small, again), before, names=["a.keys", "a.rows"])


def fails_later(monkeypatch, call):
    """Makes a file's batches fail once more than `call` readers have been opened."""
    batches, calls = files.SavedFile.batches, []

    def read(file, *args):
        calls.append(file)
        for batch in batches(file, *args):
            if len(calls) > call:
                raise OSError(f"{file.path.name}: the disk went away")
            yield batch

    monkeypatch.setattr(files.SavedFile, "batches", read)


@pytest.mark.parametrize(("num_devices", "call"), [pytest.param(None, 0, marks=pytest.mark.slow), (2, 2), (None, 4)])
def test_what_fails_on_the_way_leaves_a_state(saved, monkeypatch, num_devices, call):
    """If rows of the given state are gone already, the error holds the remaining state, which can be restored into."""
    collection = collection_of(tables_of(capacity=40), num_devices)
    state = train(collection, collection.init(seed=1), 1)
    with monkeypatch.context() as patched:
        fails_later(patched, call)
        with pytest.raises(OSError, match="the disk went away") as caught:
            restore(saved, collection, state=state)
    assert "the `state` attribute of this error" in caught.value.__notes__[0]
    state = restore(saved, collection, state=caught.value.state)
    want = content(collection, restore(saved, collection))
    names = [name for name in want if not name.endswith("statistics")]  # restored rows count as used now
    assert_same(content(collection, state), want, names=names)
    assert waiting(collection, state, "ad") == waiting(collection, restore(saved, collection), "ad")


@pytest.mark.parametrize(
    ("tables", "options", "message"),
    [
        (
            ["user"],
            {},
            r"got .* with tables \['ad', 'day', 'item', 'user'\], wanted those of the collection, \['user'\]",
        ),
        (["user", "other"], {"tables": ["other"]}, r'tables: got "other", wanted some of .* the tables in'),
        (
            ["user"],
            {"tables": ["item"]},
            r'tables: got "item", wanted some of \[\'user\'\], the tables of the collection',
        ),
        (["wide"], {"tables": ["user"]}, r'table "user": dim: got 4 in .*, wanted 5'),
        (["user"], {"tables": ["user"], "optimizer_state": "none"}, "optimizer_state: got 'none', wanted one of"),
        (["small"], {"tables": ["user"]}, r"max_capacity: got {'user': 8}, 8 rows for a shard, wanted \d+ for a shard"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(saved, tables, options, message):
    specs = {
        "user": jaxsok.TableSpec("user", cases.DIM, cases.ADAM, statistics=True),
        "other": jaxsok.TableSpec("other", cases.DIM, cases.ADAM, statistics=True),
        "wide": jaxsok.TableSpec("user", cases.DIM + 1, cases.ADAM, statistics=True),
        "small": jaxsok.TableSpec("user", cases.DIM, cases.ADAM, statistics=True, capacity=8, max_capacity=8),
    }
    with pytest.raises((ValueError, jaxsok.TableFullError), match=message):
        restore(saved, collection_of([specs[name] for name in tables]), **options)


@pytest.mark.parametrize("num_devices", [1, 4])
def test_a_table_that_was_full_on_more_shards_says_which_bound_is_enough(num_devices, tmp_path):
    """Eight shards have eight times four roots of room on top of their shares."""

    def declare(devices, max_capacity):
        spec = jaxsok.TableSpec("user", 4, optim.sgd(0.1), capacity=500, max_capacity=max_capacity)
        return collection_of([spec], devices)

    collection = declare(8, 500)
    batch = collection.batch({"user": np.arange(2000)})
    _, state, _ = collection.lookup(collection.grow(collection.init(seed=0), batch), batch.features)
    saved = collection.num_rows(state)["user"]
    checkpoint.export_full(tmp_path / "full", collection, state)
    with pytest.raises(jaxsok.TableFullError, match=r"got {'user': 500}, \d+ rows for a shard, wanted") as error:
        checkpoint.load(tmp_path / "full", declare(num_devices, 500))
    enough = int(re.search(r"(\d+) for these tables together are enough", str(error.value))[1])
    assert 500 < saved <= enough < 2 * saved
    fewer = declare(num_devices, enough)
    assert fewer.num_rows(checkpoint.load(tmp_path / "full", fewer)) == {"user": saved}


def test_arguments_that_cannot_be_meant(eight, tmp_path):
    collection, state = eight
    for options, message in (
        ({"compression": "gzip"}, "compression: got 'gzip', wanted one of"),
        ({"host_bytes": 0}, "host_bytes: got 0, wanted a number of bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            save_to(tmp_path / "saved", collection, state, **options)
    with pytest.raises(TypeError, match=r"wanted TablesRestore\(collection\)"):
        checkpoint.TablesCheckpointHandler().restore(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"has no manifest\.json"):
        restore(tmp_path, collection)


# Damage ---------------------------------------------------------------------------------------------------------------


def _flip(path, byte):
    data = bytearray(path.read_bytes())
    data[byte] ^= 0x10
    path.write_bytes(data)


def _files(folder):
    return json.loads((folder / "manifest.json").read_text())["tables"]["user"]["files"]


@pytest.mark.parametrize("place", ["head", "batch", "foot", "cut", "longer", "gone", "swapped", "manifest", "no json"])
def test_damaged_files_are_refused_and_change_nothing(saved, tmp_path, place):
    """The error names file and byte; the state to restore into is unchanged."""
    folder = tmp_path / "damaged"
    shutil.copytree(saved, folder)
    entry = _files(folder)[0]
    path, byte = folder / entry["name"], 0
    if place == "head":
        _flip(path, 40)
    elif place == "batch":
        byte = entry["batches"][3][0]
        _flip(path, byte + entry["batches"][3][1] // 2)
    elif place == "foot":
        byte = entry["foot"][0]
        _flip(path, byte + 5)
    elif place == "cut":
        byte = entry["batches"][5][0] + 7
        os.truncate(path, byte)
    elif place == "longer":
        byte = entry["size"]
        path.write_bytes(path.read_bytes() + b"more")
    elif place == "gone":
        path.unlink()
    elif place == "swapped":
        # A file of another table takes its place; the sizes may be equal.
        data = (
            folder / json.loads((folder / "manifest.json").read_text())["tables"]["item"]["files"][0]["name"]
        ).read_bytes()
        path.write_bytes(data[: entry["size"]].ljust(entry["size"], b"\0"))
    elif place == "manifest":
        path = folder / "manifest.json"
        path.write_text(path.read_text().replace('"step": 4', '"step": 5'))
    else:
        path, byte = folder / "manifest.json", r"\d+"
        path.write_bytes(path.read_bytes()[:100])
    other = collection_of(tables_of(), 2)
    mine = train(other, other.init(seed=1), 2)
    before = content(other, mine)
    with pytest.raises(checkpoint.CorruptFileError, match=f'file ".*{path.name}", byte {byte}: '):
        restore(folder, other, state=mine, tables=["user"])
    assert_same(content(other, mine), before)


@pytest.mark.parametrize("place", ["flipped", "gone", "cut", "of another store"])
def test_a_damaged_bloom_filter_changes_nothing(tmp_path, place):
    """A filter is read last, but it is checked before rows of the state are removed."""
    admission = policies.AdmitByBloom(2, num_keys=50)
    collection = collection_of([jaxsok.TableSpec("item", 2, optim.sgd(0.1), capacity=64, admission=admission)])
    state = train(collection, collection.init(seed=3), 2)
    save_to(tmp_path / "saved", collection, state)
    (path,) = (tmp_path / "saved").glob("*.bloom")
    if place == "flipped":
        _flip(path, 5)
    elif place == "gone":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size - 4)
    before = content(collection, state)
    with pytest.raises(checkpoint.CorruptFileError, match=f'file ".*{path.name}", byte '):
        restore(tmp_path / "saved", collection, state=state)
    assert_same(content(collection, state), before)


def test_a_bloom_filter_that_a_store_lacks_changes_nothing(tmp_path):
    """A manifest with a valid checksum says that the filter is of another store."""
    admission = policies.AdmitByBloom(2, num_keys=50)
    tables = [jaxsok.TableSpec(name, dim, optim.sgd(0.1), capacity=64) for name, dim in (("item", 2), ("user", 3))]
    collection = collection_of([dataclasses.replace(tables[0], admission=admission), tables[1]])
    state = train(collection, collection.init(seed=3), 2)
    save_to(tmp_path / "saved", collection, state)
    file = tmp_path / "saved" / "manifest.json"
    whole = json.loads(file.read_text())
    whole.pop("checksum")
    (entry,) = whole["bloom"]
    entry["store"] = 1 - entry["store"]
    file.write_text(manifest._seal(whole))
    before = content(collection, state)
    with pytest.raises(
        checkpoint.CorruptFileError, match=r"bloom: got 0 bytes of the Bloom filter of store \d, shard 0"
    ):
        restore(tmp_path / "saved", collection, state=state)
    assert_same(content(collection, state), before)


def test_counts_that_do_not_agree_are_refused(saved, tmp_path):
    """A manifest with a valid checksum gives another number of rows than its files."""
    folder = tmp_path / "other"
    shutil.copytree(saved, folder)
    whole = json.loads((folder / "manifest.json").read_text())
    whole.pop("checksum")
    whole["tables"]["user"]["num_rows"] += 1
    (folder / "manifest.json").write_text(manifest._seal(whole))
    other = collection_of(tables_of(), 2)
    mine = train(other, other.init(seed=1), 2)
    before = content(other, mine)
    with pytest.raises(checkpoint.CorruptFileError, match=r'table "user": got .* rows in the files and .* wanted'):
        restore(folder, other, state=mine, tables=["user"])
    assert_same(content(other, mine), before)


def test_a_number_that_no_float_holds_is_refused(saved, tmp_path):
    """JSON has integers of any length; this one stands for the initial value of optimizer state."""
    folder = tmp_path / "other"
    shutil.copytree(saved, folder)
    whole = json.loads((folder / "manifest.json").read_text())
    whole.pop("checksum")
    whole["tables"]["user"]["form"]["states"][0][2] = 10**400
    (folder / "manifest.json").write_text(manifest._seal(whole))
    with pytest.raises(checkpoint.CorruptFileError, match=r"states.*wanted a number"):
        restore(folder, collection_of(tables_of()))


def test_rows_of_another_type_are_refused(saved, tmp_path):
    """A file has valid checksums and wrong columns, as if another program had rewritten it."""
    folder = tmp_path / "other"
    shutil.copytree(saved, folder)
    entry = _files(folder)[0]
    schema = pa.schema([pa.field("key", pa.int32(), nullable=False)])
    file = checkpoint.files.BatchFile(folder, entry["name"], schema)
    file.write(pa.record_batch([pa.array([1, 2], pa.int32())], schema=schema), (0, 4095))
    whole = json.loads((folder / "manifest.json").read_text())
    whole.pop("checksum")
    counts = {"num_rows": 2, "partition_rows": manifest.pack(np.eye(1, NUM_PARTITIONS, dtype=np.int64)[0] * 2)}
    whole["tables"]["user"] |= {"files": [file.close()], **counts}
    (folder / "manifest.json").write_text(manifest._seal(whole))
    with pytest.raises(checkpoint.CorruptFileError, match=r"byte 8: got columns key int32, wanted key uint64, row "):
        restore(folder, collection_of(tables_of()))


def test_segments_do_not_depend_on_the_pieces_of_a_writer(tmp_path):
    """A piece may hold the end of the head and the beginning of the first batch."""
    content = bytes(range(24))
    with (tmp_path / "file").open("wb") as opened:
        file = files._SegmentedFile(opened, head_size=8)
        file.write(content[:5])
        file.write(content[5:])
        assert file.head == [8, zlib.crc32(content[:8])]
        assert file.end_segment() == [8, 16, zlib.crc32(content[8:])]
    assert (tmp_path / "file").read_bytes() == content


def test_a_newer_format_is_refused(saved, tmp_path):
    shutil.copy(saved / "manifest.json", tmp_path)
    whole = json.loads((tmp_path / "manifest.json").read_text())
    whole.pop("checksum")
    (tmp_path / "manifest.json").write_text(manifest._seal({**whole, "version": 99}))
    with pytest.raises(
        ValueError, match="got version 99 of the format, wanted at most 1; use the jaxsok that wrote it"
    ):
        restore(tmp_path, collection_of(tables_of()))


# The files ------------------------------------------------------------------------------------------------------------


def test_the_files_are_read_by_anybody(eight, saved):
    """Arrow alone reads them, from the description in docs/checkpoint_format.md."""
    collection, state = eight
    want = content(collection, state)
    whole = json.loads((saved / "manifest.json").read_text())
    for name, table in whole["tables"].items():
        parts = [pa.ipc.open_file(saved / file["name"]).read_all() for file in table["files"]]
        joined = pa.concat_tables(parts).combine_chunks()
        keys = joined["key"].to_numpy()
        order = np.argsort(keys)
        np.testing.assert_array_equal(keys[order], want[f"{name}.keys"])
        rows = np.stack(joined["row"].to_numpy(zero_copy_only=False))[order]
        np.testing.assert_array_equal(rows, cases.bits(want[f"{name}.rows"]))
        seen = np.stack([joined[name].to_numpy() for name in ("last_step", "frequency")], axis=1)
        np.testing.assert_array_equal(seen[order], want[f"{name}.statistics"])
        assert table["num_rows"] == keys.size


def test_batches_tell_their_partitions(saved):
    """The range of each batch is that of its keys, and most are narrow, so a process reads only what it needs."""
    whole, widths = json.loads((saved / "manifest.json").read_text()), []
    for name, table in whole["tables"].items():
        for file in table["files"]:
            reader = pa.ipc.open_file(saved / file["name"])
            for number, (_, _, _, num_rows, first, last) in enumerate(file["batches"]):
                keys = reader.get_batch(number)["key"].to_numpy()
                partitions = programs.partition_hash(keys, name) >> np.uint64(52)
                assert (num_rows, first, last) == (keys.size, partitions.min(), partitions.max())
                assert (np.diff(partitions.astype(int)) >= 0).all()
                widths.append(last - first)
    assert np.mean(widths) < 4096 / 4


# Killed processes -----------------------------------------------------------------------------------------------------


def kill_savers(folder, times, seed):
    """Kills a process that saves in a loop, `times` times; the files are read after each kill."""
    collection = cases.counting()
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(pathlib.Path(jaxsok.__file__).parents[1])}
    command = [sys.executable, "-W", "ignore", str(WORKER), "killed", str(folder), str(seed)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    steps, unfinished = [], 0
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        for _ in range(times):
            process.stdin.write("go\n")
            process.stdin.flush()
            assert process.stdout.readline() == "killed\n"
            unfinished += bool([path for path in folder.iterdir() if "tmp" in path.name])
            with ocp.CheckpointManager(folder) as manager:
                step = manager.latest_step()
                items = manager.restore(
                    step,
                    args=ocp.args.Composite(
                        tables=TablesRestore(collection), params=ocp.args.StandardRestore({"steps": np.zeros(3, int)})
                    ),
                )
            got = content(collection, items["tables"])
            np.testing.assert_array_equal(got["item.keys"], np.arange(cases.NUM_COUNTED))
            assert (got["item.rows"] == step).all() and (items["params"]["steps"] == step).all()
            assert int(items["tables"].step) == step
            steps.append(step)
    assert steps == sorted(steps)
    return steps, unfinished


def test_a_death_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    steps, _ = kill_savers(tmp_path, 4, seed=1)
    assert steps[0] >= 1 and steps[-1] >= 4


@pytest.mark.slow
def test_fifty_deaths(tmp_path):
    steps, unfinished = kill_savers(tmp_path, 50, seed=2)
    assert steps[-1] >= 50 and unfinished >= 5


def killed_and_resumed(folder, num_steps, num_more, forms=cases.Life.FORMS):
    """Kills a process that saves after each step; another continues, and the result equals an unbroken run.

    Returns how often stores grew after the death.
    """
    for form in forms:
        (folder / form).mkdir()
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(pathlib.Path(jaxsok.__file__).parents[1])}
    command = [sys.executable, "-W", "ignore", str(WORKER), "live", str(folder)]
    with subprocess.Popen([*command, "1000000"], env=environment, text=True, stdout=subprocess.PIPE) as process:
        for _ in range(num_steps):
            assert process.stdout.readline() == "step\n"
        process.kill()  # SIGKILL, somewhere in the next steps
    subprocess.run([*command, str(num_more)], env=environment, check=True, stdout=subprocess.DEVNULL)
    num_grown_after = 0
    for form in forms:
        (folder / form / "uninterrupted").mkdir()
        whole = cases.Life(form, folder / form / "uninterrupted")
        last = max(int(path.name) for path in (folder / form).iterdir() if path.name.isdigit())
        growth, counts = whole.collection.growth, []
        while whole.step < last:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore" if whole.step == 0 else "error")  # "seen" has no statistics at first
                wanted = whole.advance(saves=False)
            counts.append((growth.num_evictions, growth.num_grown))
            with np.load(folder / form / f"{whole.step}.npz") as got:
                for name, want in wanted.items():
                    np.testing.assert_array_equal(programs.bits(got[name]), programs.bits(want), f"{form} {name}")
        with np.load(folder / form / "last.npz") as got:
            want = content(whole.collection, whole.state)
            assert got.keys() == want.keys()
            for name in want:
                np.testing.assert_array_equal(programs.bits(got[name]), programs.bits(want[name]), name)
        before, after = counts[last - num_more - 1], counts[-1]
        assert after[0] > before[0] and after[1]
        num_grown_after += after[1] - before[1]
    return num_grown_after


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_resumed_run_evicts_at_the_steps_of_one_that_went_on(num_shards, tmp_path):
    """A full store that decides by the counters of earlier batches finds them in the checkpoint (law 13)."""

    def made():
        sgd, lru = jaxsok.optim.sgd(0.1), policies.LeastRecentlyUsed()
        rows = {"capacity": 400 * num_shards, "max_capacity": 400 * num_shards}
        spec = jaxsok.TableSpec("user", 4, sgd, **rows, eviction=lru)
        features = [jaxsok.FeatureSpec("user", "user")]
        if num_shards == 1:
            return jaxsok.Collection([spec], features)
        return programs.over(num_shards, [spec], features)

    def step(collection, state, number):
        batch = collection.batch(
            {"user": np.where(np.arange(16) < 7, 7 * number, 7 * max(0, number - 9)) + np.arange(16)}
        )
        state = collection.grow(state, batch)
        return programs.learn(whole, state, batch.features)[0]  # the programs of equal collections are the same

    whole, num_steps = made(), 20 + 65 * num_shards
    state, evictions, keys, saved = whole.init(seed=0), [], [], {}
    for number in range(num_steps):
        if number > num_steps - 40 and number % (3 * num_shards) == 0:
            checkpoint.export_full(tmp_path / str(number), whole, state)
            saved[number] = whole.growth.looks_to_save(0)
        state = step(whole, state, number)
        evictions.append(whole.growth.num_evictions)
        keys.append(programs.rows_of(whole, state).keys())
    assert evictions[-1] >= 3 and any(len(looks) > 1 for looks in saved.values())
    for number in saved:
        resumed = made()
        state = checkpoint.load(tmp_path / str(number), resumed)
        for later in range(number, min(num_steps, number + 12)):
            state = step(resumed, state, later)
            assert resumed.growth.num_evictions == evictions[later] - evictions[number - 1]
            assert programs.rows_of(resumed, state).keys() == keys[later]


@pytest.mark.parametrize("placement", [jaxsok.specs.on(0), jaxsok.REPLICATED])
def test_looks_at_the_rows_of_other_shards_do_not_count(placement, tmp_path):
    """A full store that is placed otherwise after a restore has more rows in a shard than before; no key is refused."""

    def made(placement):
        lru = policies.LeastRecentlyUsed()
        spec = {"capacity": 2400, "max_capacity": 2400, "eviction": lru, "placement": placement}
        return programs.over(
            2, [jaxsok.TableSpec("user", 4, jaxsok.optim.sgd(0.1), **spec)], [jaxsok.FeatureSpec("user", "user")]
        )

    def step(collection, state, number):
        batch = collection.batch({"user": 40 * number + np.arange(40)})
        state, stats = programs.learn(collection, collection.grow(state, batch), batch.features)
        stats.check()
        assert programs.total(stats, "num_refused") == 0
        return state

    saved, restored = made(jaxsok.SHARDED), made(placement)
    state = saved.init(seed=0)
    for number in range(66):
        state = step(saved, state, number)
    checkpoint.export_full(tmp_path / "saved", saved, state)
    state = checkpoint.load(tmp_path / "saved", restored)
    for number in range(66, 80):
        state = step(restored, state, number)


def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path):
    """Ten steps after the restore have the bits of a run that was not killed, on one device and on a mesh (law 13).

    The third form, one device that receives each batch, is left to the long run, since the mesh receives batches too.
    """
    assert killed_and_resumed(tmp_path, 12, 10, ("seen", "mesh")) > 0


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [1, 19, 33, 60])
def test_runs_killed_early_and_late(tmp_path, num_steps):
    """Later than the first steps no table grows: fresh tables begin with room for many batches."""
    num_grown = killed_and_resumed(tmp_path, num_steps, 12)
    assert num_grown > 0 or num_steps > 1


# Several processes ----------------------------------------------------------------------------------------------------


def test_two_processes(tmp_path):
    """Two processes restore what they saved, and so does one process on other meshes, also from exports and deltas."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("JAX_")},
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "PYTHONPATH": str(pathlib.Path(jaxsok.__file__).parents[1]),
        "PORT": str(free_port()),
        "NUM_PROCESSES": "2",
        "NUM_DEVICES": "2",
    }
    processes = []
    for number in range(2):
        with (tmp_path / f"{number}.err").open("wb") as errors:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(WORKER), "processes", str(tmp_path)],
                    env={**environment, "PROCESS_ID": str(number)},
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                )
            )
    codes = wait_for_end(processes, tmp_path, timeout_s=180)
    assert codes == [0, 0], [(tmp_path / f"{n}.err").read_text()[-2500:] for n in range(2)]

    def union(name):
        """Returns the records of both processes; each has all records of replicated tables."""
        parts = [dict(np.load(tmp_path / f"{name}.{number}.npz")) for number in range(2)]
        whole = {}
        for column in parts[0]:
            table, is_replicated = column.split(".")[0], column.startswith("day.")
            chosen = parts[:1] if is_replicated else parts
            order = np.argsort(np.concatenate([part[f"{table}.keys"] for part in chosen]))
            whole[column] = np.concatenate([part[column] for part in chosen])[order]
        return whole

    want = union("trained")
    assert all(want[f"{name}.keys"].size for name in TABLES)
    assert_same(union("restored"), want)
    assert_same(union("loaded"), want)
    for num_devices in (None, 3):
        other = collection_of(tables_of(capacity=30), num_devices)
        with ocp.CheckpointManager(tmp_path / "manager") as manager:
            state = manager.restore(5, args=ocp.args.Composite(tables=TablesRestore(other)))["tables"]
        for restored in (state, checkpoint.load([tmp_path / "full", tmp_path / "delta"], other)):
            got = {name: cases.bits(values) for name, values in content(other, restored).items()}
            assert_same(got, want)
            assert int(restored.step) == 5
