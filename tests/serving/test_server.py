"""Tests what a running server answers and refuses, in both formats. Clients speak HTTP to a real one on a port."""

import dataclasses
import json
import re
import struct
import time
import tracemalloc

import httpx
import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
import server_cases as cases
from hypothesis import strategies as st
from server_cases import (
    DTYPES,
    JSON,
    KEYS,
    LOOKUP,
    MIXED,
    PREDICT,
    ROOT,
    TENSORS,
    config_of,
    head,
    is_well,
    pack,
    rows_of,
    talk,
    unpack,
)
from waiting import wait_until

import jaxsok
from jaxsok import checkpoint
from jaxsok.serving import artifact, errors, session as session_lib
from jaxsok.serving.http import calls, responses, server, wire

# What it answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", ["json", "tensors"])
@pytest.mark.parametrize("given", ["json", "tensors"])
def test_lookup_in_both_formats(client, given, wanted):
    """Lookups agree in both formats: 64-bit keys lose no bits, shapes are kept, missing keys read the default."""
    if given == "json":
        content, headers = json.dumps({"keys": KEYS}).encode(), dict(JSON)
    else:
        user = np.array([[int(key) % 2**64 for key in bag] for bag in KEYS["user"]], np.uint64)
        item = np.array([int(key) for key in KEYS["item"]], np.int64)
        content, headers = pack({"user": user, "item": item}, {"of": "a test"}), dict(TENSORS)
    headers["Accept"] = {"json": "application/json", "tensors": TENSORS["Content-Type"]}[wanted]
    found = client.post(LOOKUP, content=content, headers=headers)
    assert found.status_code == 200, found.text
    assert found.headers["content-type"] == headers["Accept"]
    if wanted == "json":
        got = found.json()
        rows, model, version = got["rows"], got["model"], got["version"]
    else:
        arrays, metadata = unpack(found.content)
        assert {array.dtype for array in arrays.values()} == {np.dtype("<f4")}
        rows = {name: array.tolist() for name, array in arrays.items()}
        model, version = metadata["model"], int(metadata["version"])
    assert model == "ranker"
    assert rows == {name: rows_of(name, keys, version) for name, keys in KEYS.items()}


@pytest.mark.parametrize("dtype", ["<i4", "<u4", "<i8", "<u8"])
def test_integers_of_all_widths(client, dtype):
    keys = np.array([7, 8, 9, -2 if dtype[1] == "i" else 11], dtype)
    found = client.post(LOOKUP, content=pack({"user": keys}), headers=TENSORS)
    arrays, metadata = unpack(found.content)
    assert arrays["user"].tolist() == rows_of("user", keys.tolist(), int(metadata["version"]))


@pytest.mark.parametrize("keys", [[], [[], []], [[[7]]], [[1], [2], [3]]])
def test_any_shape(client, keys):
    """Keys of any shape are answered; a list of no keys gives no rows."""
    found = client.post(LOOKUP, json={"keys": {"user": keys}})
    assert found.status_code == 200, found.text
    assert found.json()["rows"]["user"] == rows_of("user", keys, found.json()["version"])


def test_floats_come_without_loss():
    """Floats lose nothing: JSON writes the double of the float32, and a word for what JSON has no number for."""
    rng = np.random.default_rng(3)
    values = rng.integers(0, 2**32, 4096, np.uint32).view(np.float32)
    back = json.loads(wire.json_body("rows", {"a": values}, {}), parse_constant=lambda name: pytest.fail(name))
    got = np.array([float(value) for value in back["rows"]["a"]], np.float64).astype(np.float32)
    np.testing.assert_array_equal(got, values)
    assert {value for value in back["rows"]["a"] if isinstance(value, str)} <= {"NaN", "Infinity", "-Infinity"}
    assert wire.json_body("r", {"a": np.array([np.inf, -np.inf, np.nan])}, {}) == (
        b'{"r":{"a":["Infinity","-Infinity","NaN"]}}'
    )


@pytest.mark.parametrize(
    "shape",
    [[], [0], [7], [100], [3, 0], [0, 99], [99, 0], [40, 3], [3, 40], [2, 1, 50], [9, 5, 2], [1, 64], [1, 1, 8]],
)
def test_json_is_written_in_pieces(shape, monkeypatch):
    """JSON written in pieces equals JSON written at once; the event loop runs between two pieces."""
    monkeypatch.setattr(wire, "PIECE_VALUES", 16)
    dumps, pieces = wire._dumps, []
    array = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    if array.size > 5:
        array.reshape(-1)[5] = -np.inf
    values = [float(number) if np.isfinite(number) else "-Infinity" for number in array.reshape(-1)]
    lists = np.array(values, object).reshape(shape).tolist()
    for rest in ({"model": "ä", "version": 3}, {}):
        wanted = {**rest, "rows": {"u": lists, 'i"': [1, 2]}}
        monkeypatch.setattr(wire, "_dumps", lambda value: pieces.append(dumps(value)) or pieces[-1])
        got = wire.json_body("rows", {"u": array, 'i"': np.array([1, 2])}, rest)
        monkeypatch.undo()
        monkeypatch.setattr(wire, "PIECE_VALUES", 16)
        assert json.loads(got) == wanted
    assert max(map(len, pieces)) < 16 * 24


