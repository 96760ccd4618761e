"""Tests the formats of other systems: independent readers read what is written, and independent writers the reverse.

The readers and writers follow the descriptions of the layouts, through struct and NumPy alone.
"""

import functools
import shutil
import struct

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from interchange_cases import BFLOAT16, by_key, folder, hps_bytes, make_records, put, sok_bytes, split
from serving_cases import INITIALIZERS, TRACED, declare_untrained

import jaxsok
from jaxsok import table_import
from jaxsok.interchange import columns, hps, npz, sok
from jaxsok.records import Records

KEYS = st.integers(0, 2**64 - 2)
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def sok_parsed(path):
    """Returns name, kind, slot, dtype code and numbers of such a file."""
    data = path.read_bytes()
    kind, code = struct.unpack(">I", data[256:260])[0], struct.unpack(">I", data[292:296])[0]
    dtype = {0: "<i4", 1: "<i8", 2: "<u4", 3: "<u8", 4: "<f2", 5: "<f4", 6: "<f8"}[code]
    return data[:256], kind, data[260:292], code, np.frombuffer(data[296:], dtype)


# Round trips -----------------------------------------------------------------------------------------------------

STATES = st.sampled_from([{}, {"m": 3}, {"m": 3, "v": 1}])


@st.composite
def tables(draw, dtypes=(np.float16, BFLOAT16, np.float32, np.float64), least=0):
    """Draws records, their chunks, and the number of rows to read at once."""
    keys = draw(st.lists(KEYS, unique=True, min_size=least, max_size=12))
    records = make_records(keys, 3, draw(STATES), draw(st.sampled_from(dtypes)), draw(st.booleans()))
    return records, draw(st.lists(st.integers(0, 5), max_size=4)), draw(st.one_of(st.none(), st.integers(1, 5)))


FORMATS = {
    "parquet": (columns.write_parquet, columns.read_parquet),
    "npz": (npz.write_npz, npz.read_npz),
}


@pytest.mark.parametrize("form", FORMATS)
@hypothesis.given(table=tables())
def test_what_is_written_is_read(form, table):
    """Keys, rows, state, statistics and dtypes come back in their order, in chunks of the requested size."""
    (records, sizes, at_once), (write, read) = table, FORMATS[form]
    with folder() as path:
        assert write(path / "t", split(records, sizes)) == records.num_rows
        result = read(path / "t", chunk_rows=at_once)
        assert [child.name for child in path.iterdir()] == ["t"]
        assert result.num_rows == records.num_rows and by_key(result) == by_key([records])
        assert [key for chunk in result for key in chunk.keys] == list(records.keys)
        assert all(0 <= chunk.num_rows <= (at_once or 12) for chunk in result)


@hypothesis.given(table=tables(least=1), hotness=st.booleans())
def test_hps_round_trip(table, hotness):
    """Rows are float32; the frequency is the only statistic that can be written."""
    records, sizes, at_once = table
    hotness = hotness and records.frequency is not None
    wanted = make_records(records.keys, 3)
    frequency = records.frequency if hotness else None
    wanted = Records(wanted.keys, wanted.rows, frequency=frequency)
    with folder() as path:
        assert hps.write_hps(path, split(records, sizes), hotness=hotness) == records.num_rows
        result = hps.read_hps(path, dim=3, chunk_rows=at_once, hotness=hotness)
        assert result.num_rows == records.num_rows and by_key(result) == by_key([wanted])
        assert (path / "key").read_bytes() == hps_bytes(records.keys, [])[0]
        assert (path / "emb_vector").read_bytes() == hps_bytes([], records.rows)[1]
        if hotness:
            assert np.frombuffer((path / "meta").read_bytes(), "<i8").tolist() == records.frequency.tolist()


@hypothesis.given(table=tables(), key_dtype=st.sampled_from(["int64", "uint64"]), with_state=st.booleans())
def test_sok_round_trip(table, key_dtype, with_state):
    """Keys, rows and mapped state come back; bfloat16 becomes float32."""
    records, sizes, at_once = table
    slots = {name: f"Mine-{name}_slot" for name in records.state} if with_state else None
    dtype = np.float32 if records.rows.dtype == BFLOAT16 else records.rows.dtype
    wanted = Records(records.keys, records.rows.astype(dtype), records.state if with_state else {})
    with folder() as path:
        assert sok.write_sok(path, "a/b:0", split(records, sizes), optimizer=slots, key_dtype=key_dtype) == len(
            records.keys
        )
        widths = {name: array.shape[1] for name, array in records.state.items()}
        result = sok.read_sok(path, "a/b:0", dim=3, optimizer=slots, widths=widths, chunk_rows=at_once)
        assert result.num_rows == records.num_rows and by_key(result) == by_key([wanted])


