"""Inspection of files and folders on disk: every kind, written by the library and by hand; and the command."""

import dataclasses
import json
import os
import struct

import jax.numpy as jnp
import numpy as np
import programs
import pytest

import jaxsok
from jaxsok import __main__ as command_line, inspection
from jaxsok.records import Records

ROWS = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
KEYS = np.arange(40, dtype=np.uint64) * np.uint64(3) - np.uint64(6)  # -6, -3, 0, 3, ... as int64
STATE = {"Adam-m": ROWS * 2, "Adam-v": ROWS * ROWS}
LAST_STEP = np.arange(40, dtype=np.uint32)
FREQUENCY = np.arange(40, dtype=np.uint32) ** 2


def check(table, *, state=(), has_statistics=False, rows=ROWS, keys=KEYS):
    """Compares the report of a file with the arrays."""
    norms = np.linalg.norm(rows.astype(np.float64), axis=1)
    assert (table.num_rows, table.dim) == rows.shape
    assert (table.min_key, table.max_key) == (int(keys.min()), int(keys.max()))
    assert table.num_negative == (keys >= 2**63).sum()
    assert table.norms.min == pytest.approx(norms.min()) and table.norms.max == pytest.approx(norms.max())
    assert sorted(table.states) == sorted(state)
    assert (table.uses is not None) == (table.ages is not None) == has_statistics
    if has_statistics:
        assert table.uses.num_uses == FREQUENCY.sum() and table.ages.last_step == 39


def put_hps(folder, meta=None):
    """Writes the files of HugeCTR's parameter server."""
    folder.mkdir(parents=True)
    KEYS.astype("<u8").tofile(folder / "key")
    ROWS.astype("<f4").tofile(folder / "emb_vector")
    if meta is not None:
        meta.astype("<i8").tofile(folder / "meta")


