"""Sources of samples read the content of plain lists: at any place, from any file, by any thread and process."""

import concurrent.futures
import itertools
import multiprocessing
import pathlib
import pickle
import re
import threading

import hypothesis
import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.feather
import pyarrow.parquet
import pytest
from hypothesis import strategies as st

import jaxsok
from jaxsok.data import ArraySource, ArrowSource, BlockSource, JoinedSource, Source, criteo

NUM_SAMPLES = 60
PADDING = -1  # PADDING_KEY as int64


def _plain_columns() -> dict[str, list]:
    """Returns columns as lists: keys, floats, ragged lists with empty ones among them, lists of one size, weights."""
    rng = np.random.default_rng(0)
    tags = [rng.integers(0, 2**40, rng.integers(0, 4)).tolist() for _ in range(NUM_SAMPLES)]
    tags[7:10] = [[], [], []]
    return {
        "user": rng.integers(-(2**63), 2**63, NUM_SAMPLES).tolist(),
        "price": rng.integers(0, 100, NUM_SAMPLES).astype(float).tolist(),
        "tags": tags,
        "scores": [[float(key % 7) for key in bag] for bag in tags],
        "pair": rng.integers(0, 50, (NUM_SAMPLES, 2)).tolist(),
    }


PLAIN = _plain_columns()
TYPES = {
    "user": pa.int64(),
    "price": pa.float32(),
    "tags": pa.list_(pa.int64()),
    "scores": pa.large_list(pa.float32()),
    "pair": pa.list_(pa.int32(), 2),
}
SCHEMA = pa.schema(list(TYPES.items()))


def _table(rows: slice = slice(None)) -> pa.Table:
    return pa.table({name: pa.array(PLAIN[name][rows], kind) for name, kind in TYPES.items()})


def _arrays(rows: slice = slice(None)) -> dict:
    """Returns the same columns as arrays and bags."""
    plain = {name: column[rows] for name, column in PLAIN.items()}
    lengths = np.array([len(bag) for bag in plain["tags"]])
    flat = {name: list(itertools.chain(*plain[name])) for name in ("tags", "scores")}
    return {
        "user": np.array(plain["user"], np.int64),
        "price": np.array(plain["price"], np.float32),
        "tags": jaxsok.Bags(np.array(flat["tags"], np.int64), lengths=lengths),
        "scores": jaxsok.Bags(np.array(flat["scores"], np.float32), offsets=np.append(0, np.cumsum(lengths))),
        "pair": np.array(plain["pair"], np.int32).reshape(-1, 2),
    }


def as_lists(column) -> list:
    """Returns a column that was read, sample by sample."""
    if not isinstance(column, jaxsok.Bags):
        return np.asarray(column).tolist()
    offsets = np.asarray(column.offsets).tolist()
    assert offsets[0] == 0 and offsets[-1] == len(column.keys)
    return [np.asarray(column.keys[i:j]).tolist() for i, j in itertools.pairwise(offsets)]


def assert_reads(source: Source, positions, plain: dict[str, list]) -> None:
    """Reads some samples and compares each with its place in the lists."""
    columns = source.take(positions)
    wanted = range(positions.start, positions.stop) if isinstance(positions, slice) else positions.tolist()
    assert set(columns) == set(plain)
    for name, column in plain.items():
        assert as_lists(columns[name]) == [column[i] for i in wanted], name


def _map_arrays(folder: pathlib.Path) -> ArraySource:
    np.save(folder / "user.npy", np.array(PLAIN["user"]))
    np.save(folder / "pair.npy", np.asfortranarray(np.array(PLAIN["pair"], np.int32)))
    mapped = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("user", "pair")}
    return ArraySource({**_arrays(), **mapped}, block_samples=13)


def _parquet(folder: pathlib.Path) -> str:
    """Writes three files, each of several row groups, one without a row."""
    folder.mkdir()
    for i, rows in enumerate((slice(0, 25), slice(25, 25), slice(25, 60))):
        pa.parquet.write_table(_table(rows), folder / f"{i}.parquet", row_group_size=8)
    return str(folder)


def _write_ipc(path: pathlib.Path, table: pa.Table, compression: str | None = None) -> pathlib.Path:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(path, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=9)
    return path


def _ipc(path: pathlib.Path, compression: str | None = None, rows: slice = slice(None)) -> pathlib.Path:
    return _write_ipc(path, _table(rows), compression)


def _halves(first: Source, second: Source) -> JoinedSource:
    return JoinedSource([first, ArraySource(_arrays(slice(30, 30))), second])


SOURCES = {
    "arrays": lambda folder: ArraySource(_arrays()),
    "blocks of arrays": lambda folder: ArraySource(_arrays(), block_samples=7),
    "mapped arrays": _map_arrays,
    "table": lambda folder: ArrowSource(pa.concat_tables([_table(slice(0, 31)), _table(slice(31, 60))])),
    "parquet folder": lambda folder: ArrowSource(_parquet(folder / "files")),
    "parquet pattern": lambda folder: ArrowSource(_parquet(folder / "files") + "/*.parquet"),
    "uri": lambda folder: ArrowSource(f"file://{_parquet(folder / 'files')}"),
    "uris": lambda folder: ArrowSource(
        [f"file://{path}" for path in sorted(pathlib.Path(_parquet(folder / "files")).glob("*.parquet"))]
    ),
    "dataset": lambda folder: ArrowSource(pa.dataset.dataset(_parquet(folder / "files"))),
    "feather": lambda folder: ArrowSource(_ipc(folder / "a.feather")),
    "compressed ipc": lambda folder: ArrowSource(
        [_ipc(folder / "a.arrow", "zstd", slice(0, 20)), _ipc(folder / "b.arrow", "lz4", slice(20, 60))]
    ),
    "joined": lambda folder: _halves(ArraySource(_arrays(slice(0, 30))), ArrowSource(_table(slice(30, 60)))),
    "joined blocks": lambda folder: _halves(
        ArrowSource(_table(slice(0, 30))), ArrowSource(_ipc(folder / "b.ipc", None, slice(30, 60)))
    ),
}


