"""Tables for serving from HPS directories, exports, chains and checkpoints: the rows that were written, or a refusal.

Files of HPS are written here byte by byte; a dict holds the rows that a chain should give.
"""

import dataclasses
import functools
import json
import pathlib
import shutil
import tempfile

import checkpoint_cases as cases
import hypothesis
import hypothesis.strategies as st
import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoint_cases import collection_of
from hypothesis import stateful

import jaxsok
from jaxsok import checkpoint
from jaxsok.checkpoint import CorruptFileError
from jaxsok.interchange import files as files_lib
from jaxsok.records import Records
from jaxsok.serving import folders as folders_lib, frozen
from jaxsok.serving.config.values import MODEL_KEYS
from jaxsok.serving.errors import ServingError, UnknownTableError
from jaxsok.serving.folders import open_table

open_delta = functools.partial(open_table, alone=True)

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="eight devices are made of a CPU")
TOP = 2**63


def rows_of(keys, dim, *, generation=0, dtype=np.float32):
    """Returns rows that state their key: [key mod 1000, generation, 0, 1, ...]."""
    keys = np.asarray(keys, np.uint64)
    rows = np.tile(np.arange(dim, dtype=np.float32), (keys.size, 1))
    rows[:, 0] = (keys % np.uint64(1000)).astype(np.float32)
    rows[:, 1] = generation
    return rows.astype(dtype)


def hps(folder, keys, rows):
    """Writes the two files as HugeCTR does: int64 and float32, little-endian, no header."""
    folder.mkdir(exist_ok=True)
    (folder / "key").write_bytes(b"".join(int(key).to_bytes(8, "little", signed=key < 0) for key in keys))
    (folder / "emb_vector").write_bytes(np.asarray(rows, "<f4").tobytes())
    return folder


def table_of(source):
    """Returns {key: row as bytes}; checks that each key occurs once."""
    found = {}
    for records in source.chunks():
        assert records.keys.dtype == np.uint64 and records.rows.shape == (records.num_rows, source.dim)
        assert records.rows.dtype.name == source.dtype and not records.state
        for key, row in zip(records.keys.tolist(), records.rows, strict=True):
            assert key not in found
            found[key] = row.tobytes()
    assert len(found) == source.num_rows
    return found


def expect(keys, rows):
    """Returns arrays in the form of `table_of`."""
    return {int(key): row.tobytes() for key, row in zip(keys, rows, strict=True)}


# HPS -----------------------------------------------------------------------------------------------------------------


@hypothesis.given(keys=st.lists(st.integers(0, 2**64 - 2), min_size=1, max_size=20, unique=True), dim=st.integers(2, 5))
@hypothesis.settings(max_examples=20)
def test_hps_directories(keys, dim):
    with tempfile.TemporaryDirectory() as name:
        signed = [key - 2**64 if key >= TOP else key for key in keys]
        folder = hps(pathlib.Path(name), signed, rows_of(keys, dim))
        source = open_table(folder, table="user", dim=dim)
        assert table_of(source) == table_of(source) == expect(keys, rows_of(keys, dim))
        assert (source.table, source.dtype, source.num_rows) == ("user", "float32", len(keys))
        assert source.uuid is None and source.base is None and list(source.tombstones()) == []
        low = {key % 2**32 for key in keys}
        if len(low) < len(keys):
            with pytest.raises(ValueError, match=r"keys cut to 32 bits: .*a second time"):
                open_table(folder, table="user", dim=dim, key_bits=32)
        else:
            cut = open_table(folder, table="user", dim=dim, key_bits=32)
            assert table_of(cut) == expect([key % 2**32 for key in keys], rows_of(keys, dim))


def test_hps_comes_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(files_lib, "CHUNK_BYTES", 3 * (8 + 2 * 4))
    folder = hps(tmp_path / "user", range(8), rows_of(range(8), 2))
    source = open_table(folder, table="user", dim=2)
    assert [chunk.num_rows for chunk in source] == [3, 3, 2]
    assert len(table_of(open_table(folder, table="user", dim=2, key_bits=32))) == 8


