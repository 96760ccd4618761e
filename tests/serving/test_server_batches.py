"""Tests how a server batches the requests of many clients: limits, order, errors, and each client's own results."""

import asyncio
import concurrent.futures
import itertools
import json
import threading
import time

import httpx
import hypothesis
import numpy as np
import pytest
import server_cases as cases
from hypothesis import strategies as st
from server_cases import (
    JSON,
    LOOKUP,
    MIXED,
    PREDICT,
    TENSORS,
    ask_at_once,
    ask_in_parallel,
    check_answer,
    config_of,
    is_well,
    make_request,
    num_taken,
    pack,
)
from serving_cases import PLATFORMS
from waiting import wait_until

from jaxsok import Bags, Records
from jaxsok.interchange.hps import write_hps
from jaxsok.serving import artifact, fused, session as session_lib
from jaxsok.serving.frozen import FrozenTable, SizedRecords, freeze_records
from jaxsok.serving.http import batching, calls

# The batcher alone ---------------------------------------------------------------------------------------------------


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


def test_each_gets_its_answer_as_soon_as_it_is_there():
    """The requests of a call that fails are run alone: a later one may take long, and those who left are not run."""
    go, calls = threading.Event(), []

    def run(payloads):
        calls.append(list(payloads))
        if len(payloads) > 1:
            raise ValueError("one of them")
        if payloads == ["slow"]:
            assert go.wait(30)
        return payloads

    async def ask():
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            batcher = batching.Batcher(in_thread(run, threads), {})
            names = ["first", "slow", "leaves", "last"]
            answers = {name: asyncio.ensure_future(batcher.submit(name, {})) for name in names}
            assert await asyncio.wait_for(answers["first"], 30) == "first"
            assert not answers["slow"].done() and not answers["last"].done()
            answers["leaves"].cancel()
            await asyncio.sleep(0)
            go.set()
            assert await asyncio.gather(answers["slow"], answers["last"]) == ["slow", "last"]
            assert await batcher.close()

    asyncio.run(ask())
    assert calls == [["first", "slow", "leaves", "last"], ["first"], ["slow"], ["last"]]


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


# Clients of a server -------------------------------------------------------------------------------------------------


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


# Predictions that share a call ---------------------------------------------------------------------------------------


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