@pytest.fixture(scope="module", params=SOURCES)
def source(request, tmp_path_factory) -> Source:
    """Returns each source in turn, all with the same samples."""
    return SOURCES[request.param](tmp_path_factory.mktemp("samples"))


def _places():
    bounds = st.lists(st.integers(0, NUM_SAMPLES), min_size=2, max_size=2).map(sorted).map(lambda pair: slice(*pair))
    indices = st.sets(st.integers(0, NUM_SAMPLES - 1)).map(lambda chosen: np.array(sorted(chosen), np.int64))
    return bounds | indices


@hypothesis.given(places=_places())
def test_any_samples_are_those_of_the_lists(source, places):
    """Slices and ascending positions, empty and full ones among them, read the samples of the lists."""
    assert_reads(source, places, PLAIN)


def test_a_source_is_a_sequence_of_samples(source):
    """Length, blocks and single samples by place, from the end too, are all that Grain needs."""
    assert isinstance(source, Source)
    assert len(source) == NUM_SAMPLES
    assert source.ends[-1] == NUM_SAMPLES and (np.diff(source.ends) >= 0).all()
    for i in (0, 29, 30, NUM_SAMPLES - 1, -1):
        sample = source[i]
        assert {name: as_lists(column) for name, column in sample.items()} == {name: [PLAIN[name][i]] for name in PLAIN}
    for i in (NUM_SAMPLES, -NUM_SAMPLES - 1):
        with pytest.raises(IndexError):
            source[i]


def test_a_pickled_source_reads_the_same(source):
    """Worker processes receive sources by pickle."""
    assert_reads(pickle.loads(pickle.dumps(source)), np.arange(0, NUM_SAMPLES, 3), PLAIN)


def test_dtypes_are_those_of_the_columns(source):
    """A key keeps its stored width, also after parts are joined."""
    for places in (slice(0, 0), slice(5, 55), np.arange(40)):
        columns = source.take(places)
        assert {name: getattr(column, "keys", column).dtype for name, column in columns.items()} == {
            "user": np.int64,
            "price": np.float32,
            "tags": np.int64,
            "scores": np.float32,
            "pair": np.int32,
        }


def _read_all(source: Source) -> list:
    return [as_lists(column) for column in source.take(slice(0, len(source))).values()]


def test_another_process_reads_the_same(tmp_path):
    """The process is spawned, not forked, as Grain starts its workers."""
    made = {
        name: SOURCES[name](_new(tmp_path / name)) for name in ("mapped arrays", "parquet folder", "compressed ipc")
    }
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        for name, source in made.items():
            assert pool.submit(_read_all, source).result() == _read_all(source), name


def _new(folder: pathlib.Path) -> pathlib.Path:
    folder.mkdir()
    return folder


# Arrays ---------------------------------------------------------------------------------------------------------------


def test_weights_stay_with_their_keys():
    """Bags may have weights, and lists may stand for arrays."""
    bags = jaxsok.Bags([7, 9, 8, 7], lengths=[1, 0, 3], weights=[0.5, 1.0, 2.0, 3.0])
    source = JoinedSource([ArraySource({"a": bags}), ArraySource({"a": bags})])
    for places, keys, weights in (
        (slice(1, 4), [[], [9, 8, 7], [7]], [[], [1.0, 2.0, 3.0], [0.5]]),
        (np.array([0, 2, 5]), [[7], [9, 8, 7], [9, 8, 7]], [[0.5], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]),
    ):
        found = source.take(places)["a"]
        assert as_lists(found) == keys
        assert as_lists(jaxsok.Bags(found.weights, offsets=found.offsets)) == weights


def test_bags_may_begin_behind_the_first_key():
    """The offsets are a part of a larger array."""
    source = ArraySource({"a": jaxsok.Bags(np.arange(10), offsets=np.array([4, 6, 6, 9]))})
    assert as_lists(source.take(slice(0, 3))["a"]) == [[4, 5], [], [6, 7, 8]]
    assert as_lists(source.take(np.array([0, 2]))["a"]) == [[4, 5], [6, 7, 8]]


def test_a_slice_is_not_copied():
    """Keys and rows of a slice share memory with the source."""
    columns = {"user": np.arange(10), "tags": jaxsok.Bags(np.arange(20), lengths=np.full(10, 2))}
    found = ArraySource(columns).take(slice(2, 5))
    assert np.shares_memory(found["user"], columns["user"])
    assert np.shares_memory(found["tags"].keys, columns["tags"].keys)


def test_no_samples_of_parts_of_which_the_first_is_empty():
    """They have the columns of the others."""
    parts = [ArraySource({"user": np.zeros(0, np.int64)}), ArraySource({"user": np.arange(3)})]
    parts[0].take = lambda positions: {}  # as of a source of blocks without blocks
    joined = JoinedSource(parts)
    for nothing in (slice(2, 2), np.zeros(0, np.int64)):
        assert {name: len(column) for name, column in joined.take(nothing).items()} == {"user": 0}