def test_hps_files_that_are_not_whole(tmp_path):
    folder = hps(tmp_path / "user", range(4), rows_of(range(4), 3))
    key, row = (folder / "key").read_bytes(), (folder / "emb_vector").read_bytes()
    for size in range(len(key)):
        (folder / "key").write_bytes(key[:size])
        with pytest.raises(ValueError, match=r"(key|emb_vector): byte \d+: got"):
            open_table(folder, table="user", dim=3)
    (folder / "key").write_bytes(key)
    for size in (*range(0, len(row), 5), len(row) + 4):
        (folder / "emb_vector").write_bytes((row + row)[:size])
        with pytest.raises(ValueError, match=r"emb_vector: byte \d+: got"):
            open_table(folder, table="user", dim=3)
    (folder / "emb_vector").write_bytes(row)
    assert open_table(folder, table="user", dim=3).num_rows == 4
    with pytest.raises(ValueError, match=r"emb_vector: byte 48: got .*truncated, or of another dim"):
        open_table(folder, table="user", dim=4)
    for name in ("key", "emb_vector"):
        data = (folder / name).read_bytes()
        (folder / name).unlink()
        with pytest.raises(FileNotFoundError, match=f"{name}: there is no such file"):
            open_table(folder, table="user", dim=3)
        (folder / name).write_bytes(data)


def test_hps_hotness(tmp_path):
    """The hotness of keys comes from `meta`, if the file exists and it is asked for."""
    folder = hps(tmp_path / "user", [5, 6, 7], rows_of([5, 6, 7], 2))
    source = open_table(folder, table="user", dim=2, hotness=True)
    assert [records.frequency for records in source] == [None]
    np.array([30, 0, 2**32 - 1], "<i8").tofile(folder / "meta")
    source = open_table(folder, table="user", dim=2, hotness=True)
    (records,) = source
    assert records.frequency.tolist() == [30, 0, 2**32 - 1] and records.keys.tolist() == [5, 6, 7]
    for wrong, message in (
        (np.array([], "<i8"), "meta: byte 0"),
        (np.array([1, 2], "<i8"), r"meta: byte 16: got .*16 bytes.*, wanted 24 bytes"),
        (np.array([1, 2, 3], "<i4"), r"meta: byte 12: .*wanted 24 bytes"),
        (np.array([1, -2, 3], "<i8"), r"meta: byte 8: hotness: got -2, wanted 0 to 2\*\*32 - 1"),
        (np.array([1, 2, 2**32], "<i8"), r"meta: byte 16: hotness: got 4294967296"),
    ):
        wrong.tofile(folder / "meta")
        with pytest.raises(
            ValueError, match=f"{message}.*; take the file away, or give a model with a dynamic cache init_ec: false"
        ):
            open_table(folder, table="user", dim=2, hotness=True)
        assert [records.frequency for records in open_table(folder, table="user", dim=2)] == [None]


def test_hps_keys_that_cannot_be(tmp_path):
    with pytest.raises(ValueError, match=r"key: byte 24: key: got 7 a second time"):
        open_table(hps(tmp_path / "twice", [1, 7, 3, 7], rows_of([1, 7, 3, 7], 2)), table="user", dim=2)
    with pytest.raises(ValueError, match=r"key: byte 8: key: got 2\*\*64 - 1 \(int64 -1\)"):
        open_table(hps(tmp_path / "padding", [1, -1], rows_of([1, 2], 2)), table="user", dim=2)
    folder = hps(tmp_path / "cut", [5, 2**32 + 6, 2**32 + 5], rows_of([1, 2, 3], 2))
    assert open_table(folder, table="user", dim=2).num_rows == 3
    with pytest.raises(ValueError, match=r"open: keys cut to 32 bits: .*key: byte 16: key: got 5 a second time"):
        open_table(folder, table="user", dim=2, key_bits=32, op="open")


@pytest.mark.parametrize("dim", [0, -1, 1.5, True, None])
def test_a_dim_that_cannot_be(tmp_path, dim):
    folder = hps(tmp_path / "user", [1], rows_of([1], 2))
    with pytest.raises(ValueError, match="open_table: dim: got"):
        open_table(folder, table="user", dim=dim)


# Exports -------------------------------------------------------------------------------------------------------------

CAPACITY = 64


def specs(dtype="float32", names=("user", "item")):
    """Returns small tables with optimizer state, which serving ignores."""
    options = {"statistics": True, "capacity": CAPACITY, "dtype": dtype}
    return [jaxsok.TableSpec(name, 3, cases.ADAM, **options) for name in names]