# SOK and HPS by their layouts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [b"", b"user/age:0"])
@pytest.mark.parametrize("code", [0, 1, 2, 3])
def test_sok_files_of_every_dtype_are_read(tmp_path, name, code):
    """Files of an independent writer have blank or real names, every dtype of keys and rows, and unordered keys."""
    keys = [9, 4, 2**31 - 2, 0] if code in (0, 2) else [9, 2**62, 4, 0]
    for rows_code, dtype in {4: np.float16, 5: np.float32, 6: np.float64}.items():
        wanted = make_records(keys, 2, {"m": 2, "v": 2}, dtype)
        put(tmp_path / "user_age_0-key", sok_bytes(0, code, np.array(keys, np.uint64), name))
        put(tmp_path / "user_age_0-weight", sok_bytes(1, rows_code, wanted.rows, name))
        for slot in ("m", "v"):
            content = sok_bytes(2, 5, wanted.state[slot], name, slot.encode() if name else b"")
            put(tmp_path / f"user_age_0-Adam-{slot}", content)
        chunks = sok.read_sok(tmp_path, "user/age:0", dim=2, optimizer="adam", chunk_rows=3)
        assert by_key(chunks) == by_key([wanted])


def test_negative_keys_keep_their_bits(tmp_path):
    """int32 and int64 are sign-extended, uint32 is not; SOK and HPS agree."""
    for code, key, wanted in ((0, -5, 2**64 - 5), (1, -5, 2**64 - 5), (2, 2**32 - 1, 2**32 - 1)):
        put(tmp_path / "t-key", sok_bytes(0, code, [key]))
        put(tmp_path / "t-weight", sok_bytes(1, 5, [[1.0]]))
        (chunk,) = sok.read_sok(tmp_path, "t", dim=1)
        assert chunk.keys.tolist() == [wanted]
    hps.write_hps(tmp_path, make_records([2**64 - 5], 1))
    assert struct.unpack("<q", (tmp_path / "key").read_bytes()) == (-5,)