def test_blocks_of_arrays():
    """Blocks have a fixed number of samples; the last one has the rest."""
    assert ArraySource({"a": np.arange(10)}, block_samples=4).ends.tolist() == [4, 8, 10]
    assert ArraySource({"a": np.arange(8)}, block_samples=4).ends.tolist() == [4, 8]
    assert ArraySource({"a": np.arange(0)}).ends.tolist() == []


def test_mapped_arrays_are_pickled_as_places_in_files(tmp_path):
    """Pickling their bytes could exceed memory; views are places too, and copies are bytes."""
    np.save(tmp_path / "a.npy", np.arange(200_000).reshape(-1, 2))
    whole = np.load(tmp_path / "a.npy", mmap_mode="r")
    source = ArraySource(
        {
            "whole": whole[:50_000],
            "view": whole[20_000:70_000],
            "bags": jaxsok.Bags(whole.reshape(-1), lengths=np.full(50_000, 4)),
        }
    )
    pickled = pickle.dumps(source)
    assert len(pickled) < 500_000  # the lengths of the bags alone
    again = pickle.loads(pickled)
    for name in ("whole", "view"):
        assert isinstance(again.columns[name], np.memmap)
        np.testing.assert_array_equal(again.columns[name], source.columns[name])
    np.testing.assert_array_equal(again.columns["bags"].keys, np.arange(200_000))
    copied = ArraySource({"column": whole[:, 1], "some": whole[np.array([3, 1])][:, :1].repeat(50_000, 0)})
    again = pickle.loads(pickle.dumps(copied))
    assert again.columns["column"].tolist() == list(range(1, 200_000, 2))
    np.testing.assert_array_equal(again.columns["some"], copied.columns["some"])


WRAPPING = np.array([3, 2**64 - 1, 2], np.uint64)  # their sum is 4 in 64 bits


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "got {} samples, wanted columns of one length"),
        ({"a": np.arange(3), "b": np.arange(4)}, "got {'a': 3, 'b': 4} samples"),
        ({"a": jaxsok.Bags(np.arange(3))}, 'column "a": got Bags.* wanted Bags with either lengths or offsets'),
        (
            {"a": jaxsok.Bags(np.arange(3), lengths=np.array([1, 2]), inverse=np.array([0, 1]))},
            'column "a": got Bags',
        ),
        ({"a": jaxsok.Bags(np.arange(3), lengths=np.array([1, 3]))}, 'column "a": lengths: got an end at 4, past the'),
        ({"a": jaxsok.Bags(np.arange(3), lengths=np.array([1, 1]))}, "lengths: got an end at 2 of 3 keys, wanted all"),
        (
            {"a": jaxsok.Bags(np.arange(3), lengths=np.array([1, 2]), offsets=np.array([0, 3]))},
            'column "a": got Bags.* wanted Bags with either',
        ),
        ({"a": jaxsok.Bags(np.arange(3), lengths=np.array([4, -1]))}, "lengths: got -1, wanted no negative number"),
        ({"a": jaxsok.Bags(np.arange(3), lengths=np.array([1.0, 2.0]))}, "lengths: got float64.* wanted integers"),
        ({"a": jaxsok.Bags(np.arange(3), lengths=WRAPPING)}, "lengths: got a bag of 18446744073709551615 keys"),
        ({"a": jaxsok.Bags(np.arange(3), offsets=np.array([-1, 3]))}, "offsets: got -1, wanted no negative number"),
        ({"a": jaxsok.Bags(np.arange(3), offsets=np.array([0, 2, 1, 3]))}, "offsets: got 2 then 1 at 1"),
        ({"a": jaxsok.Bags(np.arange(3), offsets=WRAPPING)}, "offsets: got 18446744073709551615 then 2 at 1"),
        ({"a": jaxsok.Bags(np.arange(3), offsets=np.array([], int))}, r"offsets: got int64\[0\], wanted integers"),
        ({"a": jaxsok.Bags(np.arange(3), lengths=np.array([3]), weights=np.ones(2))}, "weights: got .2., wanted .3."),
        ({"a": 3}, 'column "a": got a scalar, wanted an array'),
    ],
)
def test_columns_that_do_not_fit_are_refused(columns, message):
    """The error names the column."""
    with pytest.raises(ValueError, match=f"ArraySource: .*{message}"):
        ArraySource(columns)


class BagsOfBlocks(BlockSource):
    """Two blocks of bags with lengths."""

    def __init__(self, lengths=(2, 0, 1)):
        super().__init__([3, 3])
        self.lengths = lengths

    def load(self, block):
        keys = np.arange(sum(self.lengths)) + 10 * block
        return {"user": jaxsok.Bags(keys, lengths=np.array(self.lengths))}


def test_blocks_may_have_bags_with_lengths():
    """As arrays may; other lengths are refused with the block's number."""
    bags = BagsOfBlocks().take(slice(2, 5))["user"]
    assert (bags.keys.tolist(), np.diff(bags.offsets).tolist()) == ([2, 10, 11], [1, 2, 0])
    with pytest.raises(ValueError, match=r'BagsOfBlocks: block 1: column "user": lengths: got -1'):
        BagsOfBlocks((4, -1, 0)).take(slice(3, 4))
    with pytest.raises(ValueError, match=r'BagsOfBlocks: block 0: column "user": got 2 samples, wanted 3'):
        BagsOfBlocks((1, 1)).take(slice(0, 1))


@pytest.mark.parametrize("name", ["keys", "lengths", "offsets", "weights"])
def test_masked_bags_are_refused(name):
    """Their hidden elements would be read."""
    given = {"keys": np.arange(3), "lengths": np.array([1, 2]), "weights": np.ones(3)}
    if name == "offsets":
        given["offsets"] = np.array([0, 1, 3])
        del given["lengths"]
    given[name] = np.ma.array(given[name], mask=np.arange(len(given[name])) == 1)
    with pytest.raises(TypeError, match=f'ArraySource: column "a": {name}: got a masked array'):
        ArraySource({"a": jaxsok.Bags(**given)})


