"""Checkpoints of TorchRec and dumps of dynamicemb: rows and optimizer state are loaded, and training continues.

tests/golden/torchrec holds a table of every sharding type, in which each number encodes its place. Tests with the
real packages are skipped where torch, torchrec or fbgemm-gpu-cpu are missing.
"""

import dataclasses
import io
import pathlib
import pickle
import shutil
import tracemalloc
import zipfile

import jax
import numpy as np
import pytest

import jaxsok
from jaxsok import __main__ as command_line, checkpoint, optim
from jaxsok.interchange import torch_files, torchrec

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "torchrec"
ROWS, DIM = 5, 8
ROWWISE, ADAGRAD = optim.rowwise_adagrad(0.1), optim.adagrad(0.1, 0.0, 1e-8, eps_in_sqrt=False)
OPTIMIZERS = {"tw": optim.sgd(0.1), "rw": ROWWISE, "cw": ADAGRAD, "twrw": ADAGRAD, "dp": ADAGRAD, "seq": ROWWISE}
NUMBERS = np.arange(ROWS)[:, None] + np.arange(DIM) / 16


def collection_of(optimizers, dim=DIM, **options):
    tables = [jaxsok.TableSpec(name, dim, optimizer, capacity=8) for name, optimizer in optimizers.items()]
    return jaxsok.Collection(tables, [], **options)


def read(folder, table, optimizer=None):
    """Loads a table and returns its export."""
    options = {"with_state": optimizer is not None}
    collection = collection_of({"table": optimizer or optim.sgd(0.1)})
    state = torchrec.load(collection, collection.init(), folder, {"table": table}, **options)
    return collection.export_table(state, "table")


def is_whole(exported, columns=slice(0, DIM), state=None):
    """Compares a table with the numbers of the golden checkpoint, whatever the order of rows."""
    order = np.argsort(exported["keys"])
    assert exported["keys"][order].tolist() == list(range(ROWS))
    np.testing.assert_array_equal(exported["rows"][order], NUMBERS[:, columns])
    for array in exported["state"].values():
        np.testing.assert_array_equal(array[order], 100 + NUMBERS[:, : array.shape[1]] if state is None else state)


@pytest.mark.parametrize("num_devices", [1, 4])
def test_every_sharding_type(num_devices):
    """Chunks by rows, columns and both become whole rows, on any mesh."""
    if len(jax.devices()) < num_devices:
        pytest.skip(f"needs {num_devices} devices")
    options = {}
    if num_devices > 1:
        types = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((num_devices,), ("data",), types, devices=jax.devices()[:num_devices])
        options = {"mesh": mesh, "axis": "data"}
    collection = collection_of(OPTIMIZERS, **options)
    state = torchrec.load(collection, collection.init(), GOLDEN, step=500, chunk_rows=2)
    for table in OPTIMIZERS:
        is_whole(collection.export_table(state, table))
    assert int(state.step) == 500


@pytest.mark.parametrize("table", ["twcw", "grid"])
def test_blocks_of_columns(table):
    """Blocks with rowwise state of their own become tables; as one table they are refused by name."""
    halves = {"left": f"{table}[0:4]", "right": f"{table}[4:8]"}
    collection = collection_of(dict.fromkeys(halves, ROWWISE), dim=4)
    state = torchrec.load(collection, collection.init(), GOLDEN, halves)
    for i, half in enumerate(halves):
        accumulators = 100 + ROWS * i + np.arange(ROWS)[:, None]
        is_whole(collection.export_table(state, half), slice(4 * i, 4 * i + 4), accumulators)
    with pytest.raises(ValueError, match=rf'table "{table}": got one number of state a row .* "{table}\[0:4\]"'):
        read(GOLDEN, table, ROWWISE)
    is_whole(read(GOLDEN, table))


def test_chunks_that_overlap_are_refused():
    """One chunk covers what another lacks, so that the numbers are as many as wanted."""
    tensor = torch_files.read_tensors("load", GOLDEN)["model.bags.embedding_bags.rw.weight"]
    chunks = dict(sorted(tensor.chunks.items()))
    row, column = list(chunks)[1]
    chunks[row - 1, column] = chunks.pop((row, column))
    with pytest.raises(
        ValueError, match=r'rw.weight": got chunks with 40 numbers of the block .*, wanted 40, each once'
    ):
        dataclasses.replace(tensor, chunks=chunks).read()