def enter_rows(collection, state, table, keys, clock, *, generation=0):
    """Returns a state with rows that state their key."""
    keys = np.asarray(keys, np.uint64)
    dtype = ml_dtypes.bfloat16 if "bfloat16" in {spec.dtype for spec in collection.stores} else np.float32
    rows = rows_of(keys, 3, generation=generation, dtype=dtype)
    return collection.import_table(state, table, Records(keys, rows), clock=np.uint32(clock))


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    """Writes a full export and two deltas; returns the rows of the table "user" after each."""
    folder = tmp_path_factory.mktemp("chain")
    collection = collection_of(specs())
    state = collection.init(seed=1)
    keys = [*range(0, 30), 2**32 + 100, TOP + 3]
    held = [expect(keys, rows_of(keys, 3))]
    state = enter_rows(collection, state, "user", keys, 1)
    state = enter_rows(collection, state, "item", range(9), 1)
    checkpoint.export_full(folder / "full", collection, state, clock=2)
    # Replaced: 0 to 4; gone: 10, 11 and a large key; new: 40.
    state = enter_rows(collection, state, "user", [*range(5), 40], 3, generation=1)
    state, _ = collection.erase(state, "user", np.array([10, 11, TOP + 3], np.uint64))
    changed = expect([*range(5), 40], rows_of([*range(5), 40], 3, generation=1))
    held.append({key: row for key, row in (held[0] | changed).items() if key not in (10, 11, TOP + 3)})
    checkpoint.export_delta(folder / "first", collection, state, folder / "full", clock=4)
    # Replaced again: 0; back: 10; new and gone again: 40.
    state = enter_rows(collection, state, "user", [0, 10], 5, generation=2)
    state, _ = collection.erase(state, "user", np.array([40], np.uint64))
    changed = expect([0, 10], rows_of([0, 10], 3, generation=2))
    held.append({key: row for key, row in (held[1] | changed).items() if key != 40})
    checkpoint.export_delta(folder / "second", collection, state, folder / "first", clock=6)
    return folder, held


def test_an_export_of_all_rows(export):
    folder, held = export
    source = open_table(folder / "full", table="user", dim=3)
    assert table_of(source) == held[0] and source.num_rows == 32 and source.base is None
    assert source.uuid == json.loads((folder / "full" / "manifest.json").read_text())["uuid"]
    assert open_table(str(folder / "full"), table="item", dim=3).num_rows == 9
    for records in source.chunks():
        assert records.frequency.shape == records.last_step.shape == records.keys.shape  # a cache is filled by it


def test_a_chain_is_what_its_last_link_left(export):
    folder, held = export
    for number, name in enumerate(("full", "first", "second")):
        assert table_of(open_table(folder / name, table="user", dim=3)) == held[number]
        assert open_table(folder / name, table="item", dim=3).num_rows == 9


def test_a_delta_alone(export):
    """A delta's removed keys and new rows, applied to the base, give the rows that follow."""
    folder, held = export
    before = open_table(folder / "full", table="user", dim=3)
    for number, name in enumerate(("first", "second"), 1):
        delta = open_delta(folder / name, table="user", dim=3)
        gone = np.concatenate(list(delta.tombstones()))
        assert gone.dtype == np.uint64 and gone.size > 0
        assert delta.base == before.uuid
        assert {key: row for key, row in held[number - 1].items() if key not in gone.tolist()} | table_of(
            delta
        ) == held[number]
        before = open_table(folder / name, table="user", dim=3)
        assert before.uuid == delta.uuid and delta.num_rows < before.num_rows
    assert open_delta(folder / "full", table="user", dim=3).base is None


def test_a_delta_of_an_hps_directory(tmp_path):
    folder = hps(tmp_path / "user", [1], rows_of([1], 2))
    assert open_delta(folder, table="user", dim=2).base is None


@pytest.mark.parametrize("opens", [open_table, open_delta])
def test_another_table_or_dim(export, opens):
    folder, _ = export
    with pytest.raises(
        UnknownTableError, match=r"table: got 'ad', wanted one of \['item', 'user'\], the tables of \".*"
    ):
        opens(folder / "first", table="ad", dim=3)
    with pytest.raises(ServingError, match=r'op: table "user": dim: got 3 in ".*full|first", wanted 4'):
        opens(folder / "first", table="user", dim=4, op="op")