@pytest.mark.parametrize("tail", [np.int64([-1]), np.uint64([2**64 - 1]), np.int32([-1]), np.uint32([[2**32 - 1] * 2])])
def test_padding_after_the_last_bag_is_left_out(tail):
    keys = np.concatenate([np.arange(3 * tail[0].size, dtype=tail.dtype).reshape(3, *tail.shape[1:]), tail])
    source = ArraySource({"a": jaxsok.Bags(keys, lengths=np.array([1, 2]))})
    taken = source.take(slice(1, 2))["a"]
    np.testing.assert_array_equal(taken.keys, keys[1:3])
    with pytest.raises(ValueError, match="lengths: got an end at 3 of 5 keys"):
        ArraySource({"a": jaxsok.Bags(np.concatenate([keys, keys[:1]]), lengths=np.array([1, 2]))})


def test_offsets_may_be_some_of_those_of_all_samples():
    source = ArraySource({"a": jaxsok.Bags(np.arange(6), offsets=np.array([1, 2, 2, 4]))})
    assert [source[i]["a"].keys.tolist() for i in range(3)] == [[1], [], [2, 3]]


def test_other_refusals():
    """Blocks without samples, sources without parts, and parts with other columns are refused."""
    with pytest.raises(ValueError, match="ArraySource: block_samples: got 0"):
        ArraySource({"a": np.arange(3)}, block_samples=0)
    with pytest.raises(ValueError, match="JoinedSource: parts: got none"):
        JoinedSource([])
    unlike = JoinedSource([ArraySource({"a": np.arange(3)}), ArraySource({"a": np.arange(3), "b": np.arange(3)})])
    with pytest.raises(ValueError, match=r"got parts .* \[\['a'\], \['a', 'b'\]\], wanted the same columns"):
        unlike.take(slice(2, 4))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (np.arange(2), np.arange(2, dtype=np.uint64), "int64 and uint64 in parts of a source, wanted one dtype"),
        (np.arange(2), np.ones(2), "int64 and float64 in parts of a source, wanted one dtype"),
        (np.arange(2), jaxsok.Bags(np.arange(4), lengths=[2, 2]), r"arrays \[num_samples\] and Bags in parts"),
        (
            jaxsok.Bags(np.arange(2), lengths=[1, 1]),
            jaxsok.Bags(np.arange(2), lengths=[1, 1], weights=np.ones(2)),
            "Bags and Bags with",
        ),
        (np.zeros((2, 3)), np.zeros((2, 4)), r"arrays \[num_samples, 3\] and arrays \[num_samples, 4\] in parts"),
    ],
)
def test_parts_of_other_forms_are_refused(first, second, message):
    """Keys of two dtypes do not become floats, and weights of one part are not left out."""
    joined = JoinedSource([ArraySource({"a": first}), ArraySource({"a": second})])
    with pytest.raises(ValueError, match=f'take: column "a": got {message}'):
        joined.take(slice(0, 4))


def test_offsets_of_64_bits_without_sign():
    """Any integer type serves, also where samples are picked."""
    bags = jaxsok.Bags(np.arange(5), offsets=np.array([0, 3, 5], np.uint64))
    picked = ArraySource({"a": bags}).take(np.array([1, 0]))["a"]
    assert picked.keys.tolist() == [3, 4, 0, 1, 2]


# Arrow ----------------------------------------------------------------------------------------------------------------


def test_blocks_are_row_groups_and_record_batches(tmp_path):
    """A block is what a file reads at once; files and groups without rows are no blocks."""
    assert ArrowSource(_parquet(tmp_path / "files")).ends.tolist() == [8, 16, 24, 25, 33, 41, 49, 57, 60]
    assert ArrowSource(_ipc(tmp_path / "a.arrow")).ends.tolist() == [9, 18, 27, 36, 45, 54, 60]


def test_a_damaged_offset_of_lists_is_an_error(tmp_path):
    """Arrow itself would end the process where it cuts the values by offsets that are beyond them."""
    offsets, path = np.arange(0, 91, 3, dtype="<i4"), tmp_path / "a.arrow"
    lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.arange(90)))
    pyarrow.feather.write_feather(pa.table({"seen": lists}), path, compression="uncompressed")
    whole = path.read_bytes()
    assert whole.count(offsets.tobytes()) == 1
    offsets[-1] = 1024
    path.write_bytes(whole.replace(np.arange(0, 91, 3, dtype="<i4").tobytes(), offsets.tobytes()))
    with pytest.raises(pa.ArrowInvalid) as info:
        ArrowSource(path).take(slice(0, 30))
    assert any("a.arrow" in note for note in info.value.__notes__)