@pytest.mark.parametrize("given", ["json", "ragged json", "ragged json lists", "tensors", "ragged tensors"])
def test_predict(client, given):
    """Predictions take bags, ragged or of one hotness, and floats; tables and outputs are of one version."""
    bags, dense = [[1, 2], [4, -3]], [[0.5, 1], [2, -4.25]]
    wanted = [sum(key % 2**64 % 1009 for key in bag) + sum(row) for bag, row in zip(bags, dense, strict=True)]
    if "ragged" in given:
        bags, wanted = [[1, 2, 4], [-3]], [1 + 2 + 4 + 1.5, (2**64 - 3) % 1009 - 2.25]
    values, lengths = np.concatenate(bags), np.array([len(bag) for bag in bags], np.int32)
    if given in ("json", "ragged json lists"):
        options = {"json": {"inputs": {"user": bags, "dense": dense}}}
    elif given == "ragged json":
        ragged = {"values": values.tolist(), "lengths": lengths.tolist()}
        options = {"json": {"inputs": {"user": ragged, "dense": dense}}}
    else:
        user = {"user.values": values, "user.lengths": lengths} if "ragged" in given else {"user": np.array(bags)}
        options = {"content": pack({**user, "dense": np.array(dense, np.float32)}), "headers": TENSORS}
    found = client.post(PREDICT, **options)
    assert found.status_code == 200, found.text
    if "json" in given:
        outputs, version = found.json()["outputs"], found.json()["version"]
    else:
        arrays, metadata = unpack(found.content)
        outputs, version = {name: array.tolist() for name, array in arrays.items()}, int(metadata["version"])
    assert outputs == {"logits": wanted, "version": [[version]] * 2}


def mixed_inputs(**changes):
    """Returns inputs of the model "mixed": two samples, with weights, keys, booleans, small integers and bfloat16."""
    user = {"values": [5, 6, 7], "lengths": [2, 1], "weights": [0.5, 2, -1]}
    inputs = {"user": user, "pair": [[1, 2], [3, "4"]], "flag": [True, False], "count": [-128, 7], "half": [[0.5], [1]]}
    return json.dumps({"inputs": {**inputs, **changes}}).encode()


@pytest.mark.parametrize(("dtype", "low", "high"), [("int4", -8, 7), ("uint4", 0, 15), ("int8", -128, 127)])
def test_small_integers_are_not_cut(dtype, low, high):
    """NumPy knows no integers of 4 bits: it takes theirs for bytes."""
    dtype = jnp.dtype(dtype)
    assert wire.read_numbers([low, high], dtype, "x").astype(int).tolist() == [low, high]
    assert wire.read_numbers(np.array([low, high]), dtype, "x").astype(int).tolist() == [low, high]
    for wrong in ([high + 1], [low - 1], [300], [1.5]):
        for given in (wrong, np.array(wrong)):
            with pytest.raises(errors.RequestError, match=r"does not fit|integers"):
                wire.read_numbers(given, dtype, "x")


def test_complex_outputs_are_refused(client, monkeypatch):
    """Neither format has complex numbers; their imaginary parts must not be lost."""
    monkeypatch.setitem(cases.OUTPUTS["mixed"], "logits", artifact.OutputSpec(("b",), "complex64"))
    found = client.post(MIXED, content=mixed_inputs(), headers=JSON)
    assert found.status_code == 400 and 'output "logits": got complex64' in found.json()["error"]["message"]


def test_inputs_of_all_kinds(client):
    wanted = [5 * 0.5 + 6 * 2 + 3 + 1 - 128 + 0.5, -7 + 7 + 0 + 7 + 1]
    assert client.post(MIXED, content=mixed_inputs(), headers=JSON).json()["outputs"]["logits"] == wanted
    tensors = {
        "user.values": np.array([5, 6, 7], "<i8"),
        "user.lengths": np.array([2, 1], "<i8"),
        "user.weights": np.array([0.5, 2, -1], "<f4"),
        "pair": np.array([[1, 2], [3, 4]], "<u8"),
        "flag": np.array([1, 0], "<u4"),
        "count": np.array([-128, 7], "<i8"),
        "half": np.array([[0.5], [1]], "<f8"),
    }
    found = client.post(MIXED, content=pack(tensors), headers=TENSORS)
    assert found.status_code == 200, found.text
    assert unpack(found.content)[0]["logits"].tolist() == wanted
    for name, wrong in {
        "user.weights": np.array([1, 1], "<f4"),
        "flag": np.array([2, 0], "<u4"),
        "count": np.array([128, 0], "<i8"),
        "half": np.array([[1e300], [0]], "<f8"),
        "pair": np.array([[1], [2]], "<u8"),
        "user.lengths": np.array([-1, 4], "<i8"),
    }.items():
        refused = client.post(MIXED, content=pack({**tensors, name: wrong}), headers=TENSORS)
        assert refused.status_code == 400, (name, refused.text)
        assert name.partition(".")[0] in refused.text
    del tensors["user.weights"]
    assert (
        'wanted \\"values\\", \\"lengths\\", \\"weights\\"'
        in client.post(MIXED, content=pack(tensors), headers=TENSORS).text
    )


def test_what_is_served(client):
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json() == {"status": "ready"}
    models = {model["name"]: model["version"] for model in client.get("/v1/models").json()["models"]}
    assert set(models) == {"ranker", "mixed", "tables_only"}
    found = client.get("/v1/models/ranker").json()
    assert found["version"] == models["ranker"]
    assert found["tables"]["item"] == {
        "dim": 3,
        "default": -7.0,
        "row_dtype": "float32",
        "num_rows": 0,
        "max_keys": 2048,
    }
    assert found["inputs"]["dense"] == {"kind": "array", "dtype": "float32", "shape": [2]}
    assert found["inputs"]["user"] == {"kind": "bags", "table": "user", "is_weighted": False}
    pair = client.get("/v1/models/mixed").json()["inputs"]["pair"]
    assert pair == {"kind": "keys", "table": "item", "shape": [2]}
    assert found["limits"]["max_batch_size"] == 64 and found["limits"]["max_keys"] == 5000
    assert client.get("/v1/models/tables_only").json()["inputs"] is None