OPTIMIZERS = {
    "adagrad": {"accumulator": "Adagrad-accumulator"},
    "adam": {"m": "Adam-m", "v": "Adam-v"},
    "adamax": {"m": "Adamax-m", "u": "Adamax-v"},
    "adadelta": {"v": "Adadelta-accum_grad", "u": "Adadelta-accum_var"},
    "ftrl": {"accumulator": "Ftrl-accumulator", "z": "Ftrl-linear"},
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_sok_names_of_slots(tmp_path, optimizer):
    """State is written to the files of TensorFlow's slots; an independent reader finds real names in the headers."""
    slots, records = OPTIMIZERS[optimizer], make_records([7, 9], 2, {name: 2 for name in OPTIMIZERS[optimizer]})
    states = {state.name for state in getattr(jaxsok.optim, optimizer)(0.1).state_specs(2)}
    assert states == set(slots)
    sok.write_sok(tmp_path, "user:0", records, optimizer=optimizer)
    assert {path.name for path in tmp_path.iterdir()} == {f"user_0-{end}" for end in ("key", "weight", *slots.values())}
    for name, end in slots.items():
        table, kind, slot, code, values = sok_parsed(tmp_path / f"user_0-{end}")
        assert (table, kind, slot) == (b"user:0".rjust(256), 2, end.split("-")[1].encode().rjust(32))
        assert code == 5 and values.tolist() == records.state[name].reshape(-1).tolist()
    assert sok_parsed(tmp_path / "user_0-key")[:4] == (b"user:0".rjust(256), 0, b" " * 32, 1)
    assert sok_parsed(tmp_path / "user_0-weight")[:4] == (b"user:0".rjust(256), 1, b" " * 32, 5)
    assert by_key(sok.read_sok(tmp_path, "user:0", dim=2, optimizer=optimizer)) == by_key([records])


def test_adamax_under_the_name_of_adam(tmp_path):
    """SOK writes it under that name; a file under both names is refused."""
    records = make_records([7, 9], 2, {"m": 2, "u": 2})
    sok.write_sok(tmp_path, "t", records, optimizer={"m": "Adam-m", "u": "Adam-v"})
    assert by_key(sok.read_sok(tmp_path, "t", dim=2, optimizer="adamax")) == by_key([records])
    shutil.copy(tmp_path / "t-Adam-m", tmp_path / "t-Adamax-m")
    with pytest.raises(ValueError, match=r"t-Adamax-m.*t-Adam-v.*under two names"):
        sok.read_sok(tmp_path, "t", dim=2, optimizer="adamax")


def test_momentum_of_keras_is_the_trace_times_the_rate(tmp_path):
    """Keras: accum = momentum * accum - lr * g; row += accum. Here: trace = momentum * trace + g; row -= lr * trace."""
    rate, momentum = 0.25, 0.5
    gradients = [1.0, -2.0, 4.0]
    accum = trace = 0.0
    for gradient in gradients:
        accum, trace = momentum * accum - rate * gradient, momentum * trace + gradient
    put(tmp_path / "t-key", sok_bytes(0, 1, [7]))
    put(tmp_path / "t-weight", sok_bytes(1, 5, [[1.0]]))
    put(tmp_path / "t-SGD-momentum", sok_bytes(2, 5, [[accum]]))
    (chunk,) = sok.read_sok(tmp_path, "t", dim=1, optimizer="sgd", learning_rate=rate)
    assert chunk.state["trace"].tolist() == [[trace]]
    sok.write_sok(tmp_path / "again", "t", chunk, optimizer="sgd", learning_rate=rate)
    assert sok_parsed(tmp_path / "again/t-SGD-momentum")[4].tolist() == [accum]
    for wrong in (None, 0.0, float("inf")):
        with pytest.raises(ValueError, match=r"learning_rate: got .*Keras"):
            sok.read_sok(tmp_path, "t", dim=1, optimizer="sgd", learning_rate=wrong)


def test_momentum_of_float16_is_multiplied_as_float32(tmp_path):
    """A trace is the momentum times a large number, which float16 cannot hold; nor may it be rounded to its digits."""
    rate, momentum = 1e-3, np.array([[-1.2345e-3, -0.1, -70.0, 300.0]], np.float16)
    put(tmp_path / "t-key", sok_bytes(0, 1, [7]))
    put(tmp_path / "t-weight", sok_bytes(1, 5, [[1.0] * 4]))
    put(tmp_path / "t-SGD-momentum", sok_bytes(2, 4, momentum))
    (chunk,) = sok.read_sok(tmp_path, "t", dim=4, optimizer="sgd", learning_rate=rate)
    np.testing.assert_allclose(chunk.state["trace"], momentum.astype(np.float64) / -rate, rtol=1e-6)
    assert chunk.state["trace"].dtype == np.float32


@pytest.mark.parametrize("dtype", ["<i8", "<u4"])
def test_sok_v1(tmp_path, dtype):
    """Its two files are raw; the width of keys follows from their sizes."""
    records = make_records([7, 9, 4], 2)
    put(tmp_path / "t_keys.file", records.keys.astype(dtype).tobytes())
    put(tmp_path / "t_values.file", hps_bytes([], records.rows)[1])
    assert by_key(sok.read_sok_v1(tmp_path, "t", dim=2, chunk_rows=2)) == by_key([records])
    for name in ("t_keys.file", "t_values.file"):
        whole = (tmp_path / name).read_bytes()
        # Half the bytes of int64 keys form a complete file of uint32 keys; the format cannot distinguish them.
        half = len(whole) // 2 if name == "t_keys.file" and dtype == "<i8" else -1
        for content in [whole[:length] for length in range(len(whole)) if length != half] + [whole + b"x"]:
            put(tmp_path / name, content)
            with pytest.raises(ValueError, match=r"read_sok_v1: .*\.file: byte \d+: "):
                sok.read_sok_v1(tmp_path, "t", dim=2)
        put(tmp_path / name, whole)


def test_hps_meta(tmp_path):
    """It is read only on request; then it must fit."""
    records = make_records([7, 9], 2)
    for name, content in zip(("key", "emb_vector"), hps_bytes(records.keys, records.rows), strict=True):
        put(tmp_path / name, content)
    put(tmp_path / "meta", b"whatever")
    assert by_key(hps.read_hps(tmp_path, dim=2)) == by_key([records])
    with pytest.raises(ValueError, match=r"meta: byte 8: got the end of the file \(8 bytes\), wanted 16"):
        hps.read_hps(tmp_path, dim=2, hotness=True)
    put(tmp_path / "meta", struct.pack("<2q", 5, -1))
    with pytest.raises(ValueError, match=r"meta: byte 8: hotness: got -1"):
        hps.read_hps(tmp_path, dim=2, hotness=True)
    put(tmp_path / "meta", struct.pack("<2q", 5, 6))
    (chunk,) = hps.read_hps(tmp_path, dim=2, hotness=True)
    assert chunk.frequency.tolist() == [5, 6] and chunk.last_step is None
    chunks = hps.read_hps(tmp_path, dim=2, hotness=True, chunk_rows=1)
    assert [chunk.frequency.tolist() for chunk in chunks] == [[5], [6]]


# Files of other tools --------------------------------------------------------------------------------------------


def test_files_of_other_tools_are_read(tmp_path):
    """Parquet files need no metadata of jaxsok, and keys of any integer type."""
    for kind in (pyarrow.int64(), pyarrow.int32(), pyarrow.uint32(), pyarrow.uint64()):
        table = pyarrow.table(
            {
                "row": pyarrow.array([[1.0, 2.0], [3.0, 4.0]], pyarrow.list_(pyarrow.float64(), 2)),
                "key": pyarrow.array([7, 9], kind),
            }
        )
        parquet.write_table(table, tmp_path / "t.parquet")
        assert by_key(columns.read_parquet(tmp_path / "t.parquet")) == {
            7: ([1.0, 2.0], "float64", {}, None, None),
            9: ([3.0, 4.0], "float64", {}, None, None),
        }


def test_columns_as_others_see_them(tmp_path):
    """The independent readers are pyarrow's own and NumPy's."""
    records = make_records([2**64 - 2, 9], 2, {"v": 1}, BFLOAT16, statistics=True)
    columns.write_parquet(tmp_path / "t.parquet", records)
    npz.write_npz(tmp_path / "t.npz", records)
    wanted = [
        {
            "key": int(key),
            "row": records.rows[i].astype(np.float32).tolist(),
            "state.v": records.state["v"][i].tolist(),
            "last_step": int(records.last_step[i]),
            "frequency": int(records.frequency[i]),
        }
        for i, key in enumerate(records.keys)
    ]
    assert parquet.read_table(tmp_path / "t.parquet").to_pylist() == wanted
    with np.load(tmp_path / "t.npz") as arrays:
        assert arrays["key"].tolist() == [2**64 - 2, 9] and str(arrays["row_dtype"]) == "bfloat16"
        assert arrays["row"].tolist() == records.rows.view(np.uint16).tolist()


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint32, np.uint8, ">i8"])
@pytest.mark.parametrize("rows", [np.float16, np.float32, np.float64])
def test_npz_of_other_tools_are_read(tmp_path, kind, rows):
    """Arrays `key` and `row` suffice; keys may be of any integer type, as in columns."""
    keys, numbers = np.array([7, 9, 200], kind), np.arange(6, dtype=rows).reshape(3, 2)
    np.savez_compressed(tmp_path / "t.npz", key=keys, row=numbers)
    read = npz.read_npz(tmp_path / "t.npz")
    assert by_key(read) == by_key([Records(np.array([7, 9, 200], np.uint64), numbers)])