def test_a_chain_that_is_not_there(export, tmp_path):
    folder, _ = export
    shutil.copytree(folder / "first", tmp_path / "first")
    with pytest.raises(ValueError, match=r'got the delta ".*first" alone, whose base ".*full" is not there'):
        open_table(tmp_path / "first", table="user", dim=3)
    assert open_delta(tmp_path / "first", table="user", dim=3).num_rows == 6


@pytest.mark.parametrize("name", ["full", "first", "second"])
def test_any_damaged_byte_is_found_before_the_first_row(export, tmp_path, name):
    folder, _ = export
    shutil.copytree(folder, tmp_path / "chain")
    entry = json.loads((tmp_path / "chain" / name / "manifest.json").read_text())["tables"]["user"]
    files = [tmp_path / "chain" / name / item["name"] for kind in ("files", "tombstones") for item in entry[kind]]
    assert len(files) == (1 if name == "full" else 2)
    rng = np.random.default_rng(0)
    for path in [*files, tmp_path / "chain" / name / "manifest.json"]:
        data = path.read_bytes()
        for place in (0, len(data) - 1, *rng.integers(0, len(data), 8)):
            damaged = bytearray(data)
            damaged[place] ^= 0x10
            path.write_bytes(damaged)
            with pytest.raises(CorruptFileError, match=r'file ".*", byte \d+: got'):
                open_table(tmp_path / "chain" / "second", table="user", dim=3)
        path.write_bytes(data[:-3])
        with pytest.raises(CorruptFileError, match=r'file ".*", byte \d+: got'):
            open_table(tmp_path / "chain" / "second", table="user", dim=3)
        path.write_bytes(data)
    files[-1].unlink()
    with pytest.raises(CorruptFileError, match="got no such file"):
        open_table(tmp_path / "chain" / "second", table="user", dim=3)
    # The other table has files of its own.
    assert open_table(tmp_path / "chain" / "second", table="item", dim=3).num_rows == 9


def test_a_file_that_changes_after_it_was_opened(export, tmp_path):
    folder, _ = export
    shutil.copytree(folder / "full", tmp_path / "full")
    source = open_table(tmp_path / "full", table="user", dim=3)
    (path,) = (tmp_path / "full").glob("*0000.*.arrow")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptFileError, match="checksum"):
        list(source.chunks())


def test_a_delta_removes_keys_before_its_rows_come_in():
    """A key that one delta removes and has a row for is there, unless a later delta removes it."""
    first, second = np.array([7, 9], np.uint64), np.array([8], np.uint64)
    named, are_live, are_gone = folders_lib._find_last([first, second], [np.array([9, 5], np.uint64), first[:1]])
    assert named.tolist() == [5, 7, 8, 9]
    assert [mask.tolist() for mask in are_live] == [[False, True], [True]]
    assert [mask.tolist() for mask in are_gone] == [[False, True], [True]]


@pytest.mark.parametrize("bound", ["of their own", "of the host"])
def test_deltas_are_held_by_their_size_in_memory(export, tmp_path, monkeypatch, bound):
    """Compressed files are smaller than what they become: what counts are the rows."""
    folder, held = export
    shutil.copytree(folder, tmp_path / "chain")
    if bound == "of their own":
        monkeypatch.setattr(folders_lib, "HELD_BYTES", 15)  # less than a row of either table
    else:
        monkeypatch.setattr(folders_lib.host_limits, "available_bytes", lambda: 60)
    delta = open_delta(tmp_path / "chain" / "second", table="user", dim=3)
    shutil.rmtree(tmp_path / "chain" / "second")
    with pytest.raises(CorruptFileError, match="got no such file"):
        list(delta.chunks())


@pytest.mark.parametrize("is_held", [False, True])
def test_deltas_are_read_once_where_they_are_held(export, tmp_path, monkeypatch, is_held):
    folder, held = export
    shutil.copytree(folder, tmp_path / "chain")
    monkeypatch.setattr(folders_lib, "HELD_BYTES", 2**20 if is_held else 0)
    chain = open_table(tmp_path / "chain" / "second", table="user", dim=3)
    delta = open_delta(tmp_path / "chain" / "second", table="user", dim=3)
    assert table_of(chain) == held[2]
    for name in ("first", "second"):
        shutil.rmtree(tmp_path / "chain" / name)
    if is_held:
        assert table_of(chain) == held[2] and np.concatenate(list(chain.keys())).tolist() == list(table_of(chain))
        assert table_of(delta).keys() == {0, 10}
    else:
        with pytest.raises(CorruptFileError, match="got no such file"):
            list(delta.chunks())