def test_metrics():
    """Metrics count the requests, read the session's counts at the scrape, and have no labels chosen by clients."""
    session = cases.Session()
    with cases.serving(session) as found, httpx.Client(base_url=found.address) as client:
        for _ in range(3):
            client.post(LOOKUP, json={"keys": {"user": [1, 2], "item": [3]}})
        client.post(LOOKUP, content=b"{", headers=JSON)
        client.post("/v1/models/of_a_client/lookup", json={})
        client.post(PREDICT, json={"inputs": {"user": [[1]], "dense": [[0, 0]]}})
        got = client.get("/metrics")
        assert got.headers["content-type"].startswith("text/plain")
        samples = cases.samples_of(got.text)
        assert samples["jaxsok_requests_total", "200", "lookup", "ranker"] == 3
        assert samples["jaxsok_requests_total", "400", "lookup", "ranker"] == 1
        assert samples["jaxsok_requests_total", "", "404", "lookup"] == 1
        assert "of_a_client" not in got.text
        assert samples["jaxsok_request_seconds_count", "lookup", "ranker"] == 4
        assert 0 < samples["jaxsok_request_seconds_sum", "lookup", "ranker"] < 60
        assert samples["jaxsok_batch_requests_sum", "lookup", "ranker"] == 3
        assert samples["jaxsok_batch_size_sum", "lookup", "ranker"] == 9
        assert samples["jaxsok_batch_size_sum", "predict", "ranker"] == 1
        assert samples["jaxsok_received_bytes_total", "lookup", "ranker"] > 3 * 30
        assert samples["jaxsok_session_keys_total", "ranker"] == 9
        assert samples["jaxsok_session_hit_rate", "ranker"] == 0.5
        assert samples["jaxsok_session_bytes", "ranker"] == 1024
        assert samples["jaxsok_version", "ranker"] == 1
        assert samples["jaxsok_queue_depth", "lookup", "ranker"] == 0
        assert samples["jaxsok_ready",] == 1 and samples["jaxsok_requests_in_flight",] == 0
        session.update(model="ranker")
        assert cases.samples_of(client.get("/metrics").text)["jaxsok_version", "ranker"] == 2


def test_deltas_come_from_the_folder(tmp_path):
    """A server reads each delta that a trainer exports: it serves the trained rows, and removed keys are gone."""
    spec = jaxsok.TableSpec("item", 4, jaxsok.optim.sgd(0.5), capacity=64, statistics=True)
    collection = jaxsok.Collection([spec], [jaxsok.FeatureSpec("item", table="item")])
    state, watched = collection.init(seed=0), tmp_path / "watched"
    watched.mkdir()

    def train(state, keys):
        _, state, plan = collection.lookup(state, collection.batch({"item": np.array(keys)}).features)
        return collection.update(state, plan, {"item": np.ones([len(keys), 4], np.float32)})[0]

    def rows_of_user(state):
        records = collection.export_table(state, "item")
        return dict(zip(records["keys"].tolist(), records["rows"].tolist(), strict=True))

    state = train(state, [7, 8, 9])
    checkpoint.export_full(tmp_path / "full", collection, state)
    with cases.serving(session_lib.open(config_of({"item": tmp_path / "full"}, 4)), watch=watched) as found:
        with httpx.Client(base_url=found.address, timeout=30) as client:
            version = 1
            for number in range(3):
                rows = rows_of_user(state)
                keys = [*range(5, 20), -2]
                got = client.post(LOOKUP, json={"keys": {"item": keys}}).json()
                assert got["version"] == version
                assert got["rows"]["item"] == [rows.get(key, [-1.0] * 4) for key in keys]
                state = train(state, [8, 10 + number])
                state = collection.erase(state, "item", np.array([7]))[0] if number == 1 else state
                chain = [tmp_path / "full", *(watched / f"delta-{i}" for i in range(number))]
                checkpoint.export_delta(watched / f"delta-{number}", collection, state, chain)
                version += 1
                wait_until(lambda now=version: client.get("/v1/models/ranker").json()["version"] >= now)


# What it refuses -----------------------------------------------------------------------------------------------------

U8 = np.arange(3, dtype="<u8")
TYPE = (415, "unsupported_media_type")
BAD = (400, "bad_request")
HEAD = struct.Struct("<Q")


def header_of(**changes):
    """Returns a binary body with one tensor, whose header is changed."""
    entry = {"dtype": "U64", "shape": [3], "data_offsets": [0, 24], **changes}
    text = json.dumps({"user": {name: value for name, value in entry.items() if value is not None}}).encode()
    return HEAD.pack(len(text)) + text + U8.tobytes()


def text_of(header):
    text = header.encode()
    return HEAD.pack(len(text)) + text + U8.tobytes()