def test_partitions_are_columns(tmp_path):
    """The folder `day=3` gives a column `day`."""
    days = pa.array([i // 20 for i in range(NUM_SAMPLES)], pa.int32())
    pa.dataset.write_dataset(
        _table().append_column("day", days),
        tmp_path / "days",
        format="parquet",
        partitioning=pa.dataset.partitioning(pa.schema([("day", pa.int32())]), flavor="hive"),
    )
    source = ArrowSource(tmp_path / "days")
    assert_reads(source, np.arange(10, 50, 3), PLAIN | {"day": days.to_pylist()})
    assert_reads(pickle.loads(pickle.dumps(source)), slice(15, 45), PLAIN | {"day": days.to_pylist()})


def test_names_of_folders_above_are_no_columns(tmp_path):
    """Only folders below the path, or at the place of a pattern, give columns; the file's own are not replaced."""
    folder = tmp_path / "seed=3" / "days"
    for day in (1, 12):
        (folder / f"day={day}").mkdir(parents=True)
        pyarrow.parquet.write_table(pa.table({"user": [day], "seed": [7 * day]}), folder / f"day={day}" / "a.parquet")
    both = {"user": [1, 12], "seed": [7, 84]}
    first = {name: column[:1] for name, column in both.items()}
    for given, wanted in (
        (folder / "day=1" / "a.parquet", first),
        (folder / "day=1", first),
        (folder / "day=1*", both | {"day": [1, 12]}),
        (folder / "day=1*" / "*.parquet", both | {"day": [1, 12]}),
        (str(folder) + "/", both | {"day": [1, 12]}),
        (
            [folder, folder / "day=1" / "a.parquet"],
            {name: [*column, column[0]] for name, column in both.items()} | {"day": [1, 12, 1]},
        ),
    ):
        found = ArrowSource(given).take(slice(0, 3))
        assert {name: np.asarray(column).tolist() for name, column in found.items()} == wanted, given
    with pytest.raises(ValueError, match=r"a.parquet: .*seed.*; names of folders as day=3 give columns, which files"):
        ArrowSource(tmp_path)
    (tmp_path / "id=3").mkdir()
    pyarrow.parquet.write_table(pa.table({"id": pa.array([7], pa.int32())}), tmp_path / "id=3" / "a.parquet")
    with pytest.raises(ValueError, match=r"a.parquet: got columns \['id'\] in the file and in names of folders"):
        ArrowSource(tmp_path / "id=*")
    pyarrow.parquet.write_table(pa.table({"user": [5]}), tmp_path / "a.parquet")
    assert ArrowSource(f"file://{tmp_path}/a.parquet").take(slice(0, 1))["user"].tolist() == [5]
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="empty"):
        ArrowSource(tmp_path / "empty")


def test_columns_that_later_files_have_are_not_dropped(tmp_path):
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    pyarrow.parquet.write_table(pa.table({"user": [1]}), paths[0])
    pyarrow.parquet.write_table(pa.table({"user": [2], "x": [7]}), paths[1])
    for given in (paths, tmp_path):
        with pytest.raises(ValueError, match=r"b.parquet: got also columns \['x'\], wanted \['user'\] in every file"):
            ArrowSource(given)
        assert ArrowSource(given, columns=["user"]).take(slice(0, 2))["user"].tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"a.parquet: got no columns \['x'\]"):
        ArrowSource(paths[::-1])


@pytest.mark.parametrize("name", ["table", "parquet folder", "feather", "compressed ipc"])
def test_columns_are_chosen(tmp_path, name):
    """Other columns are not read; a missing column is an error before anything is read."""
    given = {
        "table": _table,
        "parquet folder": lambda: _parquet(tmp_path / "files"),
        "feather": lambda: _ipc(tmp_path / "a.feather"),
        "compressed ipc": lambda: [_ipc(tmp_path / "a.arrow", "lz4")],
    }[name]()
    chosen = ["tags", "user"]
    source = ArrowSource(given, columns=chosen)
    assert list(source.take(slice(0, 3))) == chosen
    assert_reads(source, slice(3, 40), {column: PLAIN[column] for column in chosen})
    with pytest.raises(KeyError, match=r"ArrowSource: columns: got \['item'\], wanted some of \['user', 'price'"):
        ArrowSource(given, columns=["user", "item"])


@pytest.mark.parametrize("as_file", [False, True])
def test_nulls(tmp_path, as_file):
    """Null keys become PADDING_KEY, null lists empty, null lists of one size padding."""
    if as_file and int(pa.__version__.split(".")[0]) < 26:
        pytest.skip("pyarrow 25 raises ArrowInvalid where it reads a null list of one size from Parquet")
    columns = {
        "key": pa.array([1, None, 3, None], pa.int32()),
        "unsigned": pa.array([1, None, 2**64 - 2, None], pa.uint64()),
        "list": pa.array([[1, None], None, [], [4]], pa.list_(pa.int64())),
        "pair": pa.array([[1, 2], None, [3, None], [5, 6]], pa.list_(pa.int64(), 2)),
        "flag": pa.array([True, None, False, True]),
        "nothing": pa.nulls(4),
    }
    given = pa.table(columns)
    if as_file:
        pa.parquet.write_table(given, tmp_path / "a.parquet", row_group_size=2)
        given = tmp_path / "a.parquet"
    plain = {
        "key": [1, PADDING, 3, PADDING],
        "unsigned": [1, 2**64 - 1, 2**64 - 2, 2**64 - 1],
        "list": [[1, PADDING], [], [], [4]],
        "pair": [[1, 2], [PADDING, PADDING], [3, PADDING], [5, 6]],
        "flag": [1, PADDING, 0, 1],
        "nothing": [PADDING] * 4,
    }
    assert_reads(ArrowSource(given), slice(0, 4), plain)
    assert_reads(ArrowSource(given), np.array([1, 3]), plain)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (pa.bool_(), np.int8),
        (pa.int8(), np.int8),
        (pa.int16(), np.int16),
        (pa.int32(), np.int32),
        (pa.int64(), np.int64),
        (pa.uint8(), np.int16),
        (pa.uint16(), np.int32),
        (pa.uint32(), np.int64),
        (pa.uint64(), np.uint64),
    ],
)
def test_the_dtype_of_a_column_depends_on_its_type_alone(kind, dtype):
    """Else two processes could make one array of two dtypes, where only one of them reads a null."""
    for values in ([1, 0, 1], [1, None, 0], [None, None, None]):
        wanted = [np.array(-1).astype(dtype) if value is None else value for value in values]
        columns = {"plain": pa.array(values, pa.int8()).cast(kind)}
        if kind != pa.bool_():  # lists of bools are refused
            lists = [None if value is None else [value, 1] for value in values]
            columns["lists"] = pa.array(lists, pa.list_(kind, 2))
        for name, column in ArrowSource(pa.table(columns)).take(slice(0, 3)).items():
            assert column.dtype == dtype and column.reshape(3, -1)[:, 0].tolist() == wanted, name