def test_keys_of_32_bits(export, tmp_path):
    """Keys of 32 bits are the low bits; keys that a chain removed are compared before the high bits are dropped."""
    folder, held = export
    for number, name in enumerate(("full", "first", "second")):
        if number == 0:
            # TOP + 3 and 3 have the same low bits, as long as both are there.
            with pytest.raises(ValueError, match=r'keys cut to 32 bits: ".*full": table "user": row \d+: key: got 3 a'):
                open_table(folder / name, table="user", dim=3, key_bits=32)
        else:
            source = open_table(folder / name, table="user", dim=3, key_bits=32)
            assert table_of(source) == {key % 2**32: row for key, row in held[number].items()}
            assert source.uuid is None  # no delta follows: of its keys alone it cannot be known which rows they replace
    with pytest.raises(
        ServingError, match=r"source: got the delta .*first\" with keys of more than 32 bits, wanted a full"
    ):
        open_delta(folder / "first", table="user", dim=3, key_bits=32)


def test_rows_of_sixteen_bits_and_links_that_differ(tmp_path):
    """Rows of bfloat16 stay so; in a chain with float32 they become float32, exactly."""
    narrow, wide = collection_of(specs("bfloat16", ("user",))), collection_of(specs("float32", ("user",)))
    state = enter_rows(narrow, narrow.init(seed=1), "user", range(8), 1)
    checkpoint.export_full(tmp_path / "full", narrow, state, clock=1)
    source = open_table(tmp_path / "full", table="user", dim=3)
    assert source.dtype == "bfloat16"
    assert table_of(source) == expect(range(8), rows_of(range(8), 3, dtype=ml_dtypes.bfloat16))
    state = checkpoint.load(tmp_path / "full", wide)
    state = enter_rows(wide, state, "user", [3, 500], 2, generation=1)
    checkpoint.export_delta(tmp_path / "delta", wide, state, tmp_path / "full", clock=2)
    source = open_table(tmp_path / "delta", table="user", dim=3)
    changed = expect([3, 500], rows_of([3, 500], 3, generation=1))
    assert source.dtype == "float32" and table_of(source) == expect(range(8), rows_of(range(8), 3)) | changed


def test_a_table_without_rows(tmp_path):
    collection = collection_of(specs())
    checkpoint.export_full(tmp_path / "full", collection, collection.init(), clock=1)
    source = open_table(tmp_path / "full", table="user", dim=3)
    assert source.num_rows == 0 and list(source.chunks()) == []


# Checkpoints ---------------------------------------------------------------------------------------------------------


def test_a_step_of_an_orbax_checkpoint(tmp_path):
    collection = collection_of(specs())
    state = enter_rows(collection, collection.init(seed=3), "user", range(30), 1)
    options = ocp.CheckpointManagerOptions(max_to_keep=3)
    with ocp.CheckpointManager(tmp_path / "run", options=options) as manager:
        for step in (1, 2):
            items = {
                "tables": checkpoint.TablesSave(collection, state),
                "params": ocp.args.StandardSave({"w": np.ones(3, np.float32)}),
            }
            if step == 2:
                items["more"] = checkpoint.TablesSave(collection, state)
            manager.save(step, args=ocp.args.Composite(**items))
            manager.wait_until_finished()
    source = open_table(tmp_path / "run" / "1", table="user", dim=3)
    assert table_of(source) == expect(range(30), rows_of(range(30), 3))
    assert source.path.name == "tables" and source.base is None
    assert table_of(open_table(tmp_path / "run" / "2" / "more", table="user", dim=3)) == table_of(source)
    with pytest.raises(ServingError, match=r"with saved tables in \['more', 'tables'\], wanted one folder of them"):
        open_table(tmp_path / "run" / "2", table="user", dim=3)
    with pytest.raises(ServingError, match=r"which has checkpoints in \['1', '2'\], wanted one of them; name the step"):
        open_table(tmp_path / "run", table="user", dim=3)
    # A checkpoint that Orbax has not committed does not exist.
    (tmp_path / "run" / "1" / "tables").rename(tmp_path / "run" / "1" / "tables.orbax-checkpoint-tmp-7")
    with pytest.raises(FileNotFoundError, match="which has none of that"):
        open_table(tmp_path / "run" / "1", table="user", dim=3)