REFUSED = {
    "no JSON": (LOOKUP, JSON, b"{keys", *BAD, "the body is no JSON"),
    "nothing": (LOOKUP, JSON, b"", *BAD, "the body is no JSON"),
    "no UTF-8": (LOOKUP, JSON, b'{"keys": {"\xff": [1]}}', *BAD, "the body is no JSON"),
    "UTF-16": (LOOKUP, JSON, '{"keys": {"user": [1]}}'.encode("utf-16"), *BAD, "no JSON"),
    "deep": (LOOKUP, JSON, b"[" * 10_000, *BAD, "nested too deeply"),
    "very deep": (LOOKUP, JSON, b"[" * 300_000, 413, "too_large", "300000 times"),
    "lists": (LOOKUP, JSON, b'{"keys": {"user": [' + b"[]," * 20_000 + b"[]]}}", 413, "too_large", "20000 times"),
    "objects": (LOOKUP, JSON, b'{"keys": {"user": [' + b'{"":0},' * 9000 + b"0]}}", 413, "too_large", "9002 times"),
    "levels": (LOOKUP, JSON, b'{"keys":{"user":' + b"[" * 9 + b"1" + b"]" * 9 + b"}}", *BAD, "8 levels"),
    "a list": (LOOKUP, JSON, b"[1]", *BAD, 'a JSON list, wanted an object with "keys"'),
    "other fields": (LOOKUP, JSON, b'{"keys": {"user": [1]}, "path": "/etc"}', *BAD, '"path"'),
    "no keys": (LOOKUP, JSON, b'{"keys": {}}', *BAD, "an empty object"),
    "null keys": (LOOKUP, JSON, b'{"keys": null}', *BAD, "null"),
    "a name twice": (LOOKUP, JSON, b'{"keys": {"user": [1], "user": [2]}}', *BAD, "twice"),
    "one number": (LOOKUP, JSON, b'{"keys": {"user": 1}}', *BAD, "the number 1"),
    "a float": (LOOKUP, JSON, b'{"keys": {"user": [1, 2.0]}}', *BAD, "the number 2.0"),
    "a boolean": (LOOKUP, JSON, b'{"keys": {"user": [1, true]}}', *BAD, "the boolean True"),
    "null": (LOOKUP, JSON, b'{"keys": {"user": [null]}}', *BAD, "the null None"),
    "an object": (LOOKUP, JSON, b'{"keys": {"user": [{"values": [1]}]}}', *BAD, "the object"),
    "words": (LOOKUP, JSON, b'{"keys": {"user": ["0x10"]}}', *BAD, "digits"),
    "other digits": (LOOKUP, JSON, '{"keys": {"user": ["٣"]}}'.encode(), *BAD, "digits"),
    "65 bits": (LOOKUP, JSON, b'{"keys": {"user": [18446744073709551616]}}', *BAD, "64 bits"),
    "-65 bits": (LOOKUP, JSON, b'{"keys": {"user": ["-9223372036854775809"]}}', *BAD, "64 bits"),
    "9,000 digits": (LOOKUP, JSON, b'{"keys":{"user":[' + b"9" * 9000 + b"]}}", *BAD, "thousands of digits"),
    "NaN": (LOOKUP, JSON, b'{"keys": {"user": [NaN]}}', *BAD, "NaN is no number of JSON"),
    "ragged": (LOOKUP, JSON, b'{"keys": {"user": [[1, 2], [3]]}}', *BAD, "one length, got 1 and 2"),
    "two depths": (LOOKUP, JSON, b'{"keys": {"user": [[1], 2]}}', *BAD, "one depth"),
    "a table": (LOOKUP, JSON, b'{"keys": {"usr": [1]}}', 404, "unknown_table", "['item', 'user']"),
    "a long table": (LOOKUP, JSON, b'{"keys": {"' + b"t" * 9999 + b'": [1]}}', 404, "unknown_table", "item"),
    "half a pair": (LOOKUP, JSON, b'{"keys": {"\\ud800": [1]}}', 404, "unknown_table", "item"),
    "a model": ("/v1/models/rnker/lookup", JSON, b"{}", 404, "unknown_model", "['mixed', 'ranker', 'tables_only']"),
    "a model's page": ("/v1/models/..%2f..%2fetc%2fpasswd", None, None, 404, "not_found", "nothing at this path"),
    "keys of a table": (LOOKUP, JSON, json.dumps({"keys": {"item": [1] * 2049}}), 413, "too_large", "2049 keys"),
    "keys of all": (
        LOOKUP, JSON, json.dumps({"keys": {"item": [1] * 2048, "user": [1] * 3000}}), 413, "too_large", "5048 keys",
    ),
    "bytes": (LOOKUP, JSON, b" " * (1 << 20) + b"{}", 413, "too_large", "bytes are taken"),
    "text": (LOOKUP, {"Content-Type": "text/plain"}, b"{}", *TYPE, "'text/plain'"),
    "no type": (LOOKUP, {}, b"{}", *TYPE, "None"),
    "Latin": (LOOKUP, {"Content-Type": "application/json; charset=latin-1"}, b"{}", *TYPE, "got"),
    "gzip": (LOOKUP, {**JSON, "Content-Encoding": "gzip"}, b"{}", *TYPE, "'gzip'"),
    "accept": (LOOKUP, {**JSON, "Accept": "text/html"}, b"{}", 406, "not_acceptable", "neither"),
    "accept none": (LOOKUP, {**JSON, "Accept": "*/*;q=0"}, b"{}", 406, "not_acceptable", "neither"),
    "a path": ("/v1/update", JSON, b'{"path": "/etc/passwd"}', 404, "not_found", "nothing"),
    "an update": ("/v1/models/ranker/update", JSON, b'{"path": "/tmp"}', 404, "not_found", "nothing"),
    "up": ("/../../etc/passwd", None, None, 404, "not_found", "nothing"),
    "a slash": ("/v1/models/", None, None, 404, "not_found", "nothing"),
    "a method": ("/healthz", JSON, b"{}", 405, "method_not_allowed", "POST"),
    "no tensors": (LOOKUP, TENSORS, pack({}), *BAD, "no tensor"),
    "7 bytes": (LOOKUP, TENSORS, b"\x00" * 7, *BAD, "got 7 bytes"),
    "no header": (LOOKUP, TENSORS, b"\x00" * 8, *BAD, "JSON object"),
    "a long header": (LOOKUP, TENSORS, HEAD.pack(2**63) + b"{}", 413, "too_large", "9223372036854775808 bytes"),
    "a cut header": (LOOKUP, TENSORS, HEAD.pack(99) + b"{}", *BAD, "99 bytes, 2 follow"),
    "a cut body": (LOOKUP, TENSORS, header_of()[:-1], *BAD, "ends at byte 24, the data have 23"),
    "a byte more": (LOOKUP, TENSORS, header_of() + b"\0", *BAD, "24 bytes, the data 25"),
    "a dtype": (LOOKUP, TENSORS, header_of(dtype="O"), *BAD, "dtype 'O'"),
    "a list as dtype": (LOOKUP, TENSORS, header_of(dtype=["U64"]), *BAD, "dtype"),
    "floats": (LOOKUP, TENSORS, header_of(dtype="F64"), *BAD, "integers, got F64[3]"),
    "a negative size": (LOOKUP, TENSORS, header_of(shape=[-3]), *BAD, "shape"),
    "true as size": (LOOKUP, TENSORS, header_of(shape=[True]), *BAD, "shape"),
    "a huge size": (LOOKUP, TENSORS, header_of(shape=[2**62, 0]), *BAD, "shape"),
    "huge and none": (
        LOOKUP, TENSORS, header_of(shape=[2**31 - 1, 2**31 - 1, 0], data_offsets=[0, 0]), *BAD, "2**31",
    ),
    "9 axes": (LOOKUP, TENSORS, header_of(shape=[3] + [1] * 8), *BAD, "shape"),
    "another size": (LOOKUP, TENSORS, header_of(shape=[4]), *BAD, "takes 32 bytes"),
    "offsets": (LOOKUP, TENSORS, header_of(data_offsets=[24, 0]), *BAD, "data_offsets"),
    "an offset": (LOOKUP, TENSORS, header_of(data_offsets=[24]), *BAD, "data_offsets"),
    "a hole": (LOOKUP, TENSORS, header_of(shape=[2], data_offsets=[8, 24]), *BAD, "got 8 behind 0"),
    "a field less": (LOOKUP, TENSORS, header_of(shape=None), *BAD, "dtype, shape, data_offsets"),
    "a field more": (LOOKUP, TENSORS, header_of(file="/etc"), *BAD, "dtype, shape, data_offsets"),
    "one integer": (LOOKUP, TENSORS, pack({"user": np.array(3)}), *BAD, "a single number"),
    "a list for an entry": (LOOKUP, TENSORS, text_of('{"user": [1]}'), *BAD, "an object"),
    "a list for all": (LOOKUP, TENSORS, text_of('[["user", 1]]'), *BAD, "JSON object"),
    "twice": (LOOKUP, TENSORS, text_of('{"user": {}, "user": {}}'), *BAD, "twice"),
    "metadata": (LOOKUP, TENSORS, pack({"user": U8}, {"a": 1}), *BAD, "strings"),
    "no model": ("/v1/models/tables_only/predict", JSON, b"{}", 404, "no_predict", "no dense_file"),
    "an input": (PREDICT, JSON, b'{"inputs": {"usr": [[1]], "dense": [[1, 2]]}}', *BAD, "'usr'"),
    "too few": (PREDICT, JSON, b'{"inputs": {"user": [[1]]}}', *BAD, "none for ['dense']"),
    "a dim": (PREDICT, JSON, b'{"inputs": {"user": [[1]], "dense": [[1, 2, 3]]}}', *BAD, "[1, 3], wanted [samples, 2]"),
    "an axis": (PREDICT, JSON, b'{"inputs": {"user": [1], "dense": [[1, 2]]}}', *BAD, "[samples, keys]"),
    "samples": (
        PREDICT, JSON, b'{"inputs": {"user": [[1], [2]], "dense": [[1, 2]]}}', *BAD, "one number of samples",
    ),
    "no samples": (PREDICT, JSON, b'{"inputs": {"user": [], "dense": []}}', *BAD, "shape [0]"),
    "none at all": (
        PREDICT, TENSORS, pack({"user": np.zeros([0, 1], "<i8"), "dense": np.zeros([0, 2], "<f4")}), *BAD,
        "0 samples",
    ),
    "many samples": (
        PREDICT, JSON, json.dumps({"inputs": {"user": [[1]] * 65, "dense": [[1, 2]] * 65}}), 413, "too_large",
        "65 samples",
    ),
    "many keys": (
        PREDICT, JSON, json.dumps({"inputs": {"user": [[1] * 5001], "dense": [[1, 2]]}}), 413, "too_large", "5001 keys",
    ),
    "a float as key": (PREDICT, JSON, b'{"inputs": {"user": [[1.5]], "dense": [[1, 2]]}}', *BAD, "1.5"),
    "a word": (PREDICT, JSON, b'{"inputs": {"user": [[1]], "dense": [["a", 2]]}}', *BAD, "'a'"),
    "1e39": (PREDICT, JSON, b'{"inputs": {"user": [[1]], "dense": [[1e39, 2]]}}', *BAD, "float32"),
    "1e999": (PREDICT, JSON, b'{"inputs": {"user": [[1]], "dense": [[1e999, 2]]}}', *BAD, "float32"),
    "10**400": (
        PREDICT, JSON, b'{"inputs":{"user":[[1]],"dense":[[1' + b"0" * 400 + b",2]]}}", *BAD, "float32",
    ),
    "lengths": (
        PREDICT, JSON, b'{"inputs": {"user": {"values": [1, 2], "lengths": [1]}, "dense": [[1, 2]]}}', *BAD,
        "add up",
    ),
    "a negative length": (
        PREDICT, JSON, b'{"inputs": {"user": {"values": [1], "lengths": [2, -1]}, "dense": [[1, 2]]}}', *BAD,
        "add up",
    ),
    "a field of bags": (
        PREDICT, JSON, b'{"inputs": {"user": {"values": [1], "offsets": [0, 1]}, "dense": [[1, 2]]}}', *BAD,
        '"offsets"',
    ),
    "bags of floats": (
        PREDICT, JSON, b'{"inputs": {"user": [[1]], "dense": {"values": [1], "lengths": [1]}}}', *BAD, "object",
    ),
    "no weights": (MIXED, JSON, mixed_inputs(user={"values": [1], "lengths": [1]}), *BAD, '"weights"'),
    "rows of weighted ones": (MIXED, JSON, mixed_inputs(user=[[1], [2]]), *BAD, "no weights"),
    "weights": (MIXED, JSON, mixed_inputs(user={"values": [1], "lengths": [1, 0], "weights": [[1]]}), *BAD, "[1, 1]"),
    "a weight": (MIXED, JSON, mixed_inputs(user={"values": [1], "lengths": [1, 0], "weights": ["1"]}), *BAD, "numbers"),
    "1 for true": (MIXED, JSON, mixed_inputs(flag=[1, False]), *BAD, "booleans are wanted"),
    "true for 1": (MIXED, JSON, mixed_inputs(count=[1, True]), *BAD, "integers are wanted"),
    "1.0 for 1": (MIXED, JSON, mixed_inputs(count=[1.0, 2]), *BAD, "integers are wanted"),
    "9 bits": (MIXED, JSON, mixed_inputs(count=[1, 128]), *BAD, "does not fit int8"),
    "65 bits of a count": (MIXED, JSON, mixed_inputs(count=[1, 2**64]), *BAD, "does not fit int8"),
    "bfloat16": (MIXED, JSON, mixed_inputs(half=[[3.4e38], [3.4e38]]), *BAD, "does not fit bfloat16"),
    "bags for keys": (MIXED, JSON, mixed_inputs(pair={"values": [1], "lengths": [1]}), *BAD, "the object"),
    "half of a ragged one": (
        PREDICT, TENSORS, pack({"user.values": U8, "dense": np.zeros([1, 2], "<f4")}), *BAD, "user.values",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_in_words(client, case):
    """Bad input gets one form of error that says what was given and what is wanted; the server keeps answering."""
    path, headers, body, status, code, words = REFUSED[case]
    found = client.get(path) if body is None else client.post(path, content=body, headers=headers)
    assert found.headers["content-type"] == "application/json"
    got = found.json()
    assert set(got) == {"error"} and set(got["error"]) == {"code", "message"}
    assert (found.status_code, got["error"]["code"]) == (status, code), got
    assert words in got["error"]["message"], got
    assert "Traceback" not in found.text and ".py" not in found.text
    assert len(found.content) < 600
    assert is_well(client)


def test_responses_have_limits():
    """Responses have a limit: 4,096 rows of 4 numbers exceed 10,000 in JSON, and fit in the binary format."""
    body = json.dumps(
        {"keys": {"user": [1] * 4000}, "item": []}[0:1] if False else {"keys": {"user": [[1] * 4] * 1024}}
    )
    with cases.serving(cases.Session(), max_json_values=10_000, max_response_bytes=70_000) as found:
        with httpx.Client(base_url=found.address) as own:
            refused = own.post(LOOKUP, content=body, headers=JSON)
            assert refused.status_code == 413 and TENSORS["Content-Type"] in refused.json()["error"]["message"]
            taken = own.post(LOOKUP, content=body, headers={**JSON, "Accept": TENSORS["Content-Type"]})
            assert unpack(taken.content)[0]["user"].shape == (1024, 4, 4)
            more = pack({"user": np.ones([4096], "<u8"), "item": np.ones([500], "<u8")})
            assert own.post(LOOKUP, content=more, headers=TENSORS).status_code == 413


@pytest.mark.parametrize("shape", [[2**30, 0], [9, 2**20, 0], [2**20, 2, 0, 2**5]])
def test_axes_of_no_size_do_not_hide_others(client, shape):
    """A body of 90 bytes may not ask for lists of a billion entries, or for as many bags, behind an axis of no size."""
    text = json.dumps({"user": {"dtype": "U64", "shape": shape, "data_offsets": [0, 0]}}).encode()
    begin = time.perf_counter()
    body = HEAD.pack(len(text)) + text
    for accept in JSON["Content-Type"], TENSORS["Content-Type"]:
        found = client.post(LOOKUP, content=body, headers={**TENSORS, "Accept": accept})
        assert found.status_code == 413 and "user" in found.text, found.text
    entry = {"dtype": "F32", "shape": [0, 2], "data_offsets": [0, 0]}
    text = json.dumps({"user": {"dtype": "U64", "shape": [2**30, 0], "data_offsets": [0, 0]}, "dense": entry}).encode()
    found = client.post(PREDICT, content=HEAD.pack(len(text)) + text, headers=TENSORS)
    assert found.status_code == 413 and f"{2**30} samples" in found.text, found.text
    assert time.perf_counter() - begin < 20


def test_empty_lists_count_in_json_responses():
    body = pack({"user": np.zeros([1500, 0], "<u8")})
    with cases.serving(cases.Session(), max_json_values=5000) as found:
        with httpx.Client(base_url=found.address) as own:
            refused = own.post(LOOKUP, content=body, headers={**TENSORS, "Accept": JSON["Content-Type"]})
            assert refused.status_code == 413 and "6000 numbers" in refused.text
            taken = own.post(LOOKUP, content=body, headers=TENSORS)
            assert unpack(taken.content)[0]["user"].shape == (1500, 0, 4)


def test_names_that_stand_twice_are_found_at_once():
    """A name that occurs twice among 40,000 is found in time linear in the body."""
    names = [f"{number:x}" for number in range(40_000)]
    body = ("{" + ",".join(f'"{name}":0' for name in [*names, names[-1]]) + "}").encode()
    begin = time.perf_counter()
    with pytest.raises(errors.RequestError, match="'9c3f' twice"):
        wire.read_json(body, "test", "keys")
    assert time.perf_counter() - begin < 20, "grows with the square"


def test_errors_have_statuses():
    """Each kind of the session's errors has its own status."""
    kinds = (errors.UnknownModelError, errors.UnknownTableError, errors.RequestTooLargeError, errors.RequestError)
    assert [responses.refusal_of(kind("why"), "lookup").status for kind in kinds] == [404, 404, 413, 400]


# How large requests may be -------------------------------------------------------------------------------------------


def need_of(sizes, samples=0, numbers=0):
    """Returns the bytes of the largest useful bodies: keys of 20 digits in quotes, one list each; and binary."""
    text, data = 0, 0
    for keys in sizes:
        text += len(json.dumps([["18446744073709551614"]] * keys, indent=2))
        data += 8 * keys
    text += len(json.dumps([-1.7976931348623157e308] * (samples + numbers), indent=2))
    return text, data + 8 * (samples + numbers)


@pytest.mark.parametrize(
    ("path", "op", "need"),
    [
        ("/v1/models/ranker", "lookup", need_of([4096, 2048])),
        ("/v1/models/ranker", "predict", need_of([4096], 64, 128)),
        ("/v1/models/mixed", "predict", need_of([4096, 128], 64, 4096 + 64 * 3)),
    ],
)
def test_bodies_may_have_what_the_keys_of_a_model_need(path, op, need):
    """Bodies may have the size of a model's largest request in its widest form; the model's page states it."""
    with cases.serving(cases.Session()) as found, httpx.Client(base_url=found.address) as own:
        limits = own.get(path).json()["limits"]["max_body_bytes"][op]
        for most, (media_type, limit) in zip(need, limits.items(), strict=True):
            assert most <= limit <= 2 * most + (128 << 10), media_type
            begin = time.monotonic()
            sent = head(f"{path}/{op}", Content_Length=limit + 1, Expect="100-continue")
            got = talk(found.address, sent.replace(b"application/json", media_type.encode()))
            assert got.startswith(b"HTTP/1.1 413") and f"at most {limit} bytes".encode() in got
            assert b"100 Continue" not in got and time.monotonic() - begin < 5
        assert is_well(own)


@pytest.mark.parametrize("shape", [[4096], [4096, 1], [1, 4096], [64, 64, 1]])
def test_the_largest_requests_are_answered(shape):
    """The largest requests, keys of 20 digits in quotes on lines of their own, are answered."""
    keys = np.full(shape, 2**64 - 2, np.uint64)
    with cases.serving(cases.Session()) as found, httpx.Client(base_url=found.address) as own:
        text = json.dumps({"keys": {"user": keys.astype(str).tolist()}}, indent=2).encode()
        for body, headers in ((text, JSON), (pack({"user": keys}), TENSORS)):
            got = own.post(LOOKUP, content=body, headers={**headers, "Accept": TENSORS["Content-Type"]})
            assert got.status_code == 200, got.text
            assert unpack(got.content)[0]["user"].shape == (*shape, 4)


BOMBS = {
    "zeros": b"0,",
    "lists": b"[],",
    "lists of lists": b"[[]],",
    "deep lists": b"[[[[[[[1]]]]]]],",
    "objects": b'{"":0},',
    "empty objects": b"{},",
    "strings": b'"",',
}


@pytest.mark.parametrize("unit", BOMBS.values(), ids=BOMBS)
@pytest.mark.parametrize("place", ['{"keys":{"user":[%s0]}}', '{"keys":[%s0]}', "[%s0]"])
def test_what_a_body_becomes_in_memory_is_bounded_by_keys(unit, place):
    """A body is bounded by its keys as well as its bytes: two million small values in 8 MiB are refused unparsed."""
    model = cases.Session().models["ranker"]
    before, after = place.encode().split(b"%s")
    body = before + unit * ((8 << 20) // len(unit)) + after
    tracemalloc.start()
    try:
        with pytest.raises(errors.RequestTooLargeError, match="got JSON with"):
            calls.Lookups(None, 1 << 20).read(body, "json", model)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@hypothesis.given(
    st.lists(st.lists(st.integers(-(2**63), 2**64 - 1), min_size=2, max_size=2), min_size=1, max_size=30),
    st.sampled_from([None, 0, 2, "\t"]),
    st.sampled_from([(",", ":"), (", ", ": "), (" , ", " : ")]),
    st.booleans(),
)
def test_how_json_is_written_does_not_matter(client, keys, indent, separators, is_quoted):
    """Spaces, line ends and quotes in JSON do not make a request too large."""
    given = [list(map(str, pair)) for pair in keys] if is_quoted else keys
    body = json.dumps({"keys": {"user": given}}, indent=indent, separators=separators)
    found = client.post(LOOKUP, content=body, headers=JSON)
    assert found.status_code == 200, found.text
    assert found.json()["rows"]["user"] == rows_of("user", keys, found.json()["version"])


# Fuzz ----------------------------------------------------------------------------------------------------------------

leaves = st.none() | st.booleans() | st.integers(-(2**66), 2**66) | st.floats() | st.text(max_size=5)
values = st.recursive(leaves, lambda part: st.lists(part, max_size=4) | st.dictionaries(st.text(max_size=6), part))
paths = st.sampled_from([LOOKUP, PREDICT, MIXED])

names = st.sampled_from(
    [
        "pair",
        "flag",
        "count",
        "half",
        "user.weights",
        "user",
        "item",
        "dense",
        "other",
        "user.values",
        "user.lengths",
        "__metadata__",
    ]
)
likely = st.dictionaries(names, st.lists(st.integers(-3, 2**64)) | st.lists(st.lists(st.integers(0, 9))) | values)
good = st.lists(st.integers(0, 9), min_size=2, max_size=2)

fitting = st.fixed_dictionaries(
    {},
    optional={
        "user": st.lists(good, max_size=3) | st.fixed_dictionaries({"values": good, "lengths": good, "weights": good}),
        "dense": st.lists(good, max_size=3),
        "pair": st.lists(good, max_size=3),
        "flag": st.lists(st.booleans(), max_size=3),
        "count": good,
        "half": st.lists(st.lists(st.floats(), min_size=1, max_size=1), max_size=3),
    },
)

bodies = (
    fitting.map(lambda found: {"inputs": found})
    | likely.map(lambda found: {"keys": found})
    | likely.map(lambda found: {"inputs": found})
    | values
)


def assert_answered(client, path, body, headers):
    """Checks that the server answered as asked, or with an error of its own form."""
    found = client.post(path, content=body, headers=headers)
    assert found.status_code in (200, 400, 404, 413), (found.status_code, found.text)
    if found.status_code != 200:
        assert set(found.json()["error"]) == {"code", "message"}
    return found


@hypothesis.given(body=bodies, path=paths)
def test_any_json(client, body, path):
    found = assert_answered(client, path, json.dumps(body).encode(), JSON)
    if found.status_code == 200 and path == LOOKUP:
        version = found.json()["version"]
        assert found.json()["rows"] == {name: rows_of(name, keys, version) for name, keys in body["keys"].items()}


@hypothesis.given(
    arrays=st.dictionaries(names, st.lists(st.integers(0, 2**31 - 1), max_size=6)),
    dtype=st.sampled_from(list(DTYPES.values())),
    cuts=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 255)), max_size=3),
    keep=st.integers(0, 400),
    path=paths,
)
def test_any_tensors(client, arrays, dtype, cuts, keep, path):
    """Binary bodies with changed bytes and cut ends are answered or refused."""
    whole = pack({name: np.array(value).astype(dtype) for name, value in arrays.items()})
    body = bytearray(whole[:keep] if keep < 100 else whole)
    for place, byte in cuts:
        if place < len(body):
            body[place] = byte
    found = assert_answered(client, path, bytes(body), TENSORS)
    if found.status_code == 200 and bytes(body) == whole and path == LOOKUP:
        rows, metadata = unpack(found.content)
        wanted = {name: rows_of(name, keys, int(metadata["version"])) for name, keys in arrays.items()}
        assert {name: array.tolist() for name, array in rows.items()} == wanted