def test_npz_keys_are_widened_by_their_sign(tmp_path):
    np.savez(tmp_path / "t.npz", key=np.array([-2, 3], np.int32), row=np.ones((2, 1), np.float32))
    (chunk,) = npz.read_npz(tmp_path / "t.npz")
    assert chunk.keys.tolist() == [2**64 - 2, 3]
    np.savez(tmp_path / "t.npz", key=np.array([-1, 3], np.int32), row=np.ones((2, 1), np.float32))
    with pytest.raises(ValueError, match=r"got 2\*\*64 - 1 \(int64 -1\)"):
        npz.read_npz(tmp_path / "t.npz")


def test_npz_of_the_other_byte_order_are_read(tmp_path):
    rows, state = np.arange(8, dtype=">f4").reshape(2, 4), np.arange(2, dtype=">f4").reshape(2, 1)
    statistics = {"last_step": np.array([1, 2], ">u4"), "frequency": np.array([3, 4], ">u4")}
    np.savez(tmp_path / "t.npz", key=np.array([7, 2**40], ">i8"), row=rows, **{"state.m": state}, **statistics)
    assert by_key(npz.read_npz(tmp_path / "t.npz")) == {
        7: ([0, 1, 2, 3], "float32", {"m": [0]}, 1, 3),
        2**40: ([4, 5, 6, 7], "float32", {"m": [1]}, 2, 4),
    }


def test_npz_rows_of_16_bits_need_their_dtype(tmp_path):
    np.savez(tmp_path / "t.npz", key=np.array([3]), row=np.ones((1, 2), np.uint16))
    with pytest.raises(ValueError, match=r"t\.npz: row: got uint16 with row_dtype uint16, wanted one of"):
        npz.read_npz(tmp_path / "t.npz")


# What cannot be written ------------------------------------------------------------------------------------------