def put_sok(folder, spelled, name="", keys=KEYS, dtype="float32", with_state=True):
    """Writes the files of SparseOperationKit, whose own headers are blank."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = ["int32", "int64", "uint32", "uint64", "float16", "float32", "float64"]

    def put(end, holds, slot, array):
        words = struct.pack(">I", holds), struct.pack(">I", numbers.index(array.dtype.name))
        (folder / f"{spelled}-{end}").write_bytes(
            name.rjust(256).encode() + words[0] + slot.rjust(32).encode() + words[1] + array.tobytes()
        )

    put("key", 0, "", keys)
    put("weight", 1, "", ROWS.astype(dtype))
    for end, array in STATE.items() if with_state else ():
        put(end, 2, end.split("-")[1], array)


def put_npz(path):
    """Writes a NumPy archive."""
    from jaxsok.interchange import npz

    npz.write_npz(path, [Records(KEYS, ROWS, {"m": ROWS}, LAST_STEP, FREQUENCY)])


def test_hps(tmp_path):
    """The dim follows from the sizes; hotness is a frequency."""
    put_hps(tmp_path / "user")
    found = inspection.inspect(tmp_path / "user")
    assert found.kind == "HPS" and found.tables[0].name == "user"
    check(found.tables[0])
    put_hps(tmp_path / "item", FREQUENCY)
    (item,) = inspection.inspect(tmp_path / "item").tables
    assert item.uses.num_uses == FREQUENCY.sum() and item.ages is None


def test_folders_of_tables(tmp_path):
    """Several HPS tables and files of other kinds are tables named after their files; other files are skipped."""
    put_hps(tmp_path / "user")
    put_hps(tmp_path / "item")
    put_npz(tmp_path / "tag.npz")
    (tmp_path / "notes.md").write_text("hello")
    found = inspection.inspect(tmp_path)
    assert found.kind == "HPS and npz" and [table.name for table in found.tables] == ["item", "tag", "user"]
    assert [table.name for table in inspection.inspect(tmp_path, ["user"]).tables] == ["user"]
    with pytest.raises(ValueError, match=r"got \"usr\", wanted one of \['item', 'tag', 'user'\]"):
        inspection.inspect(tmp_path, ["usr"])
    put_npz(tmp_path / "user.npz")
    with pytest.raises(ValueError, match='two tables "user"'):
        inspection.inspect(tmp_path)


@pytest.mark.parametrize("key_dtype", ["int32", "int64", "uint32", "uint64"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_sok(tmp_path, key_dtype, dtype):
    """Names may be blank or real, state present or absent, tables several; the dim follows from the sizes."""
    keys = KEYS if key_dtype.endswith("64") else np.arange(40)
    put_sok(tmp_path, "user_0", keys=keys.astype(key_dtype), dtype=dtype)
    put_sok(tmp_path, "item_0", "item:0", keys.astype(key_dtype), dtype, with_state=False)
    found = inspection.inspect(tmp_path)
    assert found.kind == "SOK" and [table.name for table in found.tables] == ["item:0", "user_0"]
    rows = ROWS.astype(dtype)
    check(found.tables[0], rows=rows, keys=keys)
    check(found.tables[1], rows=rows, keys=keys, state=("Adam-m", "Adam-v"))
    assert found.tables[1].states["Adam-m"].max == pytest.approx(2 * np.linalg.norm(ROWS, axis=1).max())


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_sok_with_state_of_one_number_a_row(tmp_path, dtype):
    """`write_sok` writes such files for a row-wise optimizer; truncated files are still refused."""
    from jaxsok.interchange import sok

    wide, narrow = np.abs(ROWS), np.arange(len(KEYS), dtype=np.float32)[:, None]
    names = {"m": "Adam-m", "accumulator": "Adagrad-accumulator"}
    records = Records(KEYS, ROWS, {"m": wide, "accumulator": narrow})
    sok.write_sok(tmp_path, "user:0", records, optimizer=names, dtype=dtype)
    (table,) = inspection.inspect(tmp_path).tables
    assert (table.num_rows, table.dim) == ROWS.shape
    assert table.states["Adagrad-accumulator"].max == len(KEYS) - 1
    assert table.states["Adam-m"].max == pytest.approx(np.linalg.norm(ROWS, axis=1).max(), rel=1e-3)
    path = tmp_path / "user_0-Adam-m"
    whole, num_numbers = path.read_bytes(), ROWS.size
    # The state has half the rows, since SOK writes no state of rows that were never trained.
    path.write_bytes(whole[: 296 + (len(whole) - 296) // 2])
    with pytest.raises(ValueError, match=f"after {num_numbers // 2 // ROWS.shape[1]} lines of state"):
        inspection.inspect(tmp_path)


def test_npz(tmp_path):
    """All columns are read."""
    put_npz(tmp_path / "user.npz")
    found = inspection.inspect(tmp_path / "user.npz")
    assert found.kind == "npz"
    check(found.tables[0], state=["m"], has_statistics=True)


def test_columns(tmp_path):
    """All columns are read from a file whose suffix says nothing."""
    pytest.importorskip("pyarrow")
    from jaxsok.interchange import columns

    columns.write_parquet(tmp_path / "user", [Records(KEYS, ROWS, {"m": ROWS}, LAST_STEP, FREQUENCY)])
    found = inspection.inspect(tmp_path / "user")
    assert found.kind == "Parquet"
    check(found.tables[0], state=["m"], has_statistics=True)


def test_damaged_files_are_refused(tmp_path):
    """The error has the reader's message, with file and byte."""
    put_hps(tmp_path / "user")
    (tmp_path / "user" / "emb_vector").write_bytes(ROWS.tobytes()[:-1])
    with pytest.raises(ValueError, match=r"emb_vector.*byte"):
        inspection.inspect(tmp_path / "user")
    put_npz(tmp_path / "item.npz")
    data = (tmp_path / "item.npz").read_bytes()
    (tmp_path / "item.npz").write_bytes(data[:-1])
    with pytest.raises(ValueError, match=r"item\.npz.*byte"):
        inspection.inspect(tmp_path / "item.npz")


def test_the_command(tmp_path, capsys):
    """The command gives text, numbers and a picture."""
    pytest.importorskip("matplotlib")
    put_npz(tmp_path / "user.npz")
    put_npz(tmp_path / "item.npz")
    options = ["--table", "user", "--json", str(tmp_path / "a.json"), "--picture", str(tmp_path / "a.png")]
    assert command_line.main(["inspect", str(tmp_path), *options]) == 0
    found = inspection.inspect(tmp_path, ["user"])
    assert capsys.readouterr().out == f"{found}\n"
    data = json.loads((tmp_path / "a.json").read_text())
    assert data == json.loads(json.dumps(found.to_json(), allow_nan=False)) and data["tables"][0]["num_rows"] == 40
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert command_line.main(["inspect", str(tmp_path), "--table", "usr"]) == 2
    assert "wanted one of" in capsys.readouterr().err


# Checkpoints and exports ----------------------------------------------------------------------------------------------


def two_tables():
    """Returns a collection of two tables; one keeps statistics."""
    adagrad = jaxsok.optim.adagrad(0.1)
    tables = [
        jaxsok.TableSpec("user", 4, adagrad, capacity=64, statistics=True),
        jaxsok.TableSpec("item", 8, adagrad, capacity=64, dtype="bfloat16"),
    ]
    return jaxsok.Collection(tables, [jaxsok.FeatureSpec(table.name, table.name) for table in tables])