def test_dictionaries_of_numbers_are_numbers(tmp_path):
    """Arrow stores columns with few different values as dictionaries."""
    encoded = pa.table({"user": pa.chunked_array([pa.array([7, 9, None, 7]).dictionary_encode()])})
    _write_ipc(tmp_path / "a.arrow", encoded)
    for given in (encoded, tmp_path / "a.arrow"):
        assert_reads(ArrowSource(given), slice(0, 4), {"user": [7, 9, PADDING, 7]})


@pytest.mark.parametrize(
    ("column", "error", "message"),
    [
        (pa.array(["a", "b"]), TypeError, "got an Arrow column of string, wanted integers"),
        (pa.array(["a", "b"]).dictionary_encode(), TypeError, "got an Arrow column of string"),
        (pa.array([["a"], []]), TypeError, "got an Arrow column of string"),
        (pa.array([[[1]], []]), TypeError, "got an Arrow column of list"),
        (pa.array([1, 2], pa.timestamp("s")), TypeError, "got an Arrow column of timestamp"),
        (pa.array([1.0, None]), ValueError, "floats: got 1 nulls, wanted a number in every place"),
        (pa.array([[1.0, None], []]), ValueError, "floats: got 1 nulls"),
    ],
)
def test_other_columns_are_refused_by_name(tmp_path, column, error, message):
    """The error comes when a block is read; a column that was not chosen causes none."""
    table = pa.table({"user": [1, 2], "bad": column})
    pa.parquet.write_table(table, tmp_path / "a.parquet")
    for given in (table, tmp_path / "a.parquet"):
        source = ArrowSource(given)
        with pytest.raises(error, match=f'ArrowSource: column "bad": .*{message}'):
            source.take(slice(0, 2))
        assert ArrowSource(given, columns=["user"]).take(slice(0, 2))["user"].tolist() == [1, 2]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_errors_of_a_block_name_its_file(tmp_path, kind):
    for number in range(3):
        table = pa.table({"user": [1, 2, 3, 4], "price": pa.array([1.0, 2.0, 3.0, None if number == 1 else 4.0])})
        if kind == "parquet":
            pa.parquet.write_table(table, tmp_path / f"{number}.parquet", row_group_size=2)
        else:
            _write_ipc(tmp_path / f"{number}.arrow", table)
    source = ArrowSource(f"{tmp_path}/*.{kind}")
    with pytest.raises(ValueError, match="floats: got 1 nulls") as caught:
        source.take(slice(0, 12))
    where = f"{tmp_path}/1.{kind}" + (", row group 1." if kind == "parquet" else ".")
    assert f"is of {where} If that has changed, make the source again." in caught.value.__notes__[0]


def test_masked_columns_are_refused():
    """The parts of a batch are joined without their masks."""
    masked = np.ma.masked_array([1, 2, 3], [False, True, False])
    with pytest.raises(TypeError, match='column "label": array: got a masked array, wanted a plain one; fill it'):
        ArraySource({"label": masked})


def test_dictionaries_of_other_kinds_are_decoded():
    """Their values may be fewer than the samples, or none at all."""
    lists = pa.DictionaryArray.from_arrays(pa.array([1, 0, 1]), pa.array([[7], [8, 9]]))
    nulls = pa.DictionaryArray.from_arrays(pa.array([None, None, None], pa.int32()), pa.nulls(0))
    taken = ArrowSource(pa.table({"item": lists, "user": nulls})).take(slice(0, 3))
    assert (taken["item"].keys.tolist(), np.diff(taken["item"].offsets).tolist()) == ([8, 9, 7, 8, 9], [2, 1, 2])
    assert taken["user"].tolist() == [PADDING] * 3


def test_uris_with_options_and_of_several_systems(tmp_path):
    """Options come behind a question mark, which is no pattern there."""
    with pytest.raises(Exception, match=r"^(?!.*pattern)"):
        ArrowSource(f"file://{tmp_path}/none.parquet?region=x")
    with pytest.raises(ValueError, match="data: got URIs of several file systems"):
        ArrowSource([f"file://{tmp_path}/a.parquet", "mock:///b.parquet"])


def test_a_categorical_column_of_polars_is_refused_by_name():
    """Arrow cannot decode its texts."""
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(["a", "b"], pa.string_view()))
    with pytest.raises(TypeError, match='ArrowSource: column "bad": keys: got an Arrow column of string_view'):
        ArrowSource(pa.table({"bad": column})).take(slice(0, 2))


def test_a_pattern_of_uris_is_refused(tmp_path):
    """Patterns are of local paths."""
    with pytest.raises(
        ValueError, match=r"ArrowSource: data: got the pattern 'file://.*wanted patterns of local paths"
    ):
        ArrowSource(f"file://{tmp_path}/*.parquet")