@hypothesis.given(body=st.binary(max_size=64), headers=st.sampled_from([JSON, TENSORS]))
def test_any_bytes(client, body, headers):
    assert_answered(client, LOOKUP, body, headers)


@hypothesis.given(
    st.dictionaries(
        st.text(max_size=4).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(list(DTYPES.values())), st.lists(st.integers(0, 3), max_size=3)),
        max_size=4,
    )
)
def test_tensors_go_both_ways(shapes):
    """The server's bodies can be read from the format's description, and bodies written from it can be read."""
    rng = np.random.default_rng(0)
    arrays = {name: rng.integers(0, 99, shape).astype(dtype) for name, (dtype, shape) in shapes.items()}
    with pytest.raises(errors.RequestError, match='got an array named "__metadata__", which this format needs'):
        wire.tensors_body(arrays | {"__metadata__": np.zeros(2)}, {})
    body = wire.tensors_body(arrays, {"a": "b"})
    for found in (unpack(body)[0], wire.read_tensors(body, "test"), wire.read_tensors(pack(arrays), "test")):
        assert set(found) == set(arrays)
        for name, array in arrays.items():
            assert found[name].dtype == array.dtype
            np.testing.assert_array_equal(found[name], array)


def test_the_libraries_of_the_format_read_it():
    """The format's public libraries read the server's bodies."""
    safetensors = pytest.importorskip("safetensors.numpy")
    arrays = {"user": np.arange(6, dtype=np.uint64).reshape(2, 3), "dense": np.ones([2, 2], np.float32)}
    for found in (wire.read_tensors(safetensors.save(arrays), "t"), safetensors.load(wire.tensors_body(arrays, {}))):
        for name, array in arrays.items():
            np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize(
    ("header", "format"),
    [
        ('application/json; x="' + ";" * 60_000, "json"),
        (f"application/json; charset*{'1' * 5000}=utf-8", "json"),
        ("application/json; charset*=utf-8''utf-8; charset*0=utf", None),
        ("application/json; charset*=%00''41", None),
        ('Application/JSON ; Charset="UTF-8"', "json"),
        ("application/json; charset=utf-8; charset=latin-1", None),
    ],
    ids=["long", "digits", "mixed", "zero", "case", "two"],
)
def test_crafted_content_types_are_read(header, format):
    """The standard library's parser takes seconds for the first one, and raises for the next ones."""
    start = time.process_time()
    assert wire.media_type_of(header) == format
    assert time.process_time() - start < 0.1