def test_names_that_differ_in_punctuation_alone(tmp_path):
    """Two tables of a folder may be called so; each finds its own files."""
    rows = np.arange(len(KEYS) * 3.0).reshape(-1, 3)
    dump(tmp_path, "user-age", KEYS, rows)
    dump(tmp_path, "user_age", KEYS, rows + 100)
    collection = jaxsok.Collection(torchrec.declare(tmp_path), [])
    state = torchrec.load(collection, collection.init(), tmp_path)
    for name, wanted in (("user-age", rows), ("user_age", rows + 100)):
        np.testing.assert_array_equal(collection.rows_of(state, name, KEYS)[0], wanted)


def test_state_beyond_float32_is_refused():
    state = np.array([[1.0], [1e300]])
    saved = torchrec._Saved(
        2,
        DIM,
        np.dtype(np.float32),
        {"momentum1": 1},
        lambda *_: iter([(np.arange(2), NUMBERS[:2], {"momentum1": state})]),
    )
    chunks = torchrec._records("load", "table", saved, ROWWISE, None)
    with pytest.raises(ValueError, match='load: table "table": accumulator: got a number beyond the range of float32'):
        next(iter(chunks))


@pytest.mark.parametrize("table", OPTIMIZERS)
def test_archives_are_read_by_themselves(table, monkeypatch):
    """A chunk is an archive among others in its file, and zipfile refuses some if it sees those before them.

    Since its checks of October 2025 (python/cpython#139700) it looks for the end of an archive in the one before it.
    """
    seen = []

    class Archive(zipfile.ZipFile):
        def __init__(self, file):
            file.seek(0)
            seen.append(file.read())
            super().__init__(file)

    monkeypatch.setattr(zipfile, "ZipFile", Archive)
    is_whole(read(GOLDEN, table))
    assert seen and all(each.startswith(b"PK\3\4") and each.count(b"PK\5\6") == 1 for each in seen)


def test_declared_from_the_files(tmp_path, capsys):
    """The command needs no declarations, and its export loads into a collection with features."""
    assert command_line.main(["import", "torchrec", str(GOLDEN), str(tmp_path / "out"), "--step", "7"]) == 0
    assert "grid[4:8]: 5 rows, float32[4], rowwise_adagrad" in capsys.readouterr().out
    tables = [jaxsok.TableSpec("cw", DIM, optim.adagrad(0.5), capacity=8)]
    collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec("item", table="cw")])
    state = checkpoint.load(tmp_path / "out", collection, tables=["cw"])
    is_whole(collection.export_table(state, "cw"))
    renamed = ["import", "torchrec", str(GOLDEN), str(tmp_path / "renamed"), "--step", "7", "--table", "item", "cw"]
    assert command_line.main(renamed) == 0
    assert "item: 5 rows" in capsys.readouterr().out
    spec = tmp_path / "tables.py"
    spec.write_text('import jaxsok\ntables = [jaxsok.TableSpec("item", 8, jaxsok.optim.rowwise_adagrad(0.1))]\n')
    arguments = [
        "import",
        "torchrec",
        str(GOLDEN),
        str(tmp_path / "other"),
        "--spec",
        str(spec),
        "--table",
        "item",
        "rw",
    ]
    assert command_line.main(arguments) == 0
    assert capsys.readouterr().out == "item: 5 rows, float32[8], rowwise_adagrad\n"
    assert command_line.main([*arguments[:6], "--table", "user", "rw"]) == 2
    assert "tables: got 'user', wanted some of ['item']" in capsys.readouterr().err
    spec.write_text(spec.read_text().replace("(0.1)", "(0.1), capacity=2, max_capacity=2"))
    assert command_line.main([*arguments[:3], str(tmp_path / "third"), *arguments[4:]]) == 2
    assert "max_capacity, 2" in capsys.readouterr().err and not (tmp_path / "third").exists()


def test_dense_tensors():
    """Parameters of the dense part come with their optimizer state; tables do not."""
    found = torchrec.read_dense(GOLDEN)
    assert found["model.over.weight"].tolist() == [[7, 7]] * 3
    assert found["optimizer.state.over.weight.step"] == 500
    assert not any("embedding" in name for name in found)


