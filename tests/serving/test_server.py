"""The server: what it answers, what it refuses, and that it goes on. Clients speak HTTP to a real one on a port."""

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import http.client
import io
import itertools
import json
import os
import pathlib
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import tracemalloc

import httpx
import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
import server_cases as cases
from hypothesis import strategies as st
from serving_cases import PLATFORMS
from waiting import wait_until

import jaxsok
from jaxsok import Bags, Records, __main__ as command_line, checkpoint
from jaxsok.interchange.hps import write_hps
from jaxsok.serving import artifact, errors, fused, session as session_lib
from jaxsok.serving.frozen import FrozenTable, SizedRecords, freeze_records
from jaxsok.serving.http import batching, calls, responses, running, server, wire

ROOT = pathlib.Path(__file__).resolve().parents[2]
JSON = {"Content-Type": "application/json"}
TENSORS = {"Content-Type": "application/vnd.jaxsok.v1+safetensors"}
LOOKUP, PREDICT = "/v1/models/ranker/lookup", "/v1/models/ranker/predict"
DTYPES = {"U64": "<u8", "I64": "<i8", "U32": "<u4", "I32": "<i4", "F32": "<f4", "F64": "<f8"}


def pack(arrays, metadata=None, **header):
    """Packs a binary body, written from the description of the format alone."""
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    data = io.BytesIO()
    entries = {} if metadata is None else {"__metadata__": metadata}
    for name, array in arrays.items():
        begin = data.tell()
        data.write(array.tobytes())
        entries[name] = {
            "dtype": names[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [begin, data.tell()],
            **header,
        }
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data.getvalue()


def unpack(body):
    """Returns the arrays and the metadata of a binary body."""
    (size,) = struct.unpack("<Q", body[:8])
    header, data = json.loads(body[8 : 8 + size]), body[8 + size :]
    metadata = header.pop("__metadata__")
    found = {
        name: np.frombuffer(data[slice(*entry["data_offsets"])], DTYPES[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
    }
    return found, metadata


def rows_of(table, keys, version):
    """Returns the rows that the session of server_cases has for nested keys."""
    if isinstance(keys, list):
        return [rows_of(table, key, version) for key in keys]
    return cases.row_of(table, keys, version)


@pytest.fixture(scope="module")
def session():
    return cases.Session()


@pytest.fixture(scope="module")
def address(session):
    with cases.serving(session, max_body_bytes=1 << 20, max_keys=5000, body_timeout_s=1.0) as found:
        yield found.address


@pytest.fixture(scope="module")
def client(address):
    with httpx.Client(base_url=address, timeout=20) as made:
        yield made


def is_well(client):
    """Checks that the server still answers correctly."""
    found = client.post(LOOKUP, json={"keys": {"user": [4]}})
    version = found.json()["version"]
    return found.status_code == 200 and found.json()["rows"]["user"] == [cases.row_of("user", 4, version)]


def num_taken(client):
    """Returns the number of requests that the server has and has not answered."""
    return cases.samples_of(client.get("/metrics").text)["jaxsok_requests_in_flight",]


# What it answers -----------------------------------------------------------------------------------------------------

KEYS = {
    "user": [[1, -1], [2**63 + 7, "18446744073709551614"], [-(2**63), 3], [1, 1]],
    "item": [5, 2**53 + 1, "-2", 6],
}


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


@pytest.mark.parametrize("given", ["json", "ragged json", "tensors", "ragged tensors"])
def test_predict(client, given):
    """Predictions take bags, ragged or of one hotness, and floats; tables and outputs are of one version."""
    bags, dense = [[1, 2], [4, -3]], [[0.5, 1], [2, -4.25]]
    wanted = [sum(key % 2**64 % 1009 for key in bag) + sum(row) for bag, row in zip(bags, dense, strict=True)]
    if "ragged" in given:
        bags, wanted = [[1, 2, 4], [-3]], [1 + 2 + 4 + 1.5, (2**64 - 3) % 1009 - 2.25]
    values, lengths = np.concatenate(bags), np.array([len(bag) for bag in bags], np.int32)
    if given == "json":
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


MIXED = "/v1/models/mixed/predict"


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
    "9,000 digits": (LOOKUP, JSON, b'{"keys":{"user":[' + b"9" * 9000 + b"]}}", *BAD, "of thousands of digits"),
    "NaN": (LOOKUP, JSON, b'{"keys": {"user": [NaN]}}', *BAD, "NaN, which is no JSON"),
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


def talk(address, *parts, pause_s=0.0):
    """Sends bytes to the server as they are; returns what it sends until it closes or stays silent."""
    host, port = address.removeprefix("http://").split(":")
    got = b""
    with socket.create_connection((host, int(port)), timeout=20) as line:
        with contextlib.suppress(OSError):
            for part in parts:
                line.sendall(part)
                time.sleep(pause_s)
        line.settimeout(8)
        with contextlib.suppress(OSError):
            while part := line.recv(1 << 16):
                got += part
    return got


def head(path=LOOKUP, **headers):
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n{lines}\r\n".encode()


def test_a_body_without_end_is_cut_off(address, client):
    """A body without end is cut off: its bytes are counted while they are read."""
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    got = talk(address, head(Transfer_Encoding="chunked"), *[chunk] * 100)
    assert got.startswith(b"HTTP/1.1 413") and b'"too_large"' in got and b"connection: close" in got.lower()
    assert is_well(client)


def test_a_length_that_is_too_long_is_refused_before_the_body(address, client):
    """A client that asks before it sends a body gets the refusal of its length at once."""
    got = talk(address, head(Content_Length=1 << 40, Expect="100-continue"))
    assert got.startswith(b"HTTP/1.1 413") and b"100 Continue" not in got
    assert is_well(client)


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


def test_a_slow_body_is_given_up(address, client):
    begin = time.monotonic()
    got = talk(address, head(Content_Length=100), b"{", pause_s=1.2)
    assert got.startswith(b"HTTP/1.1 408") and time.monotonic() - begin < 20
    assert is_well(client)


def test_clients_that_leave_and_noise(address, client):
    """Clients that leave and bytes that are no HTTP get no response and do no harm."""
    host, port = address.removeprefix("http://").split(":")
    for sent in (b"", b"GET", head(Content_Length=100) + b"{", b"\x16\x03\x01\x02\x00", head() + b"{}"):
        with socket.create_connection((host, int(port))) as line:
            line.sendall(sent)
    assert talk(address, b"\x00\xff garbage\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert talk(address, head(Content_Length="-1")).startswith(b"HTTP/1.1 400")
    assert talk(address, head(Content_Length=2, Transfer_Encoding="chunked") + b"{}").count(b"HTTP/1.1 2") == 0
    assert is_well(client)


@pytest.mark.parametrize("is_reset", [False, True], ids=["closed", "reset"])
def test_clients_that_leave_with_requests_that_wait_are_quiet(address, client, caplog, is_reset):
    """The first of several requests is answered when its client has left."""
    body = b'{"keys": {"user": [4]}}'
    host, port = address.removeprefix("http://").split(":")
    for _ in range(20):
        with socket.create_connection((host, int(port))) as line:
            line.sendall((head(Content_Length=len(body)) + body) * 5)
            if is_reset:
                line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_until(lambda: num_taken(client) == 0)
    assert is_well(client)
    assert "Exception in ASGI application" not in caplog.text and not caplog.records


def long_head(num_bytes, end="close"):
    """Returns a request whose head has this many bytes, including the empty line."""
    begin = f"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: {end}\r\nX-Filler: ".encode()
    return begin + b"b" * (num_bytes - len(begin) - 4) + b"\r\n\r\n"


@pytest.mark.parametrize("num_bytes, status", [(1 << 16, b"200"), ((1 << 16) + 1, b"431"), (100_000, b"431")])
@pytest.mark.parametrize("how", ["at once", "in parts", "behind another"])
def test_a_head_has_a_limit(address, client, num_bytes, status, how):
    """A head of more than 64 KiB is refused, however it arrives, and the client can read the refusal."""
    sent = long_head(num_bytes)
    parts = {
        "at once": [sent],
        "in parts": [sent[begin : begin + 30_000] for begin in range(0, num_bytes, 30_000)],
        "behind another": [long_head(200, "keep-alive") + sent],
    }[how]
    got = talk(address, *parts, pause_s=0.02)
    assert re.findall(rb"HTTP/1.1 (\d+)", got) == ([b"200"] if how == "behind another" else []) + [status]
    if status == b"431":
        assert got.endswith(b'at most so many are taken."}}') and b'"head_too_large"' in got
        assert b"connection: close" in got.lower()
    assert is_well(client)


def test_a_head_that_goes_on_is_refused_once(address, client):
    """Bytes after a refusal are ignored, and the connection ends."""
    got = talk(address, b"GET / HTTP/1.1\r\na: ", *[b"b" * (1 << 16)] * 20, pause_s=0.01)
    assert re.findall(rb"HTTP/1.1 (\d+)", got) == [b"431"]
    assert is_well(client)


def test_a_trailer_that_goes_on_is_refused_once(address, client):
    """Trailers have the limit of a head: they are stored until they end."""
    parts = [b"2\r\n{}\r\n0\r\nX-Filler: ", *[b"b" * (1 << 16)] * 20]
    got = talk(address, head(Transfer_Encoding="chunked"), *parts, pause_s=0.01)
    assert re.findall(rb"HTTP/1.1 (\d+)", got) == [b"431"]
    wait_until(lambda: num_taken(client) == 0)
    assert is_well(client)


def test_requests_that_are_sent_at_once_are_answered_in_order(address):
    """Pipelined requests get their responses in order, then what follows them its refusal."""
    body = b'{"keys":{"user":[4]}}'
    lookup = head(Content_Length=len(body)) + body
    sent = lookup + head("/nowhere", Content_Length=0) + lookup + b"\x00\xff garbage\r\n\r\n"
    assert re.findall(rb"HTTP/1.1 (\d+)", talk(address, sent)) == [b"200", b"404", b"200", b"400"]


def test_a_damaged_request_behind_others_loses_none_of_them(address):
    body = b'{"keys":{"user":[4]}}'
    sent = head(Content_Length=len(body)) + body + head(Transfer_Encoding="chunked") + b"zz\r\n"
    assert re.findall(rb"HTTP/1.1 (\d+)", talk(address, sent)) == [b"200", b"400"]


def test_pipelined_requests_are_bounded(address):
    """All that have come are parsed: without a bound, one connection would fill the memory."""
    sent = b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n" * 1000
    assert re.findall(rb"HTTP/1.1 (\d+)", talk(address, sent)) == [b"200"] * 17 + [b"400"]


@pytest.mark.parametrize("parts", [1, 2])
def test_upgrades_are_not_taken(address, parts):
    """A request that offers another protocol, as Java's client does, is answered; its body is no request."""
    body = b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"
    begin = head(Content_Length=len(body), Connection="Upgrade, HTTP2-Settings", Upgrade="h2c", HTTP2_Settings="AAMA")
    last = b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    got = talk(address, *([begin + body] if parts == 1 else [begin, body]), last, pause_s=0.2)
    assert re.findall(rb"HTTP/1.1 (\d+)", got) == [b"400", b"200"] and b"no JSON" in got
    body = b'{"keys":{"user":[4]}}'
    begin = head(Content_Length=len(body), Connection="Upgrade, HTTP2-Settings", Upgrade="h2c", HTTP2_Settings="AAMA")
    lookup = head(Content_Length=len(body)) + body
    got = talk(address, *([begin + body + lookup] if parts == 1 else [begin, body + lookup]), last, pause_s=0.2)
    assert re.findall(rb"HTTP/1.1 (\d+)", got) == [b"200", b"200", b"200"]


def test_a_damaged_chunk_ends_its_request(address, client, caplog):
    """A damaged chunk gets one refusal, and the rest of the body is not read as a request."""
    got = talk(address, head(Transfer_Encoding="chunked"), b"2\r\n{}\r\n", b"zz\r\n", pause_s=0.1)
    assert re.findall(rb"HTTP/1.1 (\d+)", got) == [b"400"]
    wait_until(lambda: num_taken(client) == 0)
    assert is_well(client) and not [record for record in caplog.records if record.exc_info]


def test_a_refused_body_does_not_spoil_the_connection(address):
    """A body that is refused by its head is not read as the next request."""
    body = b"POST " * 5000
    request = f"POST /v1/models/no/lookup HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    got = talk(address, request, b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", pause_s=0.2)
    assert re.findall(rb"HTTP/1.1 (\d+)", got) == [b"404", b"200"]


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
    "header",
    [
        'application/json; x="' + ";" * 60_000,
        f"application/json; charset*{'1' * 5000}=utf-8",
        "application/json; charset*=utf-8''utf-8; charset*0=utf",
        "application/json; charset*=%00''41",
    ],
    ids=["long", "digits", "mixed", "zero"],
)
def test_crafted_content_types_are_of_no_format(header):
    """The standard library's parser takes seconds for the first one, and raises for the others."""
    start = time.process_time()
    assert wire.media_type_of(header) is None
    assert time.process_time() - start < 0.1


# Batches -------------------------------------------------------------------------------------------------------------


def in_thread(run, threads):
    """Returns a function that runs another one in a thread."""

    async def run_in_thread(payloads):
        return await asyncio.get_running_loop().run_in_executor(threads, run, payloads)

    return run_in_thread


def batch(run, payloads, limits, **options):
    """Returns a batcher's answers to payloads that come at once; exceptions are values."""

    async def ask():
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            batcher = batching.Batcher(in_thread(run, threads), limits, **options)
            found = await asyncio.gather(
                *(batcher.submit(payload, {"n": payload} if isinstance(payload, int) else {}) for payload in payloads),
                return_exceptions=True,
            )
            assert await batcher.close()
            return found

    return asyncio.run(ask())


@hypothesis.given(
    st.lists(st.integers(0, 12), min_size=1, max_size=30),
    st.integers(1, 10),
    st.sampled_from([0.0, 0.005]),
    st.integers(1, 3),
)
def test_batches_keep_limits_and_order(sizes, limit, delay_s, num_workers):
    """Each payload gets its own answer once; calls take payloads in order and stay within the limit."""
    calls = []

    def run(payloads):
        calls.append(list(payloads))
        return [payload * 10 for payload in payloads]

    found = batch(run, sizes, {"n": limit}, max_delay_s=delay_s, num_workers=num_workers)
    assert found == [size * 10 for size in sizes]
    assert sorted(itertools.chain(*calls)) == sorted(sizes)
    assert all(sum(call) <= limit or len(call) == 1 for call in calls)
    if num_workers == 1:
        assert list(itertools.chain(*calls)) == sizes


def test_one_that_fails_fails_alone():
    def run(payloads):
        if "bad" in payloads:
            raise ValueError("bad")
        return [payload.upper() for payload in payloads]

    seen = []
    found = batch(run, ["a", "bad", "c"], {}, observe=lambda payloads, is_split: seen.append((len(payloads), is_split)))
    assert found[0] == "A" and found[2] == "C" and isinstance(found[1], ValueError)
    assert seen == [(3, True)]


def test_a_call_that_breaks_off_is_the_last_of_no_other():
    """An error in `run` reaches only its own requests; later requests are answered."""
    errors_left = [OSError("not counted")]

    def observe(payloads, is_split):
        if errors_left:
            raise errors_left.pop()

    async def ask():
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            batcher = batching.Batcher(in_thread(lambda payloads: payloads, threads), {}, observe=observe)
            with pytest.raises(OSError, match="not counted"):
                await batcher.submit("first", {})
            assert await batcher.submit("second", {}) == "second"
            assert await batcher.close()

    asyncio.run(ask())


def test_those_who_leave_the_queue_are_not_run():
    """Requests that leave the queue are not run, and do not count for its depth."""
    begun, go, calls, depths = threading.Event(), threading.Event(), [], []

    def run(payloads):
        calls.append(list(payloads))
        begun.set()
        assert go.wait(10)
        return payloads

    async def ask():
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            batcher = batching.Batcher(in_thread(run, threads), {"n": 1}, max_delay_s=0, observe_depth=depths.append)
            first = asyncio.ensure_future(batcher.submit("first", {"n": 1}))
            await asyncio.to_thread(begun.wait, 10)
            second, third = (asyncio.ensure_future(batcher.submit(name, {"n": 1})) for name in ("second", "third"))
            await asyncio.sleep(0.01)
            second.cancel()
            await asyncio.sleep(0.01)
            assert depths[-1] == 1
            go.set()
            assert [await first, await third] == ["first", "third"]
            assert await batcher.close()
            with pytest.raises(batching.ClosedError):
                await batcher.submit("late", {"n": 1})

    asyncio.run(ask())
    assert calls == [["first"], ["third"]]


def test_a_payload_that_finds_no_call_waits_for_no_company():
    """A payload that finds no call under way begins one at once, whatever the delay."""

    async def ask():
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            batcher = batching.Batcher(in_thread(lambda payloads: payloads, threads), {}, max_delay_s=60.0)
            async with asyncio.timeout(20):
                assert [await batcher.submit(name, {}) for name in ("first", "second")] == ["first", "second"]
            assert await batcher.close()

    asyncio.run(ask())


@pytest.mark.parametrize("delay_s", [0.5, 60.0])
def test_company_is_waited_for_while_a_call_is_under_way(delay_s):
    """Payloads that find a call under way share the next one, which begins when that call ends or the delay is over."""
    calls, begun, go = [], threading.Event(), threading.Event()

    def run(payloads):
        calls.append((list(payloads), time.monotonic()))
        if payloads == ["first"]:
            begun.set()
            assert go.wait(20)
        return payloads

    async def ask():
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            batcher = batching.Batcher(in_thread(run, threads), {}, max_delay_s=delay_s, num_workers=2)
            first = asyncio.ensure_future(batcher.submit("first", {}))
            await asyncio.to_thread(begun.wait, 20)
            begin = time.monotonic()
            later = [asyncio.ensure_future(batcher.submit(name, {})) for name in ("second", "third")]
            if delay_s == 60.0:
                await asyncio.sleep(0.05)
                go.set()
            async with asyncio.timeout(20):
                assert await asyncio.gather(*later) == ["second", "third"]
            go.set()
            await first
            assert await batcher.close()
            return begin

    begin = asyncio.run(ask())
    assert [payloads for payloads, _ in calls] == [["first"], ["second", "third"]]
    assert calls[1][1] - begin >= (0.04 if delay_s == 60.0 else 0.49)


async def ask_in_parallel(address, num_clients, num_requests, make, check):
    """Sends each client's requests one after the other, all clients at a time."""
    limits = httpx.Limits(max_connections=num_clients, max_keepalive_connections=num_clients)
    async with httpx.AsyncClient(base_url=address, limits=limits, timeout=30) as client:

        async def ask_often(number):
            rng = np.random.default_rng(number)
            for _ in range(num_requests):
                path, body = make(rng)
                found = await client.post(path, json=body)
                check(body, found)

        await asyncio.gather(*(ask_often(number) for number in range(num_clients)))


def make_request(rng):
    """Draws a lookup or a prediction."""
    if rng.random() < 0.3:
        num = int(rng.integers(1, 4))
        user = rng.integers(0, 2**40, [num, 2]).tolist()
        return PREDICT, {"inputs": {"user": user, "dense": rng.integers(-9, 9, [num, 2]).tolist()}}
    sizes = rng.integers(0, 6, 2)
    keys = {name: rng.integers(-(2**40), 2**40, size).tolist() for name, size in zip(cases.DIMS, sizes, strict=True)}
    return LOOKUP, {"keys": keys}


def check_answer(body, found):
    """Checks that the answer is the oracle's, of the version that it states."""
    assert found.status_code == 200, found.text
    got = found.json()
    version = got["version"]
    if "keys" in body:
        assert got["rows"] == {name: rows_of(name, keys, version) for name, keys in body["keys"].items()}
    else:
        inputs = body["inputs"]
        logits = [sum(key % 1009 for key in bag) + sum(row) for bag, row in zip(*inputs.values(), strict=True)]
        assert got["outputs"] == {"logits": logits, "version": [[version]] * len(logits)}


def test_64_clients_while_the_tables_change():
    """While a thread updates, batches hold several requests, and each answer is its own and of one version."""
    session, versions, stop = cases.Session(), set(), threading.Event()

    def update():
        while not stop.wait(0.02):
            session.update(model="ranker")

    def check(body, found):
        check_answer(body, found)
        versions.add(found.json()["version"])

    updates = threading.Thread(target=update)
    updates.start()
    try:
        with cases.serving(session, max_delay_ms=5) as found:
            asyncio.run(ask_in_parallel(found.address, 64, 5, make_request, check))
    finally:
        stop.set()
        updates.join()
    assert len(versions) > 5
    samples = [size["samples"] for op, _, size in session.calls if op == "predict"]
    assert max(samples) > 3, "no two requests were run together"


def ask_behind_a_call(found, session, requests, num_calls, num_waiting):
    """Asks the first request, and while its call is under way the others, until some calls run and some wait.

    Returns statuses and texts.
    """
    hold, (path, headers, content) = threading.Event(), requests[0]
    session.hold, (_, _, _, model, op) = hold, path.split("/")
    with (
        httpx.Client(base_url=found.address, timeout=20) as client,
        concurrent.futures.ThreadPoolExecutor(2) as threads,
    ):
        first = threads.submit(client.post, path, content=content, headers=headers)
        wait_until(lambda: len(session.calls) == 1)
        others = threads.submit(ask_at_once, found.address, requests[1:])
        depth = lambda: cases.samples_of(client.get("/metrics").text)["jaxsok_queue_depth", *sorted((op, model))]  # noqa: E731
        try:
            wait_until(lambda: len(session.calls) == num_calls and depth() == num_waiting)
        finally:
            hold.set()
        statuses, texts = others.result()
        return [first.result().status_code, *statuses], [first.result().text, *texts]


def ask_at_once(address, requests):
    """Returns the statuses of requests that are sent at once, and the texts of their answers."""

    async def ask():
        async with httpx.AsyncClient(base_url=address, timeout=20) as client:
            found = await asyncio.gather(
                *(client.post(path, content=content, headers=headers) for path, headers, content in requests)
            )
        return [response.status_code for response in found], [response.text for response in found]

    return asyncio.run(ask())


@pytest.mark.parametrize("of", ["32 bits", "32 bits in a prediction", "a weight", "keys of a table"])
def test_what_is_wrong_joins_no_batch(of):
    """A wrong request is refused before it joins a batch, where it would fail all others."""
    session = cases.Session()
    mixed_arrays = {
        "pair": np.array([[3, 4]], "<u8"),
        "flag": np.array([1], "<u4"),
        "count": np.array([7], "<i4"),
        "half": np.array([[0.5]], "<f4"),
        "user.values": np.array([7], "<u8"),
        "user.lengths": np.array([1], "<i4"),
    }
    words, status = "4294967296, wanted 0 to 4294967295", 400
    if of == "32 bits":
        session.key_bits = 32
        good, bad = ((LOOKUP, JSON, json.dumps({"keys": {"user": [key, -1]}})) for key in (7, 2**32))
    elif of == "32 bits in a prediction":
        session.key_bits = 32
        good, bad = (
            (PREDICT, JSON, json.dumps({"inputs": {"user": [[key, -1]], "dense": [[1, 2]]}})) for key in (7, 2**32)
        )
    elif of == "a weight":
        words = "finite"
        good, bad = (
            (MIXED, TENSORS, pack({**mixed_arrays, "user.weights": np.array([weight], "<f4")}))
            for weight in (1, np.nan)
        )
    else:
        words, status = "4097 keys", 413
        good, bad = (
            (PREDICT, JSON, json.dumps({"inputs": {"user": [[1] * number], "dense": [[1, 2]]}})) for number in (1, 4097)
        )
    with cases.serving(session, max_delay_ms=60_000.0) as found:
        statuses, texts = ask_behind_a_call(found, session, [good, bad, good, good], num_calls=1, num_waiting=2)
        assert statuses == [200, status, 200, 200] and words in texts[1], texts
        assert len(session.calls) == 2, session.calls


def test_predictions_that_share_a_call_keep_the_keys_of_a_table():
    """Two requests of 2,000 keys share a call of at most 4,096, and no request is split."""
    session = cases.Session()
    body = json.dumps({"inputs": {"user": [[1] * 2000], "dense": [[1, 2]]}})
    with cases.serving(session, max_delay_ms=60_000.0) as found:
        asked = [(PREDICT, JSON, body)] * 6
        statuses, _ = ask_behind_a_call(found, session, asked, num_calls=2, num_waiting=3)
        assert statuses == [200] * 6
        assert [size["samples"] for _, _, size in session.calls] == [1, 2, 2, 1]


def test_errors_of_the_session_reach_only_those_who_caused_them(caplog):
    """An error of the session reaches only the request that caused it; its reason goes to the log alone."""
    session = cases.Session()
    hold = session.hold = threading.Event()

    def error(op, model, size):
        if size.get("item"):
            raise RuntimeError("a secret of the server")

    session.error = error
    with cases.serving(session, num_workers=1) as found, httpx.Client(base_url=found.address, timeout=20) as client:
        with concurrent.futures.ThreadPoolExecutor(5) as threads:
            asked = [
                threads.submit(client.post, LOOKUP, json={"keys": {"item" if i == 3 else "user": [i]}})
                for i in range(5)
            ]
            wait_until(lambda: num_taken(client) == 5)
            hold.set()
            answers_ = [future.result() for future in asked]
        assert [answer.status_code for answer in answers_] == [200, 200, 200, 500, 200]
        assert answers_[3].json()["error"]["code"] == "internal" and "secret" not in answers_[3].text
        assert answers_[4].json()["rows"]["user"] == [cases.row_of("user", 4, 1)]
        session.error = None
        assert is_well(client)
    assert "a secret of the server" in caplog.text


def test_a_slow_model_does_not_hold_up_others():
    """A slow model does not delay others, since each model has its own threads."""
    session, hold = cases.Session(), threading.Event()
    session.error = lambda op, model, size: model == "tables_only" or hold.wait(20)
    with cases.serving(session, num_workers=1) as found:
        with (
            httpx.Client(base_url=found.address, timeout=20) as client,
            concurrent.futures.ThreadPoolExecutor(4) as threads,
        ):
            paths = [LOOKUP, "/v1/models/mixed/lookup"] * 2
            asked = [threads.submit(client.post, path, json={"keys": {"user": [4]}}) for path in paths]
            wait_until(lambda: num_taken(client) == 4)
            try:
                quick = client.post("/v1/models/tables_only/lookup", json={"keys": {"user": [4]}}, timeout=15)
            finally:
                hold.set()
            assert quick.status_code == 200
            assert [future.result().status_code for future in asked] == [200] * 4


def test_small_responses_are_not_held_back(monkeypatch):
    """Connections have TCP_NODELAY: the kernel would hold a response back until the client acknowledges the last."""
    seen, made = [], running._Protocol.connection_made

    def connection_made(self, transport):
        made(self, transport)
        seen.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(running._Protocol, "connection_made", connection_made)
    with cases.serving(cases.Session()) as found, httpx.Client(base_url=found.address, timeout=20) as client:
        assert is_well(client)
    assert seen and all(seen)


def test_too_many_requests_are_sent_away():
    """Requests beyond the limit get 503 and a time to retry; later requests are answered."""
    session = cases.Session()
    hold = session.hold = threading.Event()
    with cases.serving(session, max_requests=3, num_workers=1) as found:
        with (
            httpx.Client(base_url=found.address, timeout=20) as client,
            concurrent.futures.ThreadPoolExecutor(3) as threads,
        ):
            asked = [threads.submit(client.post, LOOKUP, json={"keys": {"user": [4]}}) for _ in range(3)]
            wait_until(lambda: num_taken(client) == 3)
            sent_away = client.post(LOOKUP, json={"keys": {"user": [4]}})
            assert sent_away.status_code == 503 and sent_away.headers["retry-after"] == "1"
            assert sent_away.json()["error"]["code"] == "busy"
            assert client.get("/healthz").status_code == 200, "the event loop was blocked"
            hold.set()
            assert [future.result().status_code for future in asked] == [200] * 3
            assert is_well(client)


def test_bodies_that_are_held_have_a_limit():
    """Large bodies that are held at one time have a limit."""
    session = cases.Session()
    hold = session.hold = threading.Event()
    body = pack({"user": np.arange(4000, dtype="<u8")})
    with cases.serving(session, max_held_bytes=70_000) as found:
        with (
            httpx.Client(base_url=found.address, timeout=20) as client,
            concurrent.futures.ThreadPoolExecutor(2) as threads,
        ):
            asked = [threads.submit(client.post, LOOKUP, content=body, headers=TENSORS) for _ in range(2)]
            wait_until(lambda: num_taken(client) == 2)
            refused = client.post(LOOKUP, content=body, headers=TENSORS)
            assert refused.status_code == 503 and "70000 bytes" in refused.text
            hold.set()
            assert [future.result().status_code for future in asked] == [200] * 2
            assert client.post(LOOKUP, content=body, headers=TENSORS).status_code == 200


@contextlib.contextmanager
def deaf(address, body):
    """A client that sends a request and reads nothing of the response."""
    host, port = address.removeprefix("http://").split(":")
    with socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        line.settimeout(20)
        line.connect((host, int(port)))
        start = f"POST {LOOKUP} HTTP/1.1\r\nHost: a\r\nContent-Type: {TENSORS['Content-Type']}\r\n"
        line.sendall(f"{start}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        yield line


@pytest.fixture
def large(monkeypatch):
    """Returns a body whose response has 16 MB, more than the kernel buffers for a connection."""
    monkeypatch.setitem(cases.MAX_KEYS, "user", 1 << 20)
    return pack({"user": np.arange(1 << 20, dtype="<u8")})


def test_responses_that_nobody_reads_are_counted(large):
    """A response counts as a request with its bytes until the client reads it or leaves."""
    with cases.serving(cases.Session(), max_requests=2) as found, httpx.Client(base_url=found.address) as client:
        answered = "jaxsok_requests_total", "200", "lookup", "ranker"
        with deaf(found.address, large) as reader, deaf(found.address, large):
            wait_until(lambda: cases.samples_of(client.get("/metrics").text).get(answered) == 2)
            assert num_taken(client) == 2 and found.app.held.num_bytes > 2 << 24
            assert client.post(LOOKUP, json={"keys": {"user": [4]}}).status_code == 503
            got = b""
            while b"\r\n\r\n" not in got:
                got += reader.recv(1 << 10)
            start, _, body = got.partition(b"\r\n\r\n")
            assert start.startswith(b"HTTP/1.1 200")
            rest = int(re.search(rb"content-length: (\d+)", start.lower())[1]) - len(body)
            while rest:
                rest -= len(reader.recv(1 << 20))
            wait_until(lambda: num_taken(client) == 1)
            assert is_well(client)
        wait_until(lambda: num_taken(client) == 0)
        assert found.app.held.num_bytes == 0


def test_clients_that_do_not_read_are_cut_off(large):
    with cases.serving(cases.Session(), max_requests=1, send_timeout_s=0.5) as found:
        with httpx.Client(base_url=found.address) as client, deaf(found.address, large) as line:
            wait_until(lambda: cases.samples_of(client.get("/metrics").text)["jaxsok_unread_responses_total",] == 1)
            wait_until(lambda: num_taken(client) == 0)
            num_bytes = 0
            with contextlib.suppress(ConnectionError):
                while part := line.recv(1 << 20):
                    num_bytes += len(part)
            assert num_bytes < 1 << 24, "the connection ended before the response did"
            assert is_well(client) and found.app.held.num_bytes == 0


def raw_line(address):
    """Opens a connection whose client takes little at a time."""
    line = socket.socket()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
    host, port = address.removeprefix("http://").split(":")
    line.connect((host, int(port)))
    line.settimeout(5)
    return line


def connections_of(found):
    """Returns the connections that a server holds."""
    return len(found.server_state.connections)


def test_the_end_of_a_response_that_nobody_reads_is_cut_off():
    """The last bytes of a response lie in the server's buffer when it is sent; its connection ends all the same."""
    options = {"send_timeout_s": 0.5, "keep_alive_s": 0.2}
    body = json.dumps({"keys": {"user": [7] * 10_000}}).encode()
    head = f"POST {LOOKUP} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with cases.serving(cases.Session(), **options) as found, raw_line(found.address) as line:
        line.sendall(head.encode() + body)
        wait_until(lambda: found.app.held.num_requests == 0 and connections_of(found) == 1)
        wait_until(lambda: connections_of(found) == 0, 10)
        with httpx.Client(base_url=found.address) as client:
            assert is_well(client)


def test_pages_that_nobody_reads_are_cut_off():
    """Also those that are not the models'."""
    with cases.serving(cases.Session(), send_timeout_s=0.5, keep_alive_s=0.5) as found, raw_line(found.address) as line:
        with contextlib.suppress(OSError):
            for _ in range(2000):
                line.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
                time.sleep(3e-3)  # few of them wait at a time
        with httpx.Client(base_url=found.address) as client:
            wait_until(lambda: cases.samples_of(client.get("/metrics").text)["jaxsok_unread_responses_total",] >= 1)
        wait_until(lambda: connections_of(found) == 0, 10)
        with httpx.Client(base_url=found.address) as client:
            assert is_well(client)


def test_a_connection_without_a_request_is_closed():
    with cases.serving(cases.Session(), keep_alive_s=0.3) as found, raw_line(found.address) as line:
        assert line.recv(1) == b""


def test_little_of_a_response_is_on_its_way(large, monkeypatch):
    """A connection never buffers more of a response than a client may take one timeout to read."""
    given, send_all, most = [0], server.App.send, 1 << 19

    async def send_counted(app, response, request, send):
        async def count_sent(message):
            given[0] += len(message.get("body", b""))
            await send(message)

        await send_all(app, response, request, count_sent)

    monkeypatch.setattr(server.App, "send", send_counted)
    with cases.serving(cases.Session()) as found, deaf(found.address, large) as line:
        got = line.recv(1 << 16)
        start, _, body = got.partition(b"\r\n\r\n")
        rest = int(re.search(rb"content-length: (\d+)", start.lower())[1]) - len(body)
        assert rest > 16 * most
        num_read = len(body)
        while rest:
            wanted = num_read + min(rest, 1 << 16)
            wait_until(lambda wanted=wanted: given[0] >= wanted)
            assert given[0] - num_read <= most
            part = line.recv(min(rest, 1 << 16))
            rest, num_read = rest - len(part), num_read + len(part)
        with httpx.Client(base_url=found.address) as client:
            wait_until(lambda: num_taken(client) == 0)


def test_clients_that_read_for_too_long_are_cut_off(large):
    """A client that reads a whole response too slowly is cut off, although each piece is in time."""
    options = {"send_timeout_s": 1.0, "min_send_rate": 1 << 30}
    with cases.serving(cases.Session(), **options) as found, deaf(found.address, large) as line:
        num_bytes = 0
        with contextlib.suppress(ConnectionError):
            while part := line.recv(1 << 16):
                num_bytes += len(part)
                time.sleep(0.02)  # 16 MB take at least 5 s.
        assert num_bytes < 1 << 24, "the connection ended before the response did"
        with httpx.Client(base_url=found.address) as client:
            assert cases.samples_of(client.get("/metrics").text)["jaxsok_unread_responses_total",] == 1
            wait_until(lambda: num_taken(client) == 0)
            assert is_well(client) and found.app.held.num_bytes == 0


def test_how_long_a_response_may_take():
    """The time that a response may take grows with its size."""
    options = server.ServerOptions(send_timeout_s=2.0, min_send_rate=100)
    assert [server.send_limit_s(size, options) for size in (0, 100, 1000)] == [2.0, 3.0, 12.0]


def test_clients_that_read_nothing_take_bounded_memory(large):
    """Sixteen clients that read nothing of 16 MB each take bounded memory: some wait, the others are refused."""
    with cases.serving(cases.Session(), max_requests=64, max_held_bytes=60 << 20) as found:
        with httpx.Client(base_url=found.address, timeout=20) as client, contextlib.ExitStack() as stack:
            before = None
            for number in range(16):
                stack.enter_context(deaf(found.address, large))
                wait_until(lambda number=number: num_answered(client) > number)
                assert found.app.held.num_bytes <= 60 << 20
                if number == 4:
                    before = cases.resident_bytes(os.getpid())
            assert cases.resident_bytes(os.getpid()) - before < 60 << 20
            assert (
                cases.samples_of(client.get("/metrics").text)["jaxsok_requests_total", "503", "lookup", "ranker"] >= 12
            )
            assert is_well(client)


def num_answered(client):
    """Returns the number of answered lookups, of any status."""
    found = cases.samples_of(client.get("/metrics").text)
    return sum(value for name, value in found.items() if name[0] == "jaxsok_requests_total")


def test_a_call_that_takes_too_long():
    """A call that takes too long gives an error; then the queue empties, and others are answered."""
    session = cases.Session()
    hold = session.hold = threading.Event()
    with cases.serving(session, timeout_s=1.0, num_workers=1) as found:
        with httpx.Client(base_url=found.address, timeout=20) as client:
            for _ in range(2):
                late = client.post(LOOKUP, json={"keys": {"user": [4]}})
                assert late.status_code == 504 and late.json()["error"]["code"] == "timeout"
            hold.set()
            assert is_well(client)
            assert len(session.calls) == 2, "a request that was given up was run"


def test_names_that_stand_twice_are_found_at_once():
    """A name that occurs twice among 40,000 is found in time linear in the body."""
    names = [f"{number:x}" for number in range(40_000)]
    body = ("{" + ",".join(f'"{name}":0' for name in [*names, names[-1]]) + "}").encode()
    begin = time.perf_counter()
    with pytest.raises(errors.RequestError, match="'9c3f' twice"):
        wire.read_json(body, "test", "keys")
    assert time.perf_counter() - begin < 20, "grows with the square"


def test_bodies_that_take_too_long_to_read_or_write(monkeypatch):
    """Reading a body and writing a response count towards the time limit of an answer."""
    hold, slow = threading.Event(), set()
    for name in ("read_tensors", "tensors_body"):
        work = getattr(wire, name)

        def hold_back(*arguments, name=name, work=work):
            assert name not in slow or hold.wait(20)
            return work(*arguments)

        monkeypatch.setattr(wire, name, hold_back)
    body = pack({"user": np.ones([4096], "<u8"), "item": np.ones([2048], "<u8")})  # Large enough for the threads.
    with cases.serving(cases.Session(), timeout_s=1.0) as found:
        with httpx.Client(base_url=found.address, timeout=20) as client:
            for name in ("read_tensors", "tensors_body"):
                slow.add(name)
                late = client.post(LOOKUP, content=body, headers=TENSORS)
                assert late.status_code == 504 and late.json()["error"]["code"] == "timeout", late.text
                hold.set()
                slow.clear()
                wait_until(lambda: client.post(LOOKUP, content=body, headers=TENSORS).status_code == 200)
                hold.clear()
            hold.set()


# The end -------------------------------------------------------------------------------------------------------------


def is_closed(address):
    """Checks that the server accepts no connection."""
    try:
        httpx.get(f"{address}/healthz")
    except httpx.ConnectError:
        return True
    except httpx.TransportError:  # The kernel queued it during the stop, and the server never accepted it.
        return False
    return False


def test_what_was_taken_is_finished():
    """On a stop the server is not ready but answers; then it refuses connections, finishes requests and closes."""
    session = cases.Session()
    hold = session.hold = threading.Event()
    with cases.serving(session, drain_s=2.0) as found, httpx.Client(base_url=found.address, timeout=20) as client:
        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            asked = [threads.submit(client.post, LOOKUP, json={"keys": {"user": [i]}}) for i in range(8)]
            wait_until(lambda: num_taken(client) == 8)
            found.stop()
            unready = client.get("/readyz")
            assert unready.status_code == 503 and unready.json()["error"]["code"] == "stopping"
            wait_until(lambda: is_closed(found.address))
            assert not session.is_closed
            hold.set()
            assert [future.result().json()["rows"]["user"][0] for future in asked] == [
                cases.row_of("user", i, 1) for i in range(8)
            ]
    assert session.is_closed
    assert 0 < session.close_timeout_s <= found.app.options.shutdown_s and found.app.is_closed


def test_the_wait_for_requests_is_bounded():
    """A call that does not return is cut off at the stop: its client gets an error, and the server ends."""
    session = cases.Session()
    hold = session.hold = threading.Event()
    with cases.serving(session, shutdown_s=0.5) as found, httpx.Client(base_url=found.address, timeout=20) as client:
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            asked = threads.submit(client.post, LOOKUP, json={"keys": {"user": [4]}})
            wait_until(lambda: num_taken(client) == 1)
            begin = time.monotonic()
            found.stop()
            late = asked.result()
            assert late.status_code == 503 and late.json()["error"]["code"] == "stopping"
            assert time.monotonic() - begin < 20
    assert found.app.num_running == 1 and not session.is_closed, "closed while it is used"
    hold.set()


def test_a_second_interrupt_ends_the_wait():
    """After a second SIGINT the server waits neither for requests nor for the balancer."""
    session = cases.Session()
    hold = session.hold = threading.Event()
    with cases.serving(session, drain_s=60.0, shutdown_s=60.0) as found:
        with httpx.Client(base_url=found.address) as client, concurrent.futures.ThreadPoolExecutor(1) as threads:
            asked = threads.submit(client.post, LOOKUP, json={"keys": {"user": [4]}}, timeout=20)
            wait_until(lambda: num_taken(client) == 1)
            for _ in range(2):
                time.sleep(0.3)
                found.handle_exit(signal.SIGINT, None)
            found.thread.join(30)
            assert not found.thread.is_alive(), "the drain goes on"
            hold.set()
            with contextlib.suppress(httpx.HTTPError):
                asked.result()


def connect(address):
    """Opens a kept-alive connection of the standard library, which never reconnects by itself."""
    host, port = address.removeprefix("http://").split(":")
    line = http.client.HTTPConnection(host, int(port), timeout=20)
    line.connect()
    line.auto_open = 0
    return line


def ask_on(line, key):
    """Sends one request on a connection; returns the status, and whether the server closes the connection."""
    line.request("POST", LOOKUP, json.dumps({"keys": {"user": [key]}}), JSON)
    response = line.getresponse()
    body = json.loads(response.read())
    if response.status == 200:
        assert body["rows"]["user"] == [cases.row_of("user", key, body["version"])]
    return response.status, response.will_close


@pytest.mark.parametrize("drain_s", [0.0, 0.5])
def test_connections_that_are_kept_alive_lose_no_request(drain_s):
    """SIGTERM loses no request of 32 kept-alive connections: 16 busy ones, and 16 idle ones that send once more."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(ROOT / "tests/serving/server_cases.py"), "0.05", str(drain_s)]
    stopped = threading.Event()

    def busy(number, line):
        found = []
        while not found or not found[-1][1]:
            found.append(ask_on(line, number))
        return found

    def idle(number, line):
        found = [ask_on(line, number)]
        assert stopped.wait(20)
        time.sleep(0.06 * number)  # Up to 0.9 s into the stop.
        return [*found, ask_on(line, number)]

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            address = process.stdout.readline().strip()
            with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(32) as threads:
                lines = [stack.enter_context(contextlib.closing(connect(address))) for _ in range(32)]
                asked = [threads.submit(busy if i < 16 else idle, i % 16, line) for i, line in enumerate(lines)]
                time.sleep(0.5)
                process.send_signal(signal.SIGTERM)
                begin = time.monotonic()
                stopped.set()
                found = [future.result() for future in asked]
            output, _ = process.communicate(timeout=20)
            took_s = time.monotonic() - begin
        finally:
            process.kill()
    assert process.returncode == 0 and output == "ended\n"
    assert {status for response in found for status, _ in response} <= {200, 503}
    assert all(response[-1][1] for response in found), "the server kept a connection open and then closed it"
    assert all(len(response) > 1 for response in found)
    assert took_s < 10 + drain_s


def test_connections_that_are_made_are_answered_or_refused():
    """While the server stops, each new connection is answered or refused, and none is reset."""
    asked, is_first = collections.Counter(), threading.Barrier(33)

    def ask(address, number):
        is_first.wait(20)
        while True:
            with contextlib.closing(connect(address)) as line:
                asked[ask_on(line, number)[0]] += 1

    session = cases.Session()
    with cases.serving(session) as found, concurrent.futures.ThreadPoolExecutor(32) as threads:
        asks = [threads.submit(ask, found.address, number) for number in range(32)]
        is_first.wait(20)
        time.sleep(0.5)
        found.stop()
        ends = collections.Counter(type(future.exception()) for future in asks)
    assert set(asked) <= {200, 503} and asked[200] > 0
    # The end follows the last look into the kernel's queue by microseconds.
    assert ends[ConnectionRefusedError] >= 30, ends


@pytest.mark.parametrize("is_used", [True, False])
def test_idle_connections_do_not_hold_up_the_end(is_used):
    """A stop closes idle connections after their usual idle time, not before it and not much later."""
    with (
        cases.serving(cases.Session(), keep_alive_s=1.0) as found,
        contextlib.closing(connect(found.address)) as line,
    ):
        if is_used:
            assert ask_on(line, 4) == (200, False)
        begin = time.monotonic()
        found.stop()
        assert line.sock.recv(1) == b""
        assert 0.8 < time.monotonic() - begin < 5
        found.thread.join(20)
        assert not found.thread.is_alive() and time.monotonic() - begin < 10


def test_the_end_of_idle_connections_is_within_the_bound_of_the_stop():
    with (
        cases.serving(cases.Session(), keep_alive_s=60.0, shutdown_s=0.5) as found,
        contextlib.closing(connect(found.address)) as line,
    ):
        assert ask_on(line, 4) == (200, False)
        begin = time.monotonic()
        found.stop()
        found.thread.join(20)
        assert not found.thread.is_alive() and time.monotonic() - begin < 10


def test_two_servers_cannot_have_one_port():
    with running.bind("127.0.0.1", 0) as where, pytest.raises(OSError, match="--port"):
        running.bind(*where.getsockname()).close()


def test_a_signal_ends_the_process_in_order():
    """SIGINT ends the process in order; test_server_load.py covers SIGTERM."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(ROOT / "tests/serving/server_cases.py"), "0.05"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            address = process.stdout.readline().strip()
            with httpx.Client(base_url=address, timeout=20) as client:
                assert is_well(client)
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 0 and output == "ended\n"


# The session of files ------------------------------------------------------------------------------------------------


def config_of(sources, dim, **options):
    model = {
        "model": "ranker",
        "sparse_files": [str(source) for source in sources.values()],
        "embedding_table_names": list(sources),
        "embedding_vecsize_per_table": [dim] * len(sources),
        "maxnum_catfeature_query_per_table_per_sample": [4] * len(sources),
        "default_value_for_each_table": [-1.0] * len(sources),
        "deployed_device_list": [0],
        "max_batch_size": 64,
        "gpucacheper": 1.0,
        **options,
    }
    return {"supportlonglong": True, "models": [model]}


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


def test_predictions_of_an_exported_model(tmp_path):
    """Requests that share a call get the sums of their own bags, with the bits of a call alone."""
    rng = np.random.default_rng(0)
    keys, rows = np.arange(1, 41, dtype=np.uint64), rng.integers(-9, 9, [40, 4]).astype(np.float32)
    write_hps(tmp_path / "user", Records(keys, rows))

    def model(tables, inputs):
        bags = fused.lookup(
            tables, {"user": fused.LookupInput("user", inputs["user"].keys, "sum", inputs["user"].offsets)}
        )
        return {"scores": bags["user"].sum(axis=1) * inputs["dense"][:, 0], "bags": bags["user"]}

    table = FrozenTable("user", 4, default=-1.0)
    frozen, _ = freeze_records([(table, SizedRecords(40, [Records(keys, rows)]))])
    inputs = {"user": artifact.BagsInput("user"), "dense": artifact.ArrayInput((1,))}
    artifact.export_model(tmp_path / "model", model, frozen, inputs)
    config = config_of({"user": tmp_path / "user"}, 4, dense_file=str(tmp_path / "model"))

    def ask(client, seed):
        rng = np.random.default_rng(seed)
        bags = [rng.integers(1, 60, rng.integers(0, 5)).tolist() for _ in range(rng.integers(1, 5))]
        dense = rng.integers(-9, 9, [len(bags), 1]).astype(float).tolist()
        user = {"values": list(itertools.chain(*bags)), "lengths": [len(bag) for bag in bags]}
        got = client.post(PREDICT, json={"inputs": {"user": user, "dense": dense}})
        assert got.status_code == 200, got.text
        sums = [
            np.sum([rows[key - 1] if key <= 40 else np.full(4, -1.0) for key in bag] or [np.zeros(4)], axis=0)
            for bag in bags
        ]
        assert got.json()["outputs"]["bags"] == [total.tolist() for total in sums]
        assert got.json()["outputs"]["scores"] == [total.sum() * row[0] for total, row in zip(sums, dense, strict=True)]
        return user["values"]

    with cases.serving(session_lib.open(config), max_delay_ms=20) as found:
        with httpx.Client(base_url=found.address, timeout=60) as client:
            with concurrent.futures.ThreadPoolExecutor(8) as threads:
                asked = [future.result() for future in [threads.submit(ask, client, seed) for seed in range(24)]]
            refused = client.post(PREDICT, json={"inputs": {"user": [[1]], "dense": [[1, 2]]}})
            assert refused.status_code == 400 and "[samples, 1]" in refused.text
            samples = cases.samples_of(client.get("/metrics").text)
            assert samples["jaxsok_batch_requests_sum", "predict", "ranker"] == 24
            assert samples["jaxsok_batch_requests_count", "predict", "ranker"] < 24, "no two requests shared a call"
            keys = list(itertools.chain.from_iterable(asked))
            num_found = sum(key <= 40 for key in keys)
            assert samples["jaxsok_session_predicts_total", "ranker"] > 0
            assert samples["jaxsok_session_keys_total", "ranker"] == len(keys) > 0
            assert samples["jaxsok_session_hits_total", "ranker"] == num_found > 0
            assert samples["jaxsok_session_missing_total", "ranker"] == len(keys) - num_found > 0
            assert samples["jaxsok_session_hit_rate", "ranker"] == num_found / len(keys)


def test_results_of_a_whole_batch_are_of_one_client(tmp_path):
    """A model whose results have no row per sample runs for each request alone, even where lengths agree."""
    keys, rows = np.arange(1, 41, dtype=np.uint64), np.arange(160, dtype=np.float32).reshape(40, 4)
    write_hps(tmp_path / "user", Records(keys, rows))

    def model(tables, inputs):
        found = fused.lookup(tables, {"user": inputs["user"]})["user"]
        return {"rows": found, "weights": np.arange(4.0, dtype=np.float32), "sum": found.sum(axis=0)}

    frozen, _ = freeze_records([(FrozenTable("user", 4), SizedRecords(40, [Records(keys, rows)]))])
    artifact.export_model(tmp_path / "model", model, frozen, {"user": artifact.KeysInput("user")}, platforms=PLATFORMS)
    config = config_of({"user": tmp_path / "user"}, 4, dense_file=str(tmp_path / "model"))
    with session_lib.open(config, warm_up=False) as session:
        samples = [
            calls.ParsedRequest({"user": np.array(mine, np.uint64)}, {"user": 2}, 2) for mine in ([1, 2], [3, 4])
        ]
        found = asyncio.run(calls.Predictions(session, 100).run("ranker", samples))
    for number, (outputs, version) in enumerate(found):
        mine = rows[2 * number : 2 * number + 2]
        np.testing.assert_array_equal(outputs["rows"], mine)
        np.testing.assert_array_equal(outputs["weights"], np.arange(4.0))
        np.testing.assert_array_equal(outputs["sum"], mine.sum(axis=0))
        assert version == 1


def test_a_batch_whose_dense_model_changed_meanwhile_is_asked_again():
    """A batch is asked again if another dense model, with other kinds of results, replaced its model meanwhile."""

    class Switched(cases.Session):
        is_switched = False

        def predict(self, inputs, model=None):
            if not self.is_switched:
                self.is_switched = True
                self.update(model=model)
                cases_outputs[model] = {**cases_outputs[model], "logits": artifact.OutputSpec((4,), "float32")}
            return super().predict(inputs, model)

    cases_outputs = cases.OUTPUTS
    before = dict(cases_outputs)
    try:
        session = Switched()
        bags = Bags(np.array([1, 2], np.uint64), lengths=np.array([1, 1], np.int32))
        samples = [calls.ParsedRequest({"user": bags, "dense": np.zeros((2, 2), np.float32)}, {"user": 2}, 2)] * 2
        found = asyncio.run(calls.Predictions(session, 100).run("ranker", samples))
    finally:
        cases_outputs.update(before)
    assert [call[2]["samples"] for call in session.calls] == [4, 2, 2]
    assert [outputs["logits"].shape for outputs, _ in found] == [(2,), (2,)]


# The command ---------------------------------------------------------------------------------------------------------


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


def test_options_of_the_command():
    """Options take only valid numbers."""
    with pytest.raises(ValueError, match="--max-body-bytes: got 0"):
        server.ServerOptions.of({"max_body_bytes": 0})
    with pytest.raises(ValueError, match="--timeout-s: got nan"):
        server.ServerOptions(timeout_s=float("nan"))
    assert server.ServerOptions.of({"drain_s": 0.0}).drain_s == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "99999"], "99999"),
        (["--host", "203.0.113.7"], "203.0.113.7"),
        (["--watch", "/nowhere"], '"/nowhere"'),
        (["--max-keys", "-1"], "--max-keys: got -1"),
        (["--watch-interval-s", "0"], "--watch-interval-s: got 0"),
        (["--watch-interval-s", "nan"], "--watch-interval-s: got nan"),
        (["--watch-interval-s", "inf"], "--watch-interval-s: got inf"),
    ],
)
def test_the_command_refuses_in_words(arguments, words, tmp_path, capsys):
    assert command_line.main(["serve", str(tmp_path / "config.json"), *arguments]) == 2
    got = capsys.readouterr().err
    assert words in got and "Traceback" not in got


def test_errors_have_statuses():
    """Each kind of the session's errors has its own status."""
    kinds = (errors.UnknownModelError, errors.UnknownTableError, errors.RequestTooLargeError, errors.RequestError)
    assert [responses.refusal_of(kind("why"), "lookup").status for kind in kinds] == [404, 404, 413, 400]