# The pages -----------------------------------------------------------------------------------------------------------


def table_of(heading, page):
    """Returns the cells of the table below a heading of a page."""
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", section, re.M)][
        2:
    ]


def test_the_page_has_all_of_it():
    """The pages of the server list all options with their defaults, endpoints and metrics."""
    page = "\n".join((ROOT / "docs" / name).read_text() for name in ("server.md", "operating_the_server.md"))
    listed = {cells[0]: cells[1] for cells in table_of("Limits", page)}
    defaults = {f"`--{f.name.replace('_', '-')}`": str(f.default) for f in dataclasses.fields(server.ServerOptions)}
    assert listed == defaults
    app = server.App(cases.Session())
    routes = {f"`{'POST' if 'POST' in route.methods else 'GET'} {route.path}`" for route in app.asgi.routes}
    assert {cells[0] for cells in table_of("Endpoints", page) if cells[0].startswith(("`GET", "`POST"))} == routes
    families = {family.name for family in app.metrics.registry.collect()}
    metrics = {f"jaxsok_{name}" for name in re.findall(r"`(\w+)`", " ".join(c[0] for c in table_of("Metrics", page)))}
    assert families <= {name.removesuffix("_total") for name in metrics}
    codes = set(re.findall(r"`(\w+)`", " ".join(cells[1] for cells in table_of("Errors", page))))
    assert {code for _, _, _, _, code, *_ in REFUSED.values()} <= codes