def test_what_is_no_table(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for name, got in (("absent", "is not there"), ("file", "is a file"), ("empty", "has none of that")):
        with pytest.raises(
            FileNotFoundError, match=rf'open: table "user": path: got ".*{name}", which {got}, wanted a folder with the'
        ):
            open_table(tmp_path / name, table="user", dim=3, op="open")


# Frozen --------------------------------------------------------------------------------------------------------------


def test_sources_are_what_frozen_tables_are_made_of(export, tmp_path):
    folder, held = export
    user = open_table(folder / "second", table="user", dim=3)
    item = open_table(hps(tmp_path / "item", [0, 7], rows_of([0, 7], 2)), table="item", dim=2)
    tables, maps = frozen.freeze_records(
        [(frozen.FrozenTable(source.table, source.dim), source) for source in (user, item)]
    )
    keys = np.array(sorted(held[2]), np.uint64)
    stores = {store[0].name: number for number, store in enumerate(tables.spec.stores)}
    rows = np.asarray(tables.stores[stores["user"]].rows)[maps[stores["user"]].find(0, keys)]
    assert [row.tobytes() for row in rows] == [held[2][int(key)] for key in keys]


def test_row_dtypes_of_the_configuration_are_those_of_frozen_tables():
    row_dtype = MODEL_KEYS["jaxsok"]["row_dtype"].kind
    assert [row_dtype.parse(dtype) for dtype in frozen.DTYPES] == list(frozen.DTYPES)


# Any life ------------------------------------------------------------------------------------------------------------


class Life(stateful.RuleBasedStateMachine):
    """A state machine: rows enter, change and leave, and are exported; chains and deltas lead to the dict's rows."""

    keys = st.lists(
        st.sampled_from([*range(20), 2**32, 2**40 + 1, TOP, 2**64 - 2]), min_size=1, max_size=8, unique=True
    )

    def __init__(self):
        super().__init__()
        self.collection = collection_of(specs(names=("user",)))
        self.state = self.collection.init(seed=5)
        self.folder = tempfile.TemporaryDirectory()
        self.table, self.links, self.exported, self.clock = {}, [], {}, 1

    def teardown(self):
        self.folder.cleanup()

    @stateful.rule(keys=keys)
    def enter(self, keys):
        self.clock += 1
        self.state = enter_rows(self.collection, self.state, "user", keys, self.clock, generation=self.clock)
        self.table |= expect(keys, rows_of(keys, 3, generation=self.clock))

    @stateful.rule(keys=keys)
    def erase(self, keys):
        self.state, _ = self.collection.erase(self.state, "user", np.array(keys, np.uint64))
        self.table = {key: row for key, row in self.table.items() if key not in keys}

    @stateful.rule()
    def export(self):
        path = pathlib.Path(self.folder.name) / f"link{len(self.links)}"
        self.clock += 1
        if not self.links:
            exported = checkpoint.export_full(path, self.collection, self.state, clock=self.clock)
        else:
            base = self.links[-1]
            exported = checkpoint.export_delta(path, self.collection, self.state, base.path, clock=self.clock)
            delta = open_delta(path, table="user", dim=3)
            for keys in delta.tombstones():
                self.exported = {key: row for key, row in self.exported.items() if key not in keys.tolist()}
            assert delta.base == base.uuid
            assert self.exported | table_of(delta) == self.table
        source = open_table(path, table="user", dim=3)
        assert table_of(source) == self.table and source.uuid == exported.uuid
        self.links.append(exported)
        self.exported = dict(self.table)


TestLife = Life.TestCase
TestLife.settings = hypothesis.settings(max_examples=6, stateful_step_count=10)


def test_sources_are_values(tmp_path):
    source = open_table(hps(tmp_path / "user", [1], rows_of([1], 2)), table="user", dim=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        source.num_rows = 3