def train_steps(collection, num_steps=3):
    """Trains some steps and gives row i of the first table frequency 2 * i + 1 and last step i."""
    state = collection.init(seed=0)
    for i in range(num_steps):
        batch = programs.batch(collection, user=np.array([0, 0, i]), item=np.array([100 + i] * 3))
        state, _ = programs.learn(collection, state, batch)
    (slab,) = state.stores[0].statistics
    number = np.arange(slab.shape[0], dtype=np.uint32)
    store = dataclasses.replace(state.stores[0], statistics=(jnp.asarray(np.stack([number, 2 * number + 1], axis=1)),))
    return dataclasses.replace(state, stores=(store, *state.stores[1:]))


def check_saved(found, collection, state):
    """Compares reports of a saved state with those of its tables."""
    assert found.kind == "jaxsok" and found.facts["step"] == int(state.step) == 3
    assert [table.name for table in found.tables] == ["user", "item"]
    for table in found.tables:
        exported = collection.export_table(state, table.name)
        norms = np.linalg.norm(exported["rows"].astype(np.float64), axis=1)
        assert (table.num_rows, table.dim) == exported["rows"].shape == (3, 4 if table.name == "user" else 8)
        assert (table.min_key, table.max_key) == (exported["keys"].min(), exported["keys"].max())
        assert table.norms.max == pytest.approx(norms.max(), rel=1e-12) and list(table.states) == ["accumulator"]
    user, item = found.tables
    assert user.uses.num_uses == 1 + 3 + 5
    assert (user.ages.first_step, user.ages.last_step, user.ages.clock) == (0, 2, 3)
    assert item.uses is None and item.dtype == "bfloat16"


def test_an_export(tmp_path):
    """The report has the step and the kind of export."""
    pytest.importorskip("pyarrow")
    from jaxsok import checkpoint

    collection = two_tables()
    state = train_steps(collection)
    checkpoint.export_full(tmp_path / "monday", collection, state)
    found = inspection.inspect(tmp_path / "monday")
    check_saved(found, collection, state)
    assert found.facts["kind"] == "full" and "step 3" in str(found)
    manifest = tmp_path / "monday" / "manifest.json"
    for num_bytes in (0, 29, manifest.stat().st_size - 1):  # its files are not those of tables without it
        os.truncate(manifest, num_bytes)
        with pytest.raises(ValueError, match=r"manifest\.json"):
            inspection.inspect(tmp_path / "monday")


def test_an_orbax_checkpoint(tmp_path):
    """A manager's root (its last step), a step, and the tables' own folder are all recognised."""
    ocp = pytest.importorskip("orbax.checkpoint")
    pytest.importorskip("pyarrow")
    from jaxsok import checkpoint

    collection = two_tables()
    with ocp.CheckpointManager(tmp_path / "root", item_names=("tables",)) as manager:
        for num_steps in (1, 3):
            state = train_steps(collection, num_steps)
            manager.save(num_steps, args=ocp.args.Composite(tables=checkpoint.TablesSave(collection, state)))
        manager.wait_until_finished()
    check_saved(inspection.inspect(tmp_path / "root"), collection, state)
    check_saved(inspection.inspect(tmp_path / "root" / "3"), collection, state)
    check_saved(inspection.inspect(tmp_path / "root" / "3" / "tables"), collection, state)
    assert inspection.inspect(tmp_path / "root").facts["folder"] == "3/tables"


def test_a_table_without_rows_has_a_form(tmp_path):
    """Dim, dtype and state come from the manifest; keys that a delta removes are reported."""
    pytest.importorskip("pyarrow")
    from jaxsok import checkpoint

    adagrad = jaxsok.optim.adagrad(0.1)
    table = jaxsok.TableSpec("user", 4, adagrad, capacity=64, dtype="bfloat16", statistics=True)
    collection = jaxsok.Collection([table], [jaxsok.FeatureSpec("user", "user")])
    state, _ = programs.learn(collection, collection.init(seed=0), programs.batch(collection, user=np.arange(3)))
    checkpoint.export_full(tmp_path / "monday", collection, state)
    state, _ = collection.erase(state, "user", np.arange(3))
    checkpoint.export_delta(tmp_path / "tuesday", collection, state, base=tmp_path / "monday")
    found = inspection.inspect(tmp_path / "tuesday")
    (user,) = found.tables
    assert (user.num_rows, user.dim, user.dtype, list(user.states)) == (0, 4, "bfloat16", ["accumulator"])
    assert user.facts == {"optimizer": "adagrad", "keys that are gone": 3} and found.facts["kind"] == "delta"
    assert "keys that are gone 3" in str(found) and found.to_json()["tables"][0]["facts"] == user.facts