def test_what_sok_cannot_hold(tmp_path):
    """Keys, numbers, names and optimizers are refused with the remedy, and no file is made."""
    write = functools.partial(sok.write_sok, tmp_path, "t")
    for records, options, message in (
        (make_records([2**40]), {"key_dtype": "int32"}, "got 1099511627776, wanted int32; write them as int64"),
        (make_records([2**63]), {"key_dtype": "uint32"}, "wanted uint32"),
        (make_records([7]), {"key_dtype": "int16"}, "key_dtype: got 'int16'"),
        (make_records([7]), {"dtype": "bfloat16"}, "dtype: got 'bfloat16'"),
        (make_records([7]), {"optimizer": "adam"}, r"records.state: got \[\], wanted also \['m', 'v'\]"),
        (make_records([7]), {"optimizer": "rowwise_adam"}, "got 'rowwise_adam', wanted one whose state SOK has"),
        (make_records([7], 3, {"m": 3}), {"optimizer": {"m": "m"}}, 'wanted "<optimizer>-<slot>"'),
        (make_records([7], 3, {"m": 3, "v": 3}), {"optimizer": {"m": "A-m", "v": "A-m"}}, "a file of its own"),
        (
            make_records([7], 3, {"m": 3}),
            {"optimizer": {"m": f"A-{'m' * 33}"}},
            "a name of 33 bytes, wanted at most 32",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            write(records, **options)
    large = Records(np.array([7], np.uint64), np.array([[1e6]], np.float32))
    with pytest.raises(ValueError, match="got a number beyond the range of float16"):
        write(large, dtype="float16")
    with pytest.raises(ValueError, match="a name of 300 bytes, wanted at most 256"):
        sok.write_sok(tmp_path, "é" * 150, make_records([7]))
    with pytest.raises(ValueError, match="table: got ' t', wanted a name that does not begin with a blank"):
        sok.write_sok(tmp_path, " t", make_records([7]))
    with pytest.raises(ValueError, match="hotness: got True with records without frequency"):
        hps.write_hps(tmp_path, make_records([7]), hotness=True)
    with pytest.raises(ValueError, match="HPS reads no empty table"):
        hps.write_hps(tmp_path, make_records([]))
    assert not list(tmp_path.iterdir())


def test_names_that_collide_on_disk(tmp_path):
    """If two table names differ only in punctuation, the second is refused, with overwrite or without."""
    sok.write_sok(tmp_path, "a:b", make_records([7]))
    for overwrite in (False, True):
        with pytest.raises(FileExistsError, match=r"is of the table 'a:b', wanted 'a_b'"):
            sok.write_sok(tmp_path, "a_b", make_records([9]), overwrite=overwrite)
    (chunk,) = sok.read_sok(tmp_path, "a:b", dim=3)
    assert chunk.keys.tolist() == [7]


def test_npz_refuses_to_write_a_key_twice(tmp_path):
    """A table that could not be read again is not written; a file that is there stays."""
    npz.write_npz(tmp_path / "t.npz", make_records([5], 2))
    twice = Records(np.array([7, 9, 7], np.uint64), np.ones((3, 2), np.float32))
    with pytest.raises(ValueError, match=r"write_npz: records.keys\[2\]: key: got 7 a second time"):
        npz.write_npz(tmp_path / "t.npz", twice, overwrite=True)
    assert by_key(npz.read_npz(tmp_path / "t.npz")) == by_key([make_records([5], 2)])


@pytest.mark.parametrize("write", [columns.write_parquet, npz.write_npz])
def test_one_statistic_alone_is_not_written(tmp_path, write):
    records = Records(np.array([7], np.uint64), np.ones((1, 2), np.float32), last_step=np.ones(1, np.uint32))
    with pytest.raises(ValueError, match=rf"{write.__name__}: records: got last_step alone, wanted"):
        write(tmp_path / "t", records)
    assert not list(tmp_path.iterdir())


def test_memory_is_bounded_by_chunks(tmp_path):
    """A table is written from a generator and read in parts; at most a few chunks are alive at once."""
    import tracemalloc

    def chunks(num_chunks=64, num_rows=1024):
        for number in range(num_chunks):
            keys = np.arange(num_rows, dtype=np.uint64) + np.uint64(number * num_rows)
            yield Records(keys, np.full((num_rows, 64), float(number), np.float32))

    chunk_bytes, whole = 1024 * (64 * 4 + 8), 64 * 1024 * (64 * 4 + 8)
    columns.write_parquet(tmp_path / "first", chunks(1))  # what is imported is not counted
    list(columns.read_parquet(tmp_path / "first"))
    tracemalloc.start()
    hps.write_hps(tmp_path / "hps", chunks())
    sok.write_sok(tmp_path / "sok", "t", chunks())
    columns.write_parquet(tmp_path / "t.parquet", chunks())
    for result in (
        hps.read_hps(tmp_path / "hps", dim=64, chunk_rows=1024),
        sok.read_sok(tmp_path / "sok", "t", dim=64, chunk_rows=1024),
        columns.read_parquet(tmp_path / "t.parquet", chunk_rows=1024),
    ):
        seen = 0
        for chunk in result:
            assert (chunk.rows == chunk.keys[:, None] // np.uint64(1024)).all()
            seen += chunk.num_rows
            assert pyarrow.total_allocated_bytes() < 16 * chunk_bytes  # tracemalloc does not see Arrow's memory
        assert seen == result.num_rows == 64 * 1024
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * chunk_bytes < whole / 3


# Tables ----------------------------------------------------------------------------------------------------------


def collection_of(num_shards, optimizer=None, dtype="float32", names=("user", "item"), capacity=8):
    """Returns a collection whose tables share a store, on some devices."""
    optimizer = optimizer or jaxsok.optim.adam(0.1)
    specs = [jaxsok.TableSpec(name, 4, optimizer, capacity=capacity, dtype=dtype) for name in names]
    features = [jaxsok.FeatureSpec(name, table=name) for name in names]
    if num_shards == 1:
        return jaxsok.Collection(specs, features)
    if len(jax.devices()) < num_shards:
        pytest.skip(f"needs {num_shards} devices")
    mesh = jax.make_mesh(
        (num_shards,),
        ("data",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[:num_shards],
    )
    return jaxsok.Collection(specs, features, mesh=mesh, axis="data")


def train_twice(collection):
    """Returns a state after two steps; tables share keys."""
    state = collection.init(seed=3)
    for keys in ([7, 9, 2**40, 2**64 - 2], [9, 9, 5, 6]):
        batch = collection.batch({name: np.array(keys, np.uint64) for name in ("user", "item")})
        embeddings, state, plan = collection.lookup(collection.grow(state), batch.features)
        gradients = {
            name: embedding + jnp.asarray(i, embedding.dtype) for i, (name, embedding) in enumerate(embeddings.items())
        }
        state, stats = collection.update(state, plan, gradients)
        stats.check()
    return state


def content_of(collection, state, table, with_state=True):
    """Returns the content of a table by key."""
    exported = collection.export_table(state, table)
    return {
        int(key): (
            exported["rows"][i].astype(np.float64).tolist(),
            {name: array[i].tolist() for name, array in exported["state"].items()} if with_state else None,
        )
        for i, key in enumerate(exported["keys"])
    }


MODULES = {
    "hps": (functools.partial(hps.save, defaults=0.0), hps.load, False),
    "sok": (sok.save, sok.load, True),
    "parquet": (columns.save, columns.load, True),
    "npz": (functools.partial(columns.save, format="npz"), functools.partial(columns.load, format="npz"), True),
}


@pytest.mark.parametrize("shards", [(1, 4), (4, 1)])
def test_tables_through_files(tmp_path, shards):
    """Tables saved on some shards load on others, at another capacity, under another name; other tables stay."""
    source, target = collection_of(shards[0]), collection_of(shards[1], names=("item", "user"), capacity=4)
    state = train_twice(source)
    for module, (save, load, has_state) in MODULES.items():
        assert save(source, state, tmp_path / module) == {"user": 6, "item": 6}
        loaded = load(target, target.init(seed=9), tmp_path / module, {"item": "user"})
        assert content_of(target, loaded, "item", has_state) == content_of(source, state, "user", has_state), module
        assert content_of(target, loaded, "user") == {}
        loaded = load(target, loaded, tmp_path / module, ["user"])
        for table in ("user", "item"):
            assert content_of(target, loaded, table, has_state) == content_of(source, state, "user", has_state), module
        if not has_state:
            assert {tuple(line[1]["m"]) for line in content_of(target, loaded, "user").values()} == {(0.0,) * 4}


def test_rows_of_16_bits_through_files(tmp_path):
    """The values that float32 holds come back exactly."""
    collection = collection_of(1, dtype="bfloat16")
    state = train_twice(collection)
    for module, (save, load, has_state) in MODULES.items():
        save(collection, state, tmp_path / module)
        loaded = load(collection, collection.init(seed=9), tmp_path / module)
        for table in ("user", "item"):
            assert content_of(collection, loaded, table, has_state) == content_of(
                collection, state, table, has_state
            ), module


def test_a_bad_file_changes_no_table(tmp_path):
    """If the first table's files are valid and the second's are not, the state is unchanged and still usable."""
    collection = collection_of(1)
    state = train_twice(collection)
    for module, (save, load, _) in MODULES.items():
        save(collection, state, tmp_path / module)
        before = {table: content_of(collection, state, table) for table in ("user", "item")}
        bad = next(path for path in sorted((tmp_path / module).rglob("*item*")) if path.is_file() or module == "hps")
        bad = bad / "key" if module == "hps" else bad
        put(bad, bad.read_bytes()[:-1])
        with pytest.raises(ValueError, match="byte"):
            load(collection, state, tmp_path / module)
        assert {table: content_of(collection, state, table) for table in ("user", "item")} == before


def test_unknown_formats_are_refused(tmp_path):
    collection = collection_of(1)
    for call in (columns.save, columns.load):
        with pytest.raises(ValueError, match=rf"columns.{call.__name__}: format: got 'arrow', wanted one of .*'npz'"):
            call(collection, collection.init(), tmp_path, format="arrow")


def test_rows_alone_and_state_that_does_not_fit(tmp_path):
    """Loading weights without state, or into a table with another optimizer, needs an explicit choice."""
    source, other = collection_of(1), collection_of(1, jaxsok.optim.rowwise_adam(0.1))
    state = train_twice(source)
    columns.save(source, state, tmp_path)
    with pytest.raises(ValueError, match=r"columns.load: table \"user\": got optimizer state .*with_state=False"):
        columns.load(other, other.init(), tmp_path)
    loaded = columns.load(other, other.init(), tmp_path, with_state=False)
    assert content_of(other, loaded, "user", False) == content_of(source, state, "user", False)
    assert {tuple(line[1]["v"]) for line in content_of(other, loaded, "user").values()} == {(0.0,)}
    with pytest.raises(ValueError, match="got rows of dim 4 in the file, wanted 8"):
        wide = jaxsok.Collection([jaxsok.TableSpec("user", 8, jaxsok.optim.sgd(0.1), capacity=8)], [])
        columns.load(wide, wide.init(), tmp_path, with_state=False)
    with pytest.raises(ValueError, match="got the optimizer rowwise_adam, of which SOK has no files"):
        sok.save(other, loaded, tmp_path)
    mapping = {"user": {"m": "Mine-m", "v": "Mine-v"}}
    sok.save(other, loaded, tmp_path, ["user"], optimizers=mapping)
    again = sok.load(other, other.init(), tmp_path, ["user"], optimizers=mapping)
    assert content_of(other, again, "user") == content_of(other, loaded, "user")
    lifted = collection_of(1, jaxsok.optim.lift(optax.adam(0.1)))  # whose learning rate is not known
    with pytest.raises(ValueError, match=r"got the optimizer .*, of which SOK has no files.*with_state=False"):
        sok.save(lifted, lifted.init(), tmp_path / "lifted")
    state = train_twice(lifted)
    names = [slot.name for slot in lifted.stores[0].state_specs]
    mapping = {"user": {name: f"Mine-{number}" for number, name in enumerate(names)}}
    sok.save(lifted, state, tmp_path / "lifted", ["user"], optimizers=mapping)
    again = sok.load(lifted, lifted.init(), tmp_path / "lifted", ["user"], optimizers=mapping)
    assert names and content_of(lifted, again, "user") == content_of(lifted, state, "user")
    sok.save(other, loaded, tmp_path, ["item"], with_state=False)
    with pytest.raises(FileNotFoundError, match=r"item-Adam-m: .*with_state=False"):
        sok.load(source, source.init(), tmp_path, ["item"])


def test_momentum_through_sok(tmp_path):
    """The trace of a table is Keras's momentum over minus the rate; a schedule has no rate."""
    collection = collection_of(1, jaxsok.optim.sgd(0.5, momentum=0.5))
    state = train_twice(collection)
    sok.save(collection, state, tmp_path)
    exported = collection.export_table(state, "user")
    assert (
        sok_parsed(tmp_path / "user-SGD-momentum")[4].tolist()
        == (-0.5 * exported["state"]["trace"].reshape(-1)).tolist()
    )
    loaded = sok.load(collection, collection.init(), tmp_path)
    assert content_of(collection, loaded, "user") == content_of(collection, state, "user")
    scheduled = collection_of(1, jaxsok.optim.sgd(lambda step: 0.5, momentum=0.5))
    with pytest.raises(ValueError, match="got a schedule as the learning rate"):
        sok.load(scheduled, scheduled.init(), tmp_path)


def test_choices_of_tables_are_checked(tmp_path):
    """Unknown names, colliding names, tables without rows and existing files are refused before any file is written."""
    collection = collection_of(1, names=("a:b", "a/b"))
    state = collection.init()
    for save, *_ in MODULES.values():
        with pytest.raises(ValueError, match="got 'a:b' and 'a/b', whose files would both be named 'a_b"):
            save(collection, state, tmp_path)
        with pytest.raises(ValueError, match="tables: got 'c', wanted some of"):
            save(collection, state, tmp_path, ["c"])
        with pytest.raises(TypeError, match="tables: got 'a:b', wanted None, a list"):
            save(collection, state, tmp_path, "a:b")
    with pytest.raises(ValueError, match="'a:b', which has no rows; HPS reads no empty table: leave it out"):
        hps.save(collection, state, tmp_path, ["a:b"], defaults=0.0)
    assert not list(tmp_path.iterdir())
    for module, (save, load, _) in MODULES.items():
        if module != "hps":  # all other formats accept an empty table
            save(collection, state, tmp_path / module, {"a:b": "one", "a/b": "two"})
            with pytest.raises(FileExistsError, match="overwrite=True"):
                save(collection, state, tmp_path / module, {"a:b": "one"})
            state = load(collection, state, tmp_path / module, {"a:b": "two"})
            assert collection.num_rows(state) == {"a:b": 0, "a/b": 0}


def test_a_table_that_cannot_hold_the_file(tmp_path):
    """The load is refused; the error holds the state with the tables loaded before."""
    source = collection_of(1)
    hps.save(source, train_twice(source), tmp_path, defaults=0.0)
    specs = [
        jaxsok.TableSpec("user", 4, jaxsok.optim.adam(0.1), capacity=8),
        jaxsok.TableSpec("item", 4, jaxsok.optim.sgd(0.1), capacity=4, max_capacity=4),
    ]
    collection = jaxsok.Collection(specs, [])
    with pytest.raises((MemoryError, jaxsok.TableFullError)) as info:
        hps.load(collection, collection.init(), tmp_path)
    assert collection.num_rows(info.value.state) == {"user": 6, "item": 0}


def test_an_interrupt_between_tables_keeps_the_state(tmp_path, monkeypatch):
    """Ctrl-C comes once the caller's state was donated to the first table."""
    collection = collection_of(1)
    hps.save(collection, train_twice(collection), tmp_path, defaults=0.0)
    enter = table_import.import_table

    def interrupt(specs, held, table, *args, **options):
        if table.declared.name == "item":
            raise KeyboardInterrupt
        enter(specs, held, table, *args, **options)

    monkeypatch.setattr(table_import, "import_table", interrupt)
    with pytest.raises(KeyboardInterrupt) as info:
        hps.load(collection, collection.init(), tmp_path)
    assert collection.num_rows(info.value.state) == {"user": 6, "item": 0}


@pytest.mark.parametrize("what", ["rows", "state 'accumulator'", "assign"])
def test_numbers_that_float32_cannot_hold_change_no_table(what):
    """Rows and state of float64 become float32: infinite numbers pass, finite ones that would become so do not."""
    collection = collection_of(1, jaxsok.optim.adagrad(0.5))
    state = train_twice(collection)
    before = content_of(collection, state, "user")
    keys, rows = np.array([7, 8], np.uint64), np.zeros((2, 4))
    rows[1, 0] = np.inf
    bad = rows.copy()
    bad[0, 1] = 1e300
    with pytest.raises(ValueError, match=f"{what}.*: got a number beyond the range of float32"):
        if what == "assign":
            collection.assign(state, "user", keys, bad)
        elif what == "rows":
            collection.import_table(state, "user", Records(keys, bad))
        else:
            collection.import_table(state, "user", Records(keys, rows, {"accumulator": bad}))
    assert content_of(collection, state, "user") == before
    state = collection.import_table(state, "user", Records(keys, rows, {"accumulator": rows}))
    np.testing.assert_array_equal(collection.rows_of(state, "user", keys)[0], rows.astype(np.float32))


def test_statistics_follow_their_key(tmp_path):
    """The formats that have room for statistics keep them with their keys."""
    table = jaxsok.TableSpec("user", 4, jaxsok.optim.sgd(0.1), capacity=8, statistics=True)
    collection = jaxsok.Collection([table], [jaxsok.FeatureSpec("user", table="user")])
    state = collection.init()
    for clock, keys in ((5, [7, 7, 9]), (8, [9, 4, 4])):
        features = collection.batch({"user": np.array(keys)}).features
        _, state, _ = collection.lookup(state, features, clock=np.uint32(clock))
    for module in ("parquet", "npz"):
        save, load, _ = MODULES[module]
        save(collection, state, tmp_path)
        chunks = by_key(collection.export_chunks(load(collection, collection.init(), tmp_path), "user"))
        assert {key: chunk[3:] for key, chunk in chunks.items()} == {7: (5, 2), 9: (8, 2), 4: (8, 2)}


@pytest.mark.parametrize("module", ["parquet", "npz"])
def test_one_statistic_alone_enters_nothing(tmp_path, module):
    """The file of the second table is refused before a row of the first is entered."""
    tables = [jaxsok.TableSpec(name, 2, jaxsok.optim.sgd(0.1), capacity=8, statistics=True) for name in ("a", "b")]
    collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec(name, table=name) for name in ("a", "b")])
    _, load, _ = MODULES[module]
    keys, rows = np.array([7, 9], np.uint64), np.ones((2, 2), np.float32)
    {"parquet": columns.write_parquet, "npz": npz.write_npz}[module](tmp_path / f"a.{module}", Records(keys, rows))
    lists = pyarrow.array(rows.tolist(), pyarrow.list_(pyarrow.float32(), 2))
    table = pyarrow.table({"key": keys, "row": lists, "frequency": np.ones(2, np.uint32)})
    parquet.write_table(table, tmp_path / "b.parquet")
    np.savez(tmp_path / "b.npz", key=keys, row=rows, frequency=np.ones(2, np.uint32))
    with pytest.raises(ValueError, match=r"b\.\w+: .*got frequency alone, wanted last_step and frequency") as caught:
        load(collection, collection.init(), tmp_path)
    assert not hasattr(caught.value, "state")


# Defaults of HPS for keys without a row --------------------------------------------------------------------------


def test_hps_directories_are_found_by_the_name_that_is_given(tmp_path):
    """Other programs spell names otherwise than `save`."""
    collection = collection_of(1, names=("user", "item"))
    for folder, key in (("sparse_2000.model", 7), ("sparse_2000_model", 8), ("b_1", 9)):  # noqa: F402
        (tmp_path / folder).mkdir()
        np.array([key], "<i8").tofile(tmp_path / folder / "key")
        np.ones(collection.tables[0].dim, "<f4").tofile(tmp_path / folder / "emb_vector")
    found = hps.load(collection, collection.init(), tmp_path, {"user": "sparse_2000.model", "item": "b.1"})
    assert collection.export_table(found, "user")["keys"].tolist() == [7]
    assert collection.export_table(found, "item")["keys"].tolist() == [9]


def test_hps_gets_what_keys_without_a_row_read(tmp_path):
    """HPS has one number per table, so a table in which `find` reads other values needs it as an argument."""
    collection, state = declare_untrained()
    zeros = ["zeros", "normal_zeros", "constant_zeros", "matrix_zeros", "function_zeros"]
    assert set(hps.save(collection, state, tmp_path / "zeros", zeros)) == set(zeros)
    for name in INITIALIZERS:
        if name == "zeros":
            continue
        number = {"constant": "0.3", "ones": "1"}.get(name, "0")
        message = rf'hps.save: defaults: got none for table "{name}", .*Pass defaults={{{{"{name}": {number}}}}}'
        with pytest.raises(ValueError, match=message.replace("{{", "{").replace("}}", "}")):
            hps.save(collection, state, tmp_path / "refused", [name])
    assert not (tmp_path / "refused").exists()
    assert hps.save(collection, state, tmp_path / "some", ["normal", "zeros"], defaults={"normal": 0.5})
    assert hps.save(collection, state, tmp_path / "all", defaults=-1.0)
    for wrong in ({"norml": 0.0}, float("nan"), {"normal": True}):
        with pytest.raises(ValueError, match=r"hps\.save: defaults"):
            hps.save(collection, state, tmp_path / "wrong", ["normal"], defaults=wrong)


def test_hps_is_refused_for_traced_rows(tmp_path):
    for name, initializer in TRACED.items():
        spec = jaxsok.TableSpec("item", 4, jaxsok.optim.sgd(0.1), initializer=initializer, capacity=8)
        collection = jaxsok.Collection([spec], [])
        with pytest.raises(ValueError, match=rf"in which keys without a row read {name}\("):
            hps.save(collection, collection.init(), tmp_path)