def test_tables_without_rows_have_columns(tmp_path):
    """A table without rows gives no sample, but columns of the right types."""
    pa.parquet.write_table(SCHEMA.empty_table(), tmp_path / "a.parquet")
    with pa.ipc.new_file(tmp_path / "a.arrow", SCHEMA):
        pass
    for given in (SCHEMA.empty_table(), tmp_path / "a.parquet", tmp_path / "a.arrow"):
        source = ArrowSource(given)
        assert len(source) == 0
        for places in (slice(0, 0), np.zeros(0, np.int64)):
            assert_reads(source, places, PLAIN)
        assert_reads(JoinedSource([source, ArrowSource(_table()), source]), np.array([0, 59]), PLAIN)
        assert_reads(JoinedSource([source, ArrowSource(_table()), source]), slice(0, 60), PLAIN)


def test_files_that_are_not_there(tmp_path):
    """The path is in the message, even if other files were found."""
    _ipc(tmp_path / "a.arrow")
    pa.parquet.write_table(_table(), tmp_path / "a.parquet")
    missing = [
        tmp_path / "no.parquet",
        tmp_path / "no.arrow",
        str(tmp_path / "no*.parquet"),
        [tmp_path / "a.parquet", str(tmp_path / "no*.parquet")],
        [tmp_path / "a.arrow", tmp_path / "no.arrow"],
    ]
    for given in missing:
        with pytest.raises(FileNotFoundError, match=r"no\*?\.(parquet|arrow)"):
            ArrowSource(given)
    with pytest.raises(FileNotFoundError, match="ArrowSource: data: got no path"):
        ArrowSource([])


def test_tables_of_other_libraries():
    """Any object with Arrow's C interface is read: a record batch, a data frame of Polars."""
    batch = _table().combine_chunks().to_batches()[0]
    assert_reads(ArrowSource(batch), slice(5, 50), PLAIN)
    polars = pytest.importorskip("polars")
    frame = polars.from_arrow(_table().drop_columns(["pair"]))
    plain = {name: column for name, column in PLAIN.items() if name != "pair"}
    assert_reads(ArrowSource(frame), slice(5, 50), plain)
    assert_reads(ArrowSource(frame, columns=["tags"]), np.array([0, 59]), {"tags": PLAIN["tags"]})


def test_streams_are_refused_by_name(tmp_path):
    """Files of the streaming format cannot be read at any place."""
    with pa.ipc.new_stream(tmp_path / "a.arrow", SCHEMA) as writer:
        writer.write_table(_table())
    with pytest.raises(ValueError, match=r"ArrowSource: .*a\.arrow: .*wanted an Arrow IPC file.*open_stream"):
        ArrowSource(tmp_path / "a.arrow")
    with pa.memory_map(str(tmp_path / "a.arrow")) as file:
        assert_reads(ArrowSource(pa.ipc.open_stream(file).read_all()), slice(5, 50), PLAIN)


def test_files_with_other_columns_are_refused(tmp_path):
    """Their samples could be read only up to the difference."""
    _ipc(tmp_path / "a.arrow")
    _write_ipc(tmp_path / "b.arrow", pa.table({"user": [1], "item": [2]}))
    with pytest.raises(ValueError, match=r"b\.arrow: got columns \['user', 'item'\], wanted \['user', 'price'"):
        ArrowSource([tmp_path / "a.arrow", tmp_path / "b.arrow"])


# Blocks ---------------------------------------------------------------------------------------------------------------


class CountedSource(BlockSource):
    """Eight blocks of ten samples; counts its loads, and fails on request."""

    def __init__(self):
        super().__init__([10] * 8)
        self.loads: list[int] = []
        self.failures = 0
        self.go_on = threading.Event()
        self.go_on.set()

    def load(self, block):
        self.loads.append(block)
        assert self.go_on.wait(10)
        if self.failures:
            self.failures -= 1
            raise OSError(f"block {block} was not read")
        return {"user": np.arange(10 * block, 10 * block + 10)}


def test_many_threads_load_a_block_once():
    """The first thread loads it; the others wait."""
    source = CountedSource()
    source.go_on.clear()
    places = np.arange(5, 25)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        found = [pool.submit(source.take, places) for _ in range(16)]
        source.go_on.set()
        assert all(future.result()["user"].tolist() == places.tolist() for future in found)
    assert sorted(source.loads) == [0, 1, 2]


@pytest.mark.parametrize("num_left", [0, 7, 12])
def test_a_block_of_another_size_is_refused(num_left, tmp_path):
    """The file has changed since the source was made, or a source counts wrongly: no batch gets shorter in silence."""

    class Changed(CountedSource):
        def load(self, block):
            return {"user": np.arange(num_left)}

    with pytest.raises(ValueError, match=rf'block 0: column "user": got {num_left} samples, wanted 10'):
        Changed().take(slice(0, 4))
    log = tmp_path / "log.tsv"
    log.write_text("".join(f"{label}\t" + "1\t" * 13 + "\t".join(["0000000a"] * 26) + "\n" for label in (0, 1, 1)))
    source = criteo.TextSource(log)
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(ValueError, match=r"TextSource: block 0: column .*: got 2 samples, wanted 3"):
        source.take(slice(0, 3))


def test_a_block_that_failed_is_loaded_again():
    """Waiting threads get the error; the next reader gets the block."""
    source = CountedSource()
    source.failures = 1
    source.go_on.clear()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = [pool.submit(source.take, slice(0, 10)) for _ in range(4)]
        source.go_on.set()
        errors = [future.exception() for future in found]
    assert any(isinstance(error, OSError) for error in errors)
    assert source.take(slice(0, 10))["user"].tolist() == list(range(10))
    assert source.loads == [0, 0]