REFUSED = {
    "momentum": ("rw", optim.sgd(0.1, momentum=0.9), "optim.sgd with state .'trace'.*wanted one of"),
    "another optimizer": ("rw", optim.lamb(0.1), "optim.lamb .* continues no state of TorchRec exactly"),
    "state that is left over": ("rw", optim.sgd(0.1), "got state {'momentum1': 1} .* wanted {} of optim.sgd"),
    "state of another width": ("rw", ADAGRAD, "wanted {'accumulator': 8}"),
    "state that is missing": ("tw", ROWWISE, r"got state \{\} in the files \(numbers a row\)"),
    "eps under the root": ("cw", optim.adagrad(0.1), "wanted eps_in_sqrt=False"),
    "an unknown table": ("user", ROWWISE, r'got "user", of which there are \[\], wanted one of'),
    "columns that are not there": ("tw[4:9]", None, r"got columns \[4:9\], wanted some of 8"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_exact_is_refused(case):
    """State that cannot continue exactly is refused by name, before anything changes."""
    table, optimizer, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        read(GOLDEN, table, optimizer)


class Fake:
    """A tensor of a checkpoint in one chunk."""

    def __init__(self, name, numbers):
        self.op, self.name, self.numbers = "fake", name, np.float32(numbers)
        self.shape, self.dtype, self.chunks = self.numbers.shape, self.numbers.dtype, {(0, 0): None}

    def read(self, *ranges):
        return self.numbers[tuple(slice(*ends) for ends in ranges)]


def test_tables_of_one_name(monkeypatch):
    """Two collections may have tables of the same name; the path distinguishes them and their state."""
    names = [f"{arch}.embedding_bags.user.weight" for arch in ("left.bags", "right.bags")]
    numbers = {f"model.{name}": NUMBERS + 1000 * i for i, name in enumerate(names)}
    numbers |= {f"opt.state.{name}.user.momentum1": 100 + np.arange(ROWS) + 1000 * i for i, name in enumerate(names)}
    tensors = {name: Fake(name, numbers[name]) for name in reversed(numbers)}
    monkeypatch.setattr(torchrec, "read_tensors", lambda op, folder: tensors)
    found = read(GOLDEN, "model.right.bags.embedding_bags.user", ROWWISE)
    order = np.argsort(found["keys"])
    np.testing.assert_array_equal(found["rows"][order], NUMBERS + 1000)
    np.testing.assert_array_equal(found["state"]["accumulator"][order, 0], 1100 + np.arange(ROWS))
    assert [spec.name for spec in torchrec.declare(GOLDEN)] == [f"model.{name[:-7]}" for name in reversed(names)]
    with pytest.raises(ValueError, match=r'got "user", of which there are .*left.*right'):
        read(GOLDEN, "user", ROWWISE)


@pytest.mark.parametrize("name", ["adam", "adamw", "rowwise_adam"])
def test_moments(monkeypatch, name):
    """The fused Adams keep both moments; those of a dense Adam, which moves all rows, are refused."""
    weight, optimizer = "model.bags.embedding_bags.user.weight", getattr(optim, name)(0.1)
    second = np.arange(ROWS) if name == "rowwise_adam" else NUMBERS + 200
    fused = {"user.momentum1": NUMBERS + 100, "user.exp_avg_sq": second}
    dense = {"exp_avg": NUMBERS + 100, "exp_avg_sq": second, "step": 500.0}
    for states in (fused, dense):
        numbers = {weight: NUMBERS} | {f"opt.state.{weight[6:]}.{state}": array for state, array in states.items()}
        tensors = {path: Fake(path, array) for path, array in numbers.items()}
        monkeypatch.setattr(torchrec, "read_tensors", lambda op, folder, tensors=tensors: tensors)
        collection = collection_of({"user": optimizer})
        if states is dense:
            with pytest.raises(ValueError, match=r"got state {'dense exp_avg': 8"):
                torchrec.load(collection, collection.init(), GOLDEN, step=500)
        else:
            state = torchrec.load(collection, collection.init(), GOLDEN, step=500)
            found = collection.export_table(state, "user")
            order = np.argsort(found["keys"])
            np.testing.assert_array_equal(found["state"]["m"][order], NUMBERS + 100)
            np.testing.assert_array_equal(found["state"]["v"][order], second.reshape(ROWS, -1))
            assert torchrec.declare(GOLDEN)[0].optimizer.name == name.replace("adamw", "adam")


def test_adam_needs_the_step():
    """The files have no number of updates, which Adam needs for its bias correction."""
    collection = collection_of({"rw": optim.adam(0.1)})
    with pytest.raises(ValueError, match='table "rw": step: got None, wanted the number of updates'):
        torchrec.load(collection, collection.init(), GOLDEN)


def test_nothing_of_a_pickle_runs(tmp_path):
    """A pickle that would run a program is refused, and none of its functions is called."""
    shutil.copytree(GOLDEN, tmp_path / "there")

    class Hostile:
        def __reduce__(self):
            return exec, (f"open({str(tmp_path / 'ran')!r}, 'w')",)

    (tmp_path / "there" / ".metadata").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(ValueError, match="wanted the metadata of a checkpoint"):
        torchrec.declare(tmp_path / "there")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "metadata",
    [
        b"\x80\x02Nr\xff\xff\xff\x1f.",  # a place in a memo of half a billion
        b"\x80\x02})" + 40 * b"2\x86" + b"Ns.",  # as the key of a dict, a tuple of itself twice, 40 deep
        b"\x80\x02})" + 40 * b"2\x86ctorch\nSize\nR" + b"Ns.",
        b"\x80\x05\x96" + (2**28).to_bytes(8, "little") + b".",  # an array of bytes, of 256 MiB
        pickle.dumps({frozenset({1}): None}),  # two chains of them would be compared for ever
        b"\x80\x02ctorch\nSize\n(" + 100 * b"K\x01" + b"t\x85R.",  # a torch.Size of 100 sizes
    ],
)
def test_pickles_that_would_take_all_memory_or_time(metadata, tmp_path):
    """They are refused in no time and no memory, whatever their numbers say."""
    (tmp_path / ".metadata").write_bytes(metadata)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="wanted the metadata of a checkpoint") as refused:
            torchrec.declare(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24 and len(str(refused.value)) < 1000
    finally:
        tracemalloc.stop()


def test_chunks_that_are_compressed(tmp_path):
    """torch.save compresses nothing, and a small file could become a large pickle."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(" " * (1 << 20)))
    (tmp_path / "chunk").write_bytes(made.getvalue())
    place = (4,), tmp_path / "chunk", 0, len(made.getvalue())
    tensor = torch_files.Tensor("read", "weight", np.dtype(np.float32), (4,), {(0,): place})
    with pytest.raises(ValueError, match=r"got ValueError..compressed entries.., wanted an archive of torch.save"):
        tensor.read()


def test_damaged_folders(tmp_path):
    """Truncated and missing files are named when the folder is opened, damaged chunks when they are read."""
    folder = shutil.copytree(GOLDEN, tmp_path / "there")
    chunks = torch_files.read_tensors("read", folder)["model.bags.embedding_bags.tw.weight"].chunks
    _, path, begin, end = chunks[0, 0]
    whole = path.read_bytes()
    path.write_bytes(whole[:begin] + b"x" * (end - begin) + whole[end:])
    with pytest.raises(ValueError, match=rf'byte {begin}: "model.*wanted an archive of torch.save'):
        read(folder, "tw")
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=rf"byte {len(whole) - 1}: got the end of the file"):
        read(folder, "rw")
    path.unlink()
    with pytest.raises(FileNotFoundError, match=str(path)):
        read(folder, "rw")
    with pytest.raises(FileNotFoundError, match=r"got neither \.metadata nor"):
        torchrec.declare(tmp_path)


# dynamicemb ----------------------------------------------------------------------------------------------------------


def dump(folder, table, keys, rows, state=None, state_file="emb_opt_values"):
    """Writes two ranks with the names and layouts of dynamicemb's files."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(2):
        mine = keys % 2 == rank
        arrays = {"emb_keys": keys[mine].astype("<i8"), "emb_values": rows[mine].astype("<f4")}
        if state is not None:
            arrays[state_file] = state[mine].astype("<f4")
        for kind, array in arrays.items():
            array.tofile(folder / f"{table}_{kind}.rank_{rank}.world_size_2")


KEYS = np.array([2**40, 7, -9, 12, 3, 4])


@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_dumps_of_dynamicemb(tmp_path, name):
    """Keys are any 64-bit integers, and the state of all columns follows the row."""
    optimizer = {"sgd": optim.sgd(0.1), "adagrad": ADAGRAD, "rowwise_adagrad": ROWWISE, "adam": optim.adam(0.1)}[name]
    widths = [state.dim for state in optimizer.state_specs(3)]
    rows = np.random.default_rng(0).normal(size=(len(KEYS), 3)).astype(np.float32)
    # dynamicemb pads rowwise state to 16 bytes.
    state = np.repeat(KEYS[:, None] % 97, 4 if name == "rowwise_adagrad" else sum(widths), axis=1) + np.arange(
        4 if name == "rowwise_adagrad" else sum(widths)
    )
    state_file = "opt_values" if name == "adam" else "emb_opt_values"  # the first versions' name, and the current name
    dump(tmp_path / "model" / "ebc", "user", KEYS, rows, state if widths else None, state_file)
    collection = collection_of({"user": optimizer}, dim=3)
    state_of = torchrec.load(collection, collection.init(), tmp_path, step=10, chunk_rows=2)
    found = collection.export_table(state_of, "user")
    order = [int(np.flatnonzero(KEYS.view(np.uint64) == key)[0]) for key in found["keys"]]
    np.testing.assert_array_equal(found["rows"], rows[order])
    begin = 0
    for spec in optimizer.state_specs(3):
        np.testing.assert_array_equal(found["state"][spec.name], state[order][:, begin : begin + spec.dim])
        begin += spec.dim
    assert torchrec.declare(tmp_path)[0].optimizer.name == name


@pytest.mark.parametrize("dim, other", [(4, "adagrad"), (2, "adam")])
def test_rowwise_state_that_is_padded_may_be_that_of_another_optimizer(tmp_path, dim, other):
    """The declared optimizer decides what four numbers of state are."""
    rows = np.random.default_rng(0).normal(size=(len(KEYS), dim)).astype(np.float32)
    state = np.arange(4 * len(KEYS), dtype=np.float32).reshape(-1, 4)
    dump(tmp_path, "user", KEYS, rows, state)
    with pytest.raises(ValueError, match=f"rowwise_adagrad .* and {other} both write"):
        torchrec.declare(tmp_path)
    for optimizer in (ROWWISE, ADAGRAD if other == "adagrad" else optim.adam(0.1)):
        collection = collection_of({"user": optimizer}, dim=dim)
        found = collection.export_table(torchrec.load(collection, collection.init(), tmp_path, step=1), "user")
        order = [int(np.flatnonzero(KEYS.view(np.uint64) == key)[0]) for key in found["keys"]]
        np.testing.assert_array_equal(found["rows"], rows[order])
        parts = np.concatenate([found["state"][spec.name] for spec in optimizer.state_specs(dim)], axis=1)
        np.testing.assert_array_equal(parts, state[order][:, : parts.shape[1]])


def test_a_dump_without_rows(tmp_path):
    """It does not say how many numbers its rows would have."""
    dump(tmp_path, "user", KEYS, np.ones((len(KEYS), 3)))
    dump(tmp_path, "none", KEYS[:0], np.ones((0, 3)), np.ones((0, 3)))
    with pytest.raises(ValueError, match='table "none": got no rows in any rank of a dump'):
        torchrec.declare(tmp_path)
    collection = collection_of({"user": optim.sgd(0.1), "none": optim.adam(0.1)}, dim=3)
    state = torchrec.load(collection, collection.init(), tmp_path, step=1)
    assert collection.num_rows(state) == {"user": len(KEYS), "none": 0}


def test_dumps_that_are_not_whole(tmp_path):
    """A missing rank, a key in two ranks, and files with different numbers of rows are refused."""
    rows = np.ones((len(KEYS), 3))
    dump(tmp_path, "user", KEYS, rows)
    file = tmp_path / "user_emb_values.rank_1.world_size_2"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ValueError, match="got 8 bytes at the end, wanted a multiple of"):
        torchrec.declare(tmp_path)
    dump(tmp_path, "user", KEYS, rows)
    file = tmp_path / "user_emb_keys.rank_1.world_size_2"
    file.write_bytes(b"")
    with pytest.raises(
        ValueError, match=f"{file}: byte 0: got the end of the file, wanted keys for 36 bytes of .*values"
    ):
        torchrec.declare(tmp_path)
    dump(tmp_path, "user", np.array([2, 4, 4, 7]), np.ones((4, 3)))
    with pytest.raises(ValueError, match="key: got 4 a second time"):
        torchrec.declare(tmp_path)
    whole = tmp_path / "user_emb_keys.rank_1.world_size_2"
    whole.rename(tmp_path / "user_emb_keys.rank_1.world_size_3")  # of another dump
    with pytest.raises(ValueError, match="wanted the files of all ranks"):
        torchrec.declare(tmp_path)
    (tmp_path / "user_emb_keys.rank_1.world_size_3").unlink()
    with pytest.raises(ValueError, match="wanted the files of all ranks"):
        torchrec.declare(tmp_path)