def test_blocks_beyond_those_kept_are_dropped():
    """Four blocks are kept at first, and the least recently used is dropped; `keep` can only raise the number."""
    source = CountedSource()
    for block in (0, 1, 2, 3, 0, 4, 0, 1):
        source.take(slice(10 * block, 10 * block + 10))
    assert source.loads == [0, 1, 2, 3, 4, 1]
    source.keep(8)
    source.keep(2)
    for _ in range(2):
        assert source.take(slice(0, 80))["user"].tolist() == list(range(80))
    assert sorted(source.loads) == sorted([0, 1, 2, 3, 4, 1, 2, 5, 6, 7])


def test_a_joined_source_keeps_blocks_in_all_parts():
    """A request of Batches reaches the sources that decode."""
    parts = [CountedSource(), CountedSource()]
    joined = JoinedSource(parts)
    joined.keep(8)
    for _ in range(2):
        joined.take(slice(0, 160))
    assert [len(part.loads) for part in parts] == [8, 8]


@hypothesis.given(blocks=st.lists(st.integers(0, 7), max_size=30), num_kept=st.integers(4, 6))
def test_kept_blocks_are_the_last_ones_used(blocks, num_kept):
    """The kept blocks agree with a list in the order of use."""
    source, kept, loads = CountedSource(), [], []
    source.keep(num_kept)
    for block in blocks:
        if block not in kept:
            loads.append(block)
        kept = ([other for other in kept if other != block] + [block])[-num_kept:]
        assert source.take(np.array([10 * block + 3]))["user"].tolist() == [10 * block + 3]
    assert source.loads == loads


def _write_parquet(path, table):
    pyarrow.parquet.write_table(table, path)


@pytest.mark.parametrize("form, write", [("parquet", _write_parquet), ("arrow", _write_ipc)], ids=["parquet", "arrow"])
@pytest.mark.parametrize(
    "first, second, wanted",
    [
        (pa.array([1, 2], pa.int32()), pa.array([2**40, 3], pa.int64()), [1, 2, 2**40, 3]),
        (pa.array([1, 2], pa.uint8()), pa.array([-5, 6], pa.int32()), [1, 2, -5, 6]),
        (pa.array([None, None]), pa.array([7, 9]), [-1, -1, 7, 9]),
        (pa.array([1.0, 2.0], pa.float32()), pa.array([0.1, 3.0]), [1.0, 2.0, 0.1, 3.0]),
        (pa.array([[], []]), pa.array([[7], [9]]), [[], [], [7], [9]]),
        (pa.array([[1], []], pa.large_list(pa.int32())), pa.array([[7], [2**40]]), [[1], [], [7], [2**40]]),
        (pa.array([1, 2]).dictionary_encode(), pa.array([5, 3]), [1, 2, 5, 3]),
    ],
)
def test_files_with_other_types_keep_every_number(tmp_path, form, write, first, second, wanted):
    """Whichever file is the first."""
    for order in ([first, second], [second, first]):
        paths = [tmp_path / f"{number}.{form}" for number in range(2)]
        for path, column in zip(paths, order, strict=True):
            write(path, pa.table({"x": column, "y": [1, 2]}))
        got = ArrowSource(paths).take(slice(0, 4))["x"]
        if isinstance(got, jaxsok.Bags):
            ends = np.asarray(got.offsets)
            got = [np.asarray(got.keys)[begin:end].tolist() for begin, end in itertools.pairwise(ends)]
        else:
            got = got.tolist()
        assert got == (wanted if order[0] is first else wanted[2:] + wanted[:2])


@pytest.mark.parametrize("form, write", [("parquet", _write_parquet), ("arrow", _write_ipc)], ids=["parquet", "arrow"])
@pytest.mark.parametrize(
    "other",
    [
        pa.array([2**63, 3], pa.uint64()),
        pa.array(["3", "4"]),
        pa.array([5, 6], pa.timestamp("ms")),
        pa.array([1.5, 2.5]),
        pa.array([[1], [2]]),
    ],
    ids=lambda column: str(column.type),
)
def test_files_whose_types_do_not_go_together_are_refused_by_name(tmp_path, form, write, other):
    for number, column in enumerate([pa.array([1, 2]), other]):
        write(tmp_path / f"{number}.{form}", pa.table({"x": column, "y": [1, 2]}))
    paths = [tmp_path / f"{number}.{form}" for number in range(2)]
    got = "list<.*: int64>" if pa.types.is_list(other.type) else re.escape(str(other.type))
    wanted = rf'1\.{form}: column "x": got {got}, wanted a type that goes with int64 of .*0\.{form}'
    with pytest.raises(ValueError, match=wanted):
        ArrowSource(paths)
    assert ArrowSource(paths, ["y"]).take(slice(0, 4))["y"].tolist() == [1, 2, 1, 2]


def test_parquet_files_with_other_columns_and_lists_that_are_null(tmp_path):
    """No column of a file becomes padding, and no list of floats becomes NaN."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for number, name in enumerate("uv"):
        parquet.write_table(pa.table({"k": [1, 2], name: [3, 4]}), tmp_path / f"{number}.parquet")
    with pytest.raises(ValueError, match=r"1\.parquet: got no columns \['u'\], wanted \['k', 'u'\] in every file"):
        ArrowSource(tmp_path)
    assert len(ArrowSource(tmp_path, ["k"])) == 4
    lists = pa.table({"a": pa.array([[1.0, 2.0], None], pa.list_(pa.float32(), 2))})
    with pytest.raises(ValueError, match='column "a": floats: got 1 nulls, wanted a list in every place'):
        ArrowSource(lists).take(slice(0, 2))
