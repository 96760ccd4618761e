"""The benchmarks: correct keys, bytes and peers, and a full run small enough for a CPU."""

import asyncio
import contextlib
import dataclasses
import doctest
import gc
import importlib
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from waiting import free_port  # noqa: E402

import jaxsok  # noqa: E402
from benchmarks import (  # noqa: E402
    bench_cache,
    bench_devices,
    bench_exchange,
    bench_fresh,
    bench_http,
    bench_scale,
    bench_serving,
    bench_skew,
    bench_small,
    dlrm,
    fill,
    http_load,
    limits,
    measure,
    nve,
    peers,
    plots,
    records,
    report,
    run,
    tables,
    targets,
    timing,
    workloads,
)


@pytest.fixture(autouse=True)
def without_collections(monkeypatch):
    """Skips garbage collection between measurements: these are small, and a collection visits the suite's objects."""
    monkeypatch.setattr(gc, "collect", lambda generation=2: 0)


@pytest.mark.parametrize(
    ("name", "distribution", "millions"),
    [
        ("W1", "uniform", 1.69),
        ("W1", "zipf1.05", 0.66),
        ("W1", "zipf1.15", 0.42),
        ("W5", "uniform", 4.84),
        ("W5", "zipf1.15", 0.95),
        ("W6", "uniform", 1.02),
        ("W6", "zipf1.05", 0.35),
    ],
)
def test_unique_keys_are_those_of_the_published_workloads(name, distribution, millions):
    (key_set,) = workloads.key_sets(workloads.WORKLOADS[name], distribution, 1, seed=0)
    assert key_set.num_unique == pytest.approx(millions * 1e6, rel=0.015)
    rows = key_set.stacked_rows
    assert rows.min() >= 0
    assert rows.max() < key_set.ids.shape[0] * key_set.num_rows


def test_the_check_of_unique_keys_refuses_a_wrong_generator(monkeypatch):
    monkeypatch.setattr(workloads, "draw_ids", lambda distribution, num_rows, shape, rng: np.zeros(shape, np.int64))
    with pytest.raises(RuntimeError, match="disagree"):
        workloads.key_sets(workloads.WORKLOADS["W6"].scale(0.001), "uniform", 1, seed=0)


def test_unknown_names_are_refused_before_anything_runs():
    unknown = (["--workloads", "W9"], ["--keys", "normal"], ["--optimizers", "lion"], ["--only", "lunch"])
    misplaced = (["--workloads", "M1"], ["--only", "exchange,lookup"], ["--only", "exchange", "--workloads", "H1"])
    of_training = (["--only", "dcnv2,lookup"], ["--only", "dcnv2", "--keys", "zipf1.15"])
    for arguments in (*unknown, *misplaced, *of_training, ["--only", "exchange", "--exchange", "lunch"]):
        with pytest.raises(SystemExit):
            run.parse(arguments)


def test_a_quick_run_that_names_nothing_is_small(monkeypatch):
    """Named parts run in full."""
    monkeypatch.setattr(run, "has_gpu", lambda: False)
    options = run.parse(["--quick"])
    assert (options.workloads, options.parts) == (("W1", "W5"), ("lookup", "update", "xla"))
    assert run.parse(["--quick", "--workloads", "W6"]).workloads == ("W6",)
    assert run.parse(["--only", "serving,input"]).parts == (*measure.SERVING, "input")
    options = run.parse(["--quick", "--only", "table,plan"])
    assert options.parts == ("table", "plan") and set(options.workloads) == set(run.parse([]).workloads)
    assert run.parse(["--quick", "--only", "exchange"]).workloads == ("M1", "W1", "W5")


def test_times_are_printed_as_they_are_known(capsys):
    """Times show a range if repetitions differ much, no spread of a single time, no rate of 0, and a note."""
    steady, single = timing.summary([1.0, 1.1, 1.05], 1), timing.summary([2.0], 1)
    unsteady = timing.summary([1.0, 0.5, 13.4], 1)
    assert (str(steady), steady.spread_text) == ("1.05 ms ±5%", "10%")
    assert (str(single), single.spread_text) == ("2 ms", "-")
    assert (str(unsteady), unsteady.spread_text) == ("1 ms (0.5 to 13.4)", "over 100%")
    recorder = records.Recorder(None, {})
    for found, moved_bytes in ((steady, 3.2e5), (unsteady, 0), (single, 9e7)):
        recorder.add(records.Record("W1", records.FORWARD, "xla", found, moved_bytes=moved_bytes))
    lines = [line.split("xla: ")[1] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["1.05 ms ±5%, 0.3 GB/s", "1 ms (0.5 to 13.4)", "2 ms, 45 GB/s"]
    assert tables.unsteady_note(recorder.records).startswith("1 of 3 times differ")
    assert tables.unsteady_note(recorder.records[::2]) == ""


def test_mixed_keys_are_distinct_and_equal_in_numpy_and_jax():
    ids = np.arange(20_000)
    words = np.concatenate([workloads.mix(table, ids) for table in range(5)])
    assert np.unique(words.view(np.uint64)).size == words.shape[0]
    in_jax = workloads.mix(3, jnp.asarray(ids, jnp.uint32), jnp)
    np.testing.assert_array_equal(np.asarray(in_jax), workloads.mix(3, ids))


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_the_xla_peer_steps_each_row_once(optimizer):
    dim, num_rows = 4, 50
    rng = np.random.default_rng(0)
    rows = rng.integers(0, num_rows, (9, 3), dtype=np.int32)
    gradients = rng.normal(size=(9, dim)).astype(np.float32)
    table = rng.normal(size=(num_rows, dim)).astype(np.float32)
    states = tuple(np.full((num_rows, width), 0.1, np.float32) for width in workloads.state_dims(optimizer, dim))
    carry = (jnp.asarray(table), tuple(map(jnp.asarray, states)), jnp.zeros((), jnp.int32))
    got, got_states, count = jax.jit(peers.update, static_argnums=0)(optimizer, carry, (rows, gradients))

    want, want_states = table.astype(np.float64), [state.astype(np.float64) for state in states]
    for row in np.unique(rows):
        g = gradients.astype(np.float64)[np.nonzero(rows == row)[0]].sum(axis=0)
        if optimizer == "sgd":
            step = g
        elif optimizer == "adam":
            mean, variance = want_states
            mean[row] = 0.9 * mean[row] + 0.1 * g
            variance[row] = 0.999 * variance[row] + 0.001 * g * g
            step = mean[row] / 0.1 / (np.sqrt(variance[row] / 0.001) + 1e-8)
        else:
            (accumulator,) = want_states
            accumulator[row] += np.mean(g * g) if optimizer == "rowwise_adagrad" else g * g
            root = np.sqrt(accumulator[row] + (1e-7 if optimizer == "adagrad" else 0.0))
            step = g / (root + (1e-8 if optimizer == "rowwise_adagrad" else 0.0))
        want[row] -= 0.01 * step
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)  # float32 sums against float64
    for got_state, other in zip(got_states, want_states, strict=True):
        np.testing.assert_allclose(got_state, other, rtol=1e-4, atol=1e-6)
    assert int(count) == 1


def test_a_step_is_timed_once_a_dispatch_and_threads_its_carry():
    protocol = timing.Protocol(repetitions=6, warmups=2, batch_s=1e-4)
    step = timing.Step(lambda carry, x: (carry + x, carry), donates=True)
    found, carry = step.measure(jnp.zeros(()), [jnp.float32(1.0), jnp.float32(1.0)], protocol)
    look = float(carry) - 2 * 2 - 2 - found.repetitions * found.dispatches
    assert 1 <= look <= 20  # two warm-ups and two estimates take the rest
    assert found.low_ms <= found.ms <= found.high_ms
    assert found.repetitions == 6


@pytest.mark.parametrize("donates", [True, False])
def test_where_the_host_is_slow_steps_in_a_row_are_timed_too(monkeypatch, donates):
    monkeypatch.setattr(timing.jax, "default_backend", lambda: "gpu")  # a CPU has no queue that a host must fill
    monkeypatch.setattr(timing, "HOST_SHARE", 0.0)
    calls = []

    def function(carry, x):
        calls.append(x.shape)  # runs when traced
        return (carry + x.sum(), x * carry) if donates else x * carry

    step = timing.Step(function, donates)
    sets = [jnp.full((8,), 1.0 + i) for i in range(3)]
    found, carry = step.measure(jnp.zeros(()), sets, timing.QUICK, idle=sets[0][:1])
    assert calls == [(8,), (1,), (8,), (8,), (8,)]
    assert found.host_ms is not None
    assert (float(carry) > 0) == donates


def test_ratios_and_limits_stand_beside_the_right_records():
    def record(what, subject, ms, optimizer=""):
        made = timing.summary([ms], 1)
        return records.Record("W1", what, subject, made, distribution="uniform", optimizer=optimizer, num_keys=1000)

    found = [
        record(records.EVALUATION, "jaxsok", 2.0),
        record(records.STEP, "jaxsok", 8.0, "adam"),
        record(records.FORWARD, "xla", 3.0),
        record(records.STEP, "xla", 80.0, "adam"),
        record(records.STEP, "xla", 1.0, "sgd"),
        record(records.FORWARD, "fbgemm_unchecked", 4.0),
        record(records.FORWARD, "fbgemm_default", 6.0),
        record(records.GATHER, "limit", 1.0),
        record(records.READ_MODIFY_WRITE, "limit", 3.0, "adam"),
    ]
    forward, step = (dict(zip(tables.COLUMNS, row, strict=True)) for row in tables.rows(found))
    assert (forward["limit ms"], forward["of limit"]) == ("1", "0.50")
    assert [forward[name] for name in tables.COLUMNS[-3:]] == ["1.50", "2.00", "3.00"]
    assert (step["limit ms"], step["of limit"]) == ("4", "0.50")
    assert [step[name] for name in tables.COLUMNS[-3:]] == ["10.00", "-", "-"]


def on_mesh(what, program, num_devices, ms, subject="jaxsok", sent_bytes=0, scaling="weak"):
    notes = {"scaling": scaling, "num_samples": 8192 * num_devices, "program": program, "wire": "float32"}
    return records.Record(
        "M1",
        what,
        subject,
        timing.summary([ms], 1),
        distribution="uniform",
        num_devices=num_devices,
        moved_bytes=sent_bytes,
        notes=notes | {"front_end": "jit"},
    )


def test_a_table_of_meshes_compares_whole_steps_alone():
    found = [
        on_mesh(records.ALL_TO_ALL, "alone", 8, 0.5, "limit", 100_000_000),
        on_mesh(records.STEP, "planned", 8, 1.5, sent_bytes=90_000_000),
        on_mesh(records.STEP, "pipelined", 8, 2.0, sent_bytes=100_000_000),
        on_mesh(records.STEP, "pipelined", 2, 1.5),
        on_mesh(records.STEP, "take", 8, 30.0, "xla"),
    ]
    rows = [dict(zip(tables.EXCHANGE_COLUMNS, row, strict=True)) for row in tables.exchange_rows(found, True)]
    _, planned, pipelined, two, _ = rows
    row_wise, table_wise = tables.EXCHANGE_COLUMNS[-2:]
    assert (planned["XLA ÷"], planned[row_wise]) == (tables.NOTHING, tables.NOTHING)  # the time excludes its plan
    assert (pipelined["XLA ÷"], pipelined["of the wire"], pipelined["efficiency"]) == ("15.00", "0.25", "0.75")
    assert (pipelined["k samples/s"], pipelined["GB/s sent"]) == ("3.277e+04", "50")
    assert (pipelined[row_wise], pipelined[table_wise]) == ("8.23 ms, 4.12", "4.9 ms, 2.45")
    assert two[row_wise] == "8.23 ms"  # no ratio between two devices and eight
    assert tables.exchange_rows(found, False)[2][-1] == tables.NOTHING
    strong = [dataclasses.replace(record, notes=record.notes | {"scaling": "strong"}) for record in found]
    assert tables.exchange_rows(strong, True)[2][tables.EXCHANGE_COLUMNS.index("efficiency")] == "0.19"
    assert tables.rows(found) == tables.peer_rows(found) == []


@pytest.fixture
def small_m1(monkeypatch):
    """Reduces M1 to few tables: a program has an operand for each table, and compilation dominates the time."""
    small = dataclasses.replace(workloads.MESH_WORKLOADS["M1"], num_tables=2)
    monkeypatch.setitem(workloads.MESH_WORKLOADS, "M1", small)
    return small.scale(0.0005)


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_a_planned_step_copies_no_table(small_m1):
    workload = small_m1.on_devices(2, "weak")
    collection = fill.fill_tables(workload, "rowwise_adagrad", bench_exchange.mesh_of(2)).collection
    state = collection.init(seed=0)
    (ids,) = workloads.draw_batches(workload, "uniform", 1, seed=0)
    plan = collection.plan(fill.pack(collection, workload, ids), send_capacity=(64,))
    step = jax.jit(lambda state, plan: bench_exchange._step(collection, state, plan), donate_argnums=0)
    rows = state.stores[0].rows[0].shape[0] // 2
    text = step.lower(state, plan).compile().as_text()
    assert f"[{rows},{workload.dim}]" in text
    assert not re.findall(rf"= \S*\[{rows},{workload.dim}\]\S* copy\(", text)


def test_the_documented_floors_are_those_of_the_formulas():
    measuring = (ROOT / "docs" / "measuring.md").read_text()
    assert tables.format_table(report.FLOOR_COLUMNS, report.floor_rows(4230)) in measuring
    document = (ROOT / "docs" / "performance.md").read_text()
    assert all(report.replace_between_markers(document, "x", part).count("\n\nx\n\n") == 1 for part in report.PARTS)


def test_a_table_grows_no_further_than_its_share_of_the_memory(monkeypatch):
    recorder = records.Recorder(None, {})
    row_bytes = 304  # 64 floats, record, index: docs/memory_layout.md
    limit = round(7_500 * row_bytes / bench_scale.MEMORY_SHARE * 0.92)  # 7 times the least size, not 16 times
    in_use = {"bytes_limit": limit, "bytes_in_use": 0, "peak_bytes_in_use": 5}
    monkeypatch.setattr(bench_scale, "_memory", lambda: in_use)
    monkeypatch.setattr(bench_scale, "NUM_KEYS", 1)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    bench_scale.sizes(recorder, timing.QUICK.brief(), seed=0, copy_gb_s=1.0, scale=0.001, is_quick=True)
    assert recorder.failures == []
    lookups = [record.notes["num_rows"] for record in recorder.records if record.what == records.FIND_AND_GATHER]
    (reached,) = (record for record in recorder.records if record.what == records.FILL)
    assert lookups == [1024, 4096, 7168]
    assert reached.notes["is_limited"] and reached.notes["num_rows"] == 7168
    assert targets.Found(recorder.records).all(records.FILL, notes={"part": "scale"})
    assert 0.7 < targets._share_of_memory(targets.Found(recorder.records)) <= bench_scale.MEMORY_SHARE


def test_what_fails_while_a_table_grows_leaves_what_was_reached(monkeypatch):
    recorder = records.Recorder(None, {})
    monkeypatch.setattr(bench_scale, "NUM_KEYS", 1)
    grow = jaxsok.Collection.grow

    def until_4_096_rows(self, state, *batch, **options):
        if int(state.stores[0].num_rows()) >= 4096:
            raise MemoryError("no more")
        return grow(self, state, *batch, **options)

    monkeypatch.setattr(jaxsok.Collection, "grow", until_4_096_rows)
    bench_scale.sizes(recorder, timing.QUICK.brief(), seed=0, copy_gb_s=1.0, scale=0.001, is_quick=True)
    (failure,) = recorder.failures
    assert "no more" in failure["why"]
    (reached,) = (record for record in recorder.records if record.what == records.FILL)
    assert reached.notes["num_rows"] == 4096


def test_kernels_are_counted_for_their_floor(monkeypatch):
    """Simulates a GPU with CuPy: the profiler's kernels, and the time of as many empty kernels."""
    asked = []
    plain = types.SimpleNamespace(nothing=lambda count, protocol: asked.append(count) or timing.summary([0.5], 1))
    monkeypatch.setattr(bench_small.cuda_kernels, "load_kernels", lambda dim: plain)
    seen = {"gather": (2.0, 0.1), "sort": (1.0, 0.2)}
    monkeypatch.setattr(timing, "list_launched", lambda function, steps: function() or seen)
    small = dataclasses.replace(workloads.WORKLOADS["W1"], num_tables=2)
    monkeypatch.setitem(workloads.WORKLOADS, "W1", small)
    recorder = records.Recorder(None, {})
    bench_small.floors(recorder, dataclasses.replace(timing.QUICK.brief(), num_key_sets=2), seed=0)
    assert asked == [3] * len(bench_small.WHATS)
    notes = {"part": "small", "num_samples": 256, "device_ms": 1.0}
    step = records.Record("W1", records.STEP, "jaxsok", timing.summary([1.0], 1), num_keys=8, limit_ms=0.1, notes=notes)
    step = dataclasses.replace(step, timing=dataclasses.replace(step.timing, dispatch_ms=2.0))
    (row,) = tables.small_rows([*recorder.records, step])
    cells = dict(zip(tables.SMALL_COLUMNS, row, strict=True))
    assert (cells["kernels"], cells["as many without work ms"], cells["of limit"]) == ("3", "0.5", "0.50")


def test_what_fbgemm_wrote_becomes_records(monkeypatch):
    entry = {"workload": "W1", "what": "forward", "subject": "fbgemm_default", "distribution": "uniform"}
    entry |= {"optimizer": "", "samples_ms": [2.0, 1.0, 3.0], "dispatches": 7}
    commands = []
    written = {"records": [entry], "failures": [], "about": {}}
    monkeypatch.setattr(peers, "why_no_fbgemm", lambda: None)
    monkeypatch.setattr(peers, "run_fbgemm", lambda arguments, timeout_s: commands.append(arguments) or written)
    monkeypatch.setattr(run, "has_gpu", lambda: True)
    options = run.parse(["--only", "fbgemm", "--workloads", "W1", "--keys", "uniform"])
    found = measure.measure_fbgemm(options, timing.Protocol())
    (record,) = found["records"]
    assert (record.timing.ms, record.timing.dispatches) == (2.0, 7)
    assert record.num_keys == workloads.WORKLOADS["W1"].num_keys
    assert commands[0][commands[0].index("--keys") + 1] == "uniform"


def test_what_dynamicemb_wrote_becomes_records(monkeypatch, tmp_path):
    """The child process finds its folders first, and its table separates its records from jaxsok's."""
    timed = [(None, "", [2.0, 1.0, 3.0]), (0.5, "prefetch", [8.0])]
    entries = [
        {"what": "DLRM step", "by": by, "share": share, "samples_ms": ms, "dispatches": 5, "moved": {"num_hits": 7}}
        for share, by, ms in timed
    ]
    written = json.dumps({"records": entries, "failures": [{"what": "a", "why": "b"}]})
    package = tmp_path / "alone"
    package.mkdir()
    (package / "dynamicemb.py").write_text(
        "import pathlib, sys, said\n"
        "assert said.__file__ and sys.argv[sys.argv.index('--shares') + 1] == '0.5,0.1,0.02'\n"
        f"pathlib.Path(sys.argv[sys.argv.index('--out') + 1]).write_text({written!r})\n"
    )
    (tmp_path / "said.py").touch()
    monkeypatch.setattr(peers, "__package__", "alone")
    monkeypatch.setattr(peers, "__file__", str(package / "peers.py"))
    monkeypatch.setattr(peers, "why_no_dynamicemb", lambda: None)
    monkeypatch.setenv(peers.DYNAMICEMB, str(tmp_path))
    monkeypatch.setattr(run, "has_gpu", lambda: True)
    found = measure.measure_dynamicemb(run.parse(["--only", "tiers"]))
    on_device, cached = found["records"]
    assert (on_device.timing.ms, cached.timing.ms, cached.notes["throughput"]) == (2.0, 8.0, 0.25)
    assert (found["why"], found["failures"]) == (None, [{"what": "a", "why": "b"}])
    rows = [dict(zip(tables.TIER_COLUMNS, row, strict=True)) for row in tables.tier_rows(found["records"])]
    assert [row["what"] for row in rows] == ["DLRM step, dynamicemb", "DLRM step, dynamicemb prefetch"]
    assert rows[1]["rows"] == "50% in the cache"
    assert measure.measure_dynamicemb(run.parse(["--only", "evict"]))["why"] == "not asked for"


def test_what_fbgemm_wrote_of_its_cache_becomes_records(monkeypatch, tmp_path):
    entry = {"by": "managed memory", "num_keys": 16, "wanted": 0.5, "hit_rate": 0.49, "back_to_back_ms": 1.0}
    written = json.dumps({"records": [{**entry, "samples_ms": [2.0, 3.0, 4.0]}], "failures": []})
    package = tmp_path / "alone"
    package.mkdir()
    (package / "fbgemm_cache.py").write_text(
        f"import pathlib, sys\npathlib.Path(sys.argv[sys.argv.index('--out') + 1]).write_text({written!r})\n"
    )
    monkeypatch.setattr(peers, "__package__", "alone")
    monkeypatch.setattr(peers, "__file__", str(package / "peers.py"))
    monkeypatch.setattr(peers, "why_no_fbgemm", lambda: None)
    monkeypatch.setattr(run, "has_gpu", lambda: True)
    found = measure.measure_fbgemm_cache(run.parse(["--only", "cache"]))
    (row,) = (dict(zip(tables.CACHE_COLUMNS, row, strict=True)) for row in tables.cache_rows(found["records"]))
    assert (row["who"], row["hit rate"], row["in the cache"]) == ("fbgemm (managed memory)", "0.490", "50%")
    assert (row["ms"], found["why"], found["failures"]) == ("3", None, [])
    assert measure.measure_fbgemm_cache(run.parse(["--only", "http"]))["why"] == "not asked for"


NVE_ENTRY = {"by": "linear, pinned memory", "num_keys": 16, "wanted": 0.5, "hit_rate": 0.54, "back_to_back_ms": 1.0}


def test_what_nve_wrote_becomes_records(monkeypatch, tmp_path):
    """The child process gets the folder of the variable as an absolute path."""
    entry = NVE_ENTRY | {"samples_ms": [2.0, 3.0, 4.0], "on_device_ms": 2.5}
    written = json.dumps({"records": [entry], "failures": []})
    package = tmp_path / "alone"
    package.mkdir()
    (package / "nve.py").write_text(
        "import os, pathlib, sys\n"
        f"assert os.environ['JAXSOK_NVE'] == {str(tmp_path)!r}\n"
        f"pathlib.Path(sys.argv[sys.argv.index('--out') + 1]).write_text({written!r})\n"
    )
    monkeypatch.setattr(peers, "__package__", "alone")
    monkeypatch.setattr(peers, "__file__", str(package / "peers.py"))
    monkeypatch.chdir(tmp_path.parent)
    monkeypatch.setenv(nve.FOLDER, tmp_path.name)
    monkeypatch.setattr(run, "has_gpu", lambda: True)
    found = measure.measure_nve(run.parse(["--only", "cache"]))
    (row,) = (dict(zip(tables.CACHE_COLUMNS, row, strict=True)) for row in tables.cache_rows(found["records"]))
    assert (row["who"], row["hit rate"], row["in the cache"]) == ("nve (linear, pinned memory)", "0.540", "50%")
    assert (row["ms"], found["why"], found["failures"]) == ("3", None, [])
    assert found["records"][0].notes["on_device_ms"] == 2.5
    assert measure.measure_nve(run.parse(["--only", "http"]))["why"] == "not asked for"
    monkeypatch.delenv(nve.FOLDER)
    assert measure.measure_nve(run.parse(["--only", "cache"]))["why"] == peers.why_no_nve()


def test_nve_that_is_asked_for_and_missing_is_a_failure(monkeypatch, tmp_path):
    monkeypatch.setenv(nve.FOLDER, str(tmp_path))
    monkeypatch.setattr(run, "has_gpu", lambda: True)
    found = measure.measure_nve(run.parse(["--only", "cache", "--scale", "0.001"]))
    ((failure,), why) = found["failures"], found["why"]
    assert (failure["what"], why, found["records"]) == ("NVE", None, [])
    assert f"found no libnve-common.so in {tmp_path}" in failure["why"]


def test_the_target_takes_the_fastest_of_nve():
    """The larger number of keys counts, and the later of two runs."""

    def record(subject, what, ms, num_keys=65_536, by=""):
        notes = {"part": "cache", "to_host": False, "wanted": 0.5, "link_ms": 0.3, "back_to_back_ms": ms}
        time = timing.summary([ms], 1)
        return records.Record("cache", what, subject, time, num_keys=num_keys, limit_ms=0.4, by=by, notes=notes)

    ours = [record("jaxsok", records.FROM_C, 0.8), record("jaxsok", records.FROM_C, 0.2, 4_096)]
    old = [record("nve", records.CACHED, 0.1, by="a")]
    new = [record("nve", records.CACHED, ms, by=by) for by, ms in (("a", 0.9), ("b", 1.2))]
    fewer = [record("nve", records.CACHED, 0.05, 4_096, "a"), record("fbgemm", records.CACHED, 0.05)]
    rows = {target.name: target.row(targets.Found([*ours, *old, *new, *fewer])) for target in targets.TARGETS}
    (row,) = (row for name, row in rows.items() if "half of them" in name and "NVE" in name and "in a row" not in name)
    assert row[2:] == ("1.12", "", "pass")
    assert targets._over_nve(0.5)(targets.Found(ours)) is None
    assert targets._over_nve(0.5)(targets.Found([*ours, *fewer])) is None  # of other numbers of keys


def test_the_newest_time_of_each_size_of_requests_counts_for_a_session():
    def record(over_one, num_keys):
        notes = {"part": "devices", "on": 4, "way": "replicas", "over_one": over_one}
        time = timing.summary([1.0], 1)
        return records.Record("devices", records.DEPLOYED, "jaxsok", time, num_keys=num_keys, notes=notes)

    read = targets._deployed(4, "replicas")
    found = [record(3.9, 10), record(0.5, 20), record(1.2, 10), record(0.7, 20)]  # the last are the newest
    assert read(targets.Found(found)) == 1.2
    assert read(targets.Found([record(None, 10)])) is None and read(targets.Found([])) is None


class _NveLayer:
    """A layer of NVE without NVE: the hot ids are in its cache, and all rows are right but one, if there is one."""

    def __init__(self, wrong_id: int | None = None):
        self._wrong_id, self._put, self._brought, self._hot = wrong_id, {}, {}, 0

    def fill(self, num_hot):
        self._hot = num_hot

    def put(self, slot, ids):
        self._put[slot] = ids

    def bring(self, slot, num_keys):
        self._brought[slot] = self._put[slot][:num_keys]

    def lookup(self, slot, num_keys, counts=False, in_place=False):
        self._asked = (self._put if in_place else self._brought)[slot][:num_keys]
        return float((self._asked < self._hot).mean()) if counts else None

    def wait(self):
        pass

    def wanted_rows(self, ids):
        return nve.rows_of(ids)

    def copied_rows(self, num_keys):
        rows = nve.rows_of(self._asked)
        rows[self._asked == self._wrong_id, 5] += 1.0
        return rows


def test_nve_is_measured_on_the_ids_of_the_cache():
    found = nve.measure(_NveLayer(), workloads.CachedIds(4096, 409, seed=0), num_keys=40, hit_rate=0.75)
    assert (len(found["samples_ms"]), found["hit_rate"]) == (nve.LOOKUPS, 0.75)
    json.dumps(found)


def test_a_wrong_row_of_nve_is_found():
    stream = workloads.CachedIds(4096, 409, seed=0)
    with pytest.raises(RuntimeError, match="other rows than those that were written"):
        nve.measure(_NveLayer(wrong_id=0), stream, num_keys=40, hit_rate=0.75)


def test_rows_of_nve_tell_ids_apart():
    rows = nve.rows_of(np.array([0, 1, 2, 131_072, 7_999_999]))
    assert rows.shape == (5, workloads.CACHE_DIM) and rows.dtype == np.float32
    assert len(np.unique(rows, axis=0)) == 5


def _records_of_torchrec(out: pathlib.Path, options: str) -> list[records.Record]:
    """Runs the peer with two processes on a CPU."""
    pytest.importorskip("torchrec")
    program = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "benchmarks.torchrec_peer"]
    command = [sys.executable, "-m", *program, *options.split(), "--out", str(out)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=300)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    return [records.Record(**line | {"timing": timing.Timing(**line["timing"])}) for line in lines]


@pytest.mark.slow
def test_what_torchrec_wrote_becomes_records(tmp_path):
    """Each sharding, both wires, and the pipeline."""
    options = "--workloads M1 --parts tables --keys uniform --scale 0.001 --repetitions 3 --warmups 1 --batch-s 0.01"
    found = _records_of_torchrec(tmp_path / "torchrec.jsonl", options)
    named = {(record.what, record.notes["program"], record.notes["sharding"], record.notes["wire"]) for record in found}
    assert len(named) == len(found) == 3 * 3 * 2
    assert all(record.subject == "torchrec" and record.num_devices == 2 and record.timing.ms > 0 for record in found)


@pytest.mark.slow
def test_a_process_for_each_device_writes_records(tmp_path):
    """Both forms of exchange, and what targets on meshes ask for."""
    command = [sys.executable, "-m", "benchmarks.processes", "--num-processes", "2", "--wires", "float32"]
    command += ["--coordinator", f"localhost:{free_port()}", "--workloads", "W5", "--scale", "0.0005"]
    command += ["--repetitions", "2", "--out", str(tmp_path / "found.json"), "--commit", "abc"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    running = [
        subprocess.Popen([*command, "--process-id", f"{number}"], cwd=ROOT, env=environment) for number in range(2)
    ]
    assert [process.wait(timeout=300) for process in running] == [0, 0]
    about, found, failures = records.load(tmp_path / "found.json")
    assert not failures and about["options"]["processes"] == 2
    fed = {f"fed, {stacked}prefetch={number}" for stacked in ("", "stacked, ") for number in (0, 2)}
    programs = {"pipelined", "two programs", "stacked", "planned", "plan", *fed}
    forms = {(record.notes["program"], record.notes["wire"]) for record in found}
    assert forms == {(program, wire) for program in programs for wire in ("float32", f"{records.BAGS}float32")}
    step = targets._on_mesh(2, workload="W5", wire=f"{records.BAGS}float32", front_end=records.PROCESSES)
    assert step(targets.Found(found)) > 0
    rows = [dict(zip(tables.EXCHANGE_COLUMNS, row, strict=True)) for row in tables.exchange_rows(found, False)]
    assert f"planned {records.BAGS}float32 {records.PROCESSES}" in {row["program"] for row in rows}


@pytest.mark.slow
def test_torchrec_trains_dcnv2(tmp_path):
    """Its records are rows of the table of DLRM-DCNv2, next to those of jaxsok."""
    options = "--workloads dcnv2 --parts dlrm --keys zipf1.05 --shardings planner --wires float32 --compile-mode none"
    options += " --scale 0.0005 --num-key-sets 2 --repetitions 2 --warmups 1 --batch-s 0.01 --key-dtypes int64,int32"
    found = _records_of_torchrec(tmp_path / "torchrec.jsonl", options)
    rows = [dict(zip(tables.DCNV2_COLUMNS, row, strict=True)) for row in tables.dcnv2_rows(found)]
    assert [row["what"] for row in rows] == [
        f"torchrec DLRM step, adagrad, {program} planner{keys}"
        for keys in ("", " int32 keys")
        for program in ("plain", "pipelined")
    ]
    assert all(record.part == "dcnv2" and record.num_keys == 256 * 214 for record in found)
    assert not tables.exchange_rows(found, is_full_size=False)


def test_benchmarks_need_no_library_of_readers():
    """Without `jaxsok[data]`, all benchmarks that read no files run."""
    program = """
import sys
sys.modules |= dict.fromkeys(("grain", "pyarrow"))  # an import of them fails
import benchmarks.run
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_without_time_left_a_run_says_what_it_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "has_gpu", lambda: False)
    path = tmp_path / "results.json"
    recorder = run.main(
        ["--scale", "0.001", "--time", "0", "--out", str(path), "--repetitions", "1", "--batch-ms", "1"]
    )
    assert recorder.failures == recorder.records == []
    skipped = {entry["what"] for entry in json.loads(path.read_text())["about"]["skipped"]}
    assert {"W1 rowwise_adagrad", "W6 sgd", "H1 D 8", "scale", "dims", "insert", "cpu"} <= skipped


def test_the_documents_have_the_results_that_are_kept():
    paths = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    document = (ROOT / "docs" / "performance.md").read_text()
    assert report.targets_section(paths) in document and report.runs_section(paths) in document
    pages = {page.stem: page.read_text() for page in (ROOT / "docs" / "results").glob("20*.md")}
    assert pages == {path.stem: report.page(path) for path in paths}


def test_targets_are_read_from_the_right_records():
    def record(workload, what, subject, ms, **more):
        return records.Record(workload, what, subject, timing.summary([ms], 1), distribution="uniform", **more)

    full = {"platform": "gpu", "device": "NVIDIA H100 80GB HBM3", "date": "2026-11-01", "options": {"scale": 1.0}}
    later = full | {"device": "NVIDIA H200", "time": "10:00"}
    on_cpu = {"platform": "cpu", "device": "cpu", "date": "2026-11-02", "options": {"scale": 0.01}}
    old = [record("W1", records.EVALUATION, "jaxsok", 9.0), record("W1", records.FORWARD, "fbgemm_unchecked", 3.3)]
    new = [
        record("W1", records.EVALUATION, "jaxsok", 3.0),
        # This record is not the compared one: small batches have a table of their own.
        record("W1", records.EVALUATION, "jaxsok", 0.1, notes={"part": "small"}),
        record("W1", records.STEP, "jaxsok", 1.0, optimizer="rowwise_adagrad", notes={"part": "skew"}),
    ]
    cpu = [
        record("W1", records.EVALUATION, "jaxsok", 0.1),
        record("W1", records.STEP, "jaxsok", 3.2, optimizer="sgd", notes={"part": "cpu"}),
        record("W1", records.STEP, "xla", 2.0, optimizer="sgd", notes={"part": "cpu"}),
        record("W1", records.STEP, "torch", 4.0, optimizer="sgd", notes={"part": "cpu"}),
    ]
    # The time of a run decides which is the newer one, not its place.
    rows = {row[0]: row[1:] for row in targets.rows([(later, new), (full, old), (on_cpu, cpu)])}
    forward = "evaluation forward, W1 uniform, speed over "
    assert rows[forward + targets.PEER_NAMES["fbgemm_unchecked"]] == ("≥ 1.1", "1.10", "H100, H200", "pass")
    assert rows[forward + targets.PEER_NAMES["fbgemm_default"]] == ("≥ 2.5", "-", "", targets.NOT_MEASURED)
    of_cpu = [row for name, row in rows.items() if name.startswith("CPU") and "uniform" in name]
    assert of_cpu == [("≤ 1.5", "1.60", "CPU", "**miss**"), ("≤ 1", "0.80", "CPU", "pass")]
    assert sum(row[-1] in ("pass", "**miss**") for row in rows.values()) == 3


def test_plots_are_drawn_of_what_there_is(tmp_path):
    def record(ms, part="", **notes):
        made = timing.summary([ms], 1)
        notes = notes | ({"part": part} if part else {})
        return records.Record("W1", records.FIND_AND_GATHER, "jaxsok", made, num_keys=64, limit_ms=ms / 2, notes=notes)

    sizes = [record(1.0, "scale", num_rows=10), record(2.0, "scale", num_rows=100)]
    assert [name for name, _ in plots.draw(sizes, tmp_path)] == ["scale.svg"]
    first = (tmp_path / "scale.svg").read_bytes()
    assert b"rows in the table" in first
    plots.draw(sizes, tmp_path)
    assert (tmp_path / "scale.svg").read_bytes() == first  # the same records give the same bytes
    dims = [record(1.0, "dims", dim=dim, dtype="float32") for dim in (8, 33, 64)]
    assert [name for name, _ in plots.draw(dims, tmp_path)] == ["dims.svg"]
    assert not (tmp_path / "scale.svg").exists()  # a plot without records is removed


@pytest.mark.parametrize(
    "name",
    ["bench_cache", "bench_dims", "bench_http", "bench_serving", "limits", "nve", "one_table", "timing", "workloads"],
)
def test_examples_of(name):
    failed, attempted = doctest.testmod(importlib.import_module(f"benchmarks.{name}"))
    assert attempted > 0
    assert failed == 0


def test_bytes_of_w1_are_those_of_the_derivation():
    shape = (26 * 65_536, 1_690_000, 26 * 65_536, 64)
    assert limits.forward_bytes(*shape, training=False) == pytest.approx(0.99e9, rel=0.01)
    assert limits.update_bytes(*shape, workloads.state_dims("rowwise_adagrad", 64)) == pytest.approx(1.416e9, rel=0.01)


def test_tables_that_are_served_are_compared_with_the_right_records():
    def record(what, subject, ms, way="", **notes):
        notes = {"part": "serving", "num_samples": 256, "dtype": "float32", "way": way} | notes
        variant = f"256 samples, float32{f', {way}' if way else ''}"
        made = timing.summary([ms], 1)
        return records.Record("S1", what, subject, made, variant=variant, notes=notes, limit_ms=0.01)

    found = [
        record(records.SERVED, "jaxsok", 0.2, "fused", p99_ms=0.3, back_to_back_ms=0.1, in_a_row_ms=0.05),
        record(records.SERVED, "jaxsok", 0.5, "unfused", p99_ms=0.6, back_to_back_ms=0.4, in_a_row_ms=0.2),
        record(records.SERVED_FLOOR, "limit", 0.02),
    ]
    assert targets._served_over_floor(targets.Found(found)) == pytest.approx(2.5)
    found.append(record(records.SERVED_KERNELS, "jaxsok", 0.018, "fused", num_kernels=3.0, launches_ms=0.006))
    assert targets._served_over_floor(targets.Found(found)) == pytest.approx(1.2)
    fused, unfused = (dict(zip(tables.SERVING_COLUMNS, row, strict=True)) for row in tables.serving_rows(found))
    assert (fused["kernels ms"], fused["launches"], fused["floor ms"]) == ("0.018", "3", "0.02")
    assert (unfused["ms ÷ fused"], unfused["99th percentile"]) == ("2.50", "0.6")


def test_a_way_of_serving_that_reads_other_rows_is_not_timed(monkeypatch):
    recorder = records.Recorder(None, {})

    def add_to_rows(tables, keys):
        found = bench_serving.lookup_fused(tables, keys)
        return {name: rows + jnp.float32(1) for name, rows in found.items()}

    monkeypatch.setitem(bench_serving._FUNCTIONS, "unfused", add_to_rows)
    monkeypatch.setattr(bench_serving, "_measure_dlrm", lambda *arguments: None)
    bench_serving.measure(recorder, timing.QUICK.brief(), 0, 1.0, 0.0005, is_quick=True)
    assert {failure["what"].split(" samples")[0] for failure in recorder.failures} >= {"serving S1"}
    assert not [
        record for record in recorder.records if record.what == records.SERVED and record.notes["way"] != "fused"
    ]


def test_ids_for_a_cache_hit_as_often_as_asked():
    """A dict that drops the id whose use is longest ago has the share of each batch that was asked for."""
    num_rows, capacity = 2000, 200
    ids, cache = workloads.CachedIds(num_rows, capacity, seed=0), {}
    for num_keys, hit_rate in ((40, 0.5), (8, 0.75), (40, 1.0), (40, 0.5), (8, 0.5)):
        num_warm_ups = ids.num_warm_ups(num_keys, hit_rate)
        for number in range(num_warm_ups + 30):
            batch = ids.take(num_keys, hit_rate).tolist()
            assert len(set(batch)) == num_keys and max(batch) < num_rows
            num_hits = sum(one in cache for one in batch)
            for one in batch:
                cache.pop(one, None)
                cache[one] = None
            while len(cache) > capacity:
                del cache[next(iter(cache))]
            assert number < num_warm_ups or num_hits == round(hit_rate * num_keys)


def test_lookups_through_a_cache_are_compared_with_the_link(monkeypatch):
    monkeypatch.setattr(workloads, "CACHE_KEYS", (8_192,))
    monkeypatch.setattr(bench_cache, "CACHE_HIT_RATES", (0.5,))
    recorder = records.Recorder(None, {})
    bench_cache.measure(recorder, timing.QUICK.brief(), 0, 10.0, 0.002, is_quick=True)
    assert recorder.failures == []
    (to_device,) = targets.Found(recorder.records).all(records.CACHED, notes={"part": "cache", "to_host": False})
    assert to_device.notes["hit_rate"] == pytest.approx(0.5, abs=0.03)
    assert 0 < to_device.notes["link_ms"] < to_device.limit_ms
    (direct,) = targets.Found(recorder.records).all(records.FROM_HOST, notes={"part": "cache", "to_host": False})
    assert direct.notes["hit_rate"] == pytest.approx(0.54, abs=0.1)  # a tenth of the rows lies on the device
    assert 0 < direct.notes["link_ms"] < direct.limit_ms
    from_c, in_place = targets.Found(recorder.records).all(records.FROM_C, notes={"part": "cache", "to_host": False})
    assert {from_c.by, in_place.by} == {"", "keys read in place"}
    assert from_c.notes["hit_rate"] == pytest.approx(direct.notes["hit_rate"], abs=0.1)
    assert targets._in_host_memory("link", 0.5)(targets.Found(recorder.records)) > 0
    who = [(row[1], row[2], row[4]) for row in tables.cache_rows(recorder.records)[2:]]
    assert sorted(who) == [
        ("33", place, subject)
        for place, subject in sorted(
            [
                *3 * [("device", "jaxsok")],
                ("device", "jaxsok (keys read in place)"),
                *2 * [("host", "jaxsok")],
                ("device", "xla"),
                ("host", "plain"),
                ("host", "xla"),
            ]
        )
    ]


def test_clients_count_what_they_lose():
    """A server that closes after two answers costs no client its time: it connects again, and counts a lost request."""
    with http_load.trivial_server(100, 50) as port, http_load.asking([port], 3, 0.3, [b"x" * 50], 2) as asking:
        found = asking.wait()
    assert len(found["ends"]) == len(found["latencies"]) == len(found["statuses"]) > 10
    assert set(found["statuses"]) == {200} and found["refused"] == 0 and found["checked"]

    async def serve(reader, writer):
        with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError):  # until the client goes
            for _ in range(2):
                await reader.readexactly(50)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc")
            await reader.readexactly(50)

    async def load():
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            made = http_load.Load(server.sockets[0].getsockname()[1], 2, 0.2, [b"x" * 50], None)
            await made.run()
            await asyncio.sleep(0.05)  # the server's connections end
            return made

    made = asyncio.run(load())
    lost = made.statuses.count(0)
    assert lost > 2 and abs(made.statuses.count(200) - 2 * lost) <= 4


def test_times_of_a_fixed_rate_count_from_when_requests_are_due():
    """A server that pauses is asked as often, and the requests that were due meanwhile have waited."""
    pause_s = 0.3

    async def serve(reader, writer):
        with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError):  # until the client goes
            for number in itertools.count():
                await reader.readexactly(50)
                if number == 5:
                    await asyncio.sleep(pause_s)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc")

    async def load():
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            made = http_load.Load(server.sockets[0].getsockname()[1], 1, 1.0, [b"x" * 50], 100.0)
            await made.run()
            await asyncio.sleep(0.05)
            return made

    made = asyncio.run(load())
    assert 80 < made.statuses.count(200) <= 101
    waited = sum(latency > 0.05 for latency in made.latencies)
    assert waited > 15 and max(made.latencies) >= pause_s
    assert sum(late > 0.1 for late in made.late) < 10  # 20 would be, if requests waited for the pause to end


def test_requests_without_an_answer_are_counted_with_the_time_that_they_waited():
    """A server that stops to answer for good: all that was due afterwards is lost, and not left out."""

    async def serve(reader, writer):
        with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError):
            for number in itertools.count():
                await reader.readexactly(50)
                if number < 10:
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc")

    async def load():
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            made = http_load.Load(server.sockets[0].getsockname()[1], 2, 0.6, [b"x" * 50], 100.0)
            await made.run()
            await asyncio.sleep(0.05)  # the server's connections end
            return made

    made = asyncio.run(load())
    assert len(made.statuses) in (60, 61) and made.statuses.count(200) == 20
    found = {"ends": made.ends, "latencies": made.latencies, "statuses": made.statuses, "refused": 0}
    assert (
        max(bench_http.latencies_ms(found, 0.6)) < 100 < 300 < max(bench_http.latencies_ms(found, 0.6, with_lost=True))
    )


@pytest.mark.slow
def test_the_server_is_measured_under_load(monkeypatch):
    """Loads, updates, memory and a restart, with rows that say their version; each in a fraction of a second."""
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    for name, value in {
        "SHAPES": {"26 tables": "many"},
        "QUICK_CLIENTS": (2,),
        "RATE_CLIENTS": 4,
        "QUICK_SECONDS": 0.4,
        "QUICK_UPDATE_S": 2.0,
        "INTERVAL_S": 0.5,
        "UNDER_LOAD": (4, "json"),
        "QUICK_MINUTES": 0.02,
    }.items():
        monkeypatch.setattr(bench_http, name, value)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    recorder = records.Recorder(None, {})
    bench_http.measure(recorder, 0, 0.01, is_quick=True)
    assert recorder.failures == []
    found = {(one.what, one.variant): one.notes for one in recorder.records}
    assert len(found) == len(recorder.records) == 10
    assert all(one["errors"] == 0 and one["requests_per_s"] > 0 for one in found.values())
    assert found[records.HTTP_UPDATE, "with versions, 4 clients"]["num_versions"] >= 1
    restart = found[records.HTTP_RESTART, "restart, 4 clients"]
    assert 0 < restart["first_answer_s"] < restart["without_answer_s"] + restart["stop_s"]
    assert targets._growth_of_server(targets.Found(recorder.records)) is None  # too short
    assert all(len(row) == len(tables.HTTP_COLUMNS) for row in tables.http_rows(recorder.records))
    with pytest.raises(RuntimeError, match="versions"):
        bench_http.check_answer(b'\r\n\r\n{"rows":{"a":[[1,5]],"b":[[2,5]]}}', "json")


def test_a_session_is_measured_on_each_number_of_devices(monkeypatch):
    monkeypatch.setattr(bench_devices, "DEVICES", (1, 2))
    recorder = records.Recorder(None, {})
    bench_devices.measure(recorder, 0, 0.0005, is_quick=True)
    assert recorder.failures == []
    of_sessions = [one for one in recorder.records if one.subject == "jaxsok"]
    measured = [(one.notes["on"], one.notes["way"]) for one in of_sessions[::2]]
    assert measured == [(1, "replicas"), (2, "replicas"), (2, "split")][: 1 if len(jax.devices()) < 2 else 3]
    assert len({one.num_keys for one in of_sessions}) == 2
    assert recorder.records[0].notes["over_one"] == 1.0
    assert all(len(row) == len(tables.DEVICES_COLUMNS) for row in tables.devices_rows(recorder.records))


def test_a_quick_run_of_one_workload_is_reported(tmp_path, monkeypatch):
    """`--quick` runs its parts from the command line to the page; a run of all parts takes 15 times as long."""
    monkeypatch.setattr(run, "has_gpu", lambda: jax.default_backend() == "gpu")
    path, page = tmp_path / "results.json", tmp_path / "performance.md"
    arguments = ["--quick", "--scale", "0.0003", "--workloads", "W5", "--repetitions", "2", "--batch-ms", "1"]
    arguments += ["--keys", "uniform", "--optimizers", "sgd", "--out", str(path), "--commit", "abc"]
    assert run.main(arguments).failures == []
    about, found, _ = records.load(path)
    assert about["commit"] == "abc" and str(ROOT) not in path.read_text()
    measured = {(record.what, record.subject) for record in found}
    assert {(records.EVALUATION, "jaxsok"), (records.STEP, "jaxsok"), (records.STEP, "xla")} <= measured
    assert all(record.timing.ms > 0 for record in found)
    markers = [line for part in report.PARTS for line in report.markers(part)]
    page.write_text("\n".join(["before", *markers, "after\n"]))
    report.main([str(path), "--document", str(page)])
    assert "forward + update, sgd" in (tmp_path / "results" / "results.md").read_text()


@pytest.mark.slow
def test_a_quick_run_measures_everything(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "has_gpu", lambda: jax.default_backend() == "gpu")
    path = tmp_path / "results.json"
    parts = ",".join(part for part in run.PARTS if part != "fbgemm")  # this process holds the memory
    monkeypatch.setitem(workloads.WORKLOADS, "W1", dataclasses.replace(workloads.WORKLOADS["W1"], num_tables=2))
    arguments = ["--quick", "--scale", "0.0003", "--workloads", "W1,W5,H1", "--repetitions", "2", "--batch-ms", "1"]
    recorder = run.main([*arguments, "--only", parts, "--out", str(path), "--commit", "abc"])
    assert recorder.failures == []

    document = json.loads(path.read_text())
    assert document["about"]["commit"] == "abc"
    assert document["about"]["versions"]["jax"] == jax.__version__
    assert str(ROOT) not in path.read_text()
    about, found, _ = records.load(path)
    assert about["copy_gb_per_s"] > 0
    measured = {(record.workload, record.what, record.subject) for record in found}
    assert {
        ("W5", records.EVALUATION, "jaxsok"),
        ("W5", records.TRAINING, "jaxsok"),
        ("W5", records.STEP, "jaxsok"),
        ("W5", records.STEP, "xla"),
        ("W5", records.GATHER, "limit"),
        ("W5", records.READ_MODIFY_WRITE, "limit"),
        ("W5", records.PLAN, "jaxsok"),
        ("W1", records.TICKETS, "jaxsok"),
        ("W5", records.TRANSPOSE, "jaxsok"),
        ("H1", records.FIND, "jaxsok"),
        ("H1", records.FIND_AND_GATHER, "jaxsok"),
        ("H1", records.INSERT_NEW, "jaxsok"),
        ("H1", records.INSERT_PRESENT, "jaxsok"),
        ("W1", records.EMPTY, "limit"),
        ("dims", records.STEP, "jaxsok"),
        ("host rows", records.IMPORT, "jaxsok"),
        ("host rows", records.LIFE, "jaxsok"),
        ("scale", records.GROW, "jaxsok"),
        ("scale", records.FIND_AND_GATHER, "jaxsok"),
        ("scale", records.BUILD, "jaxsok"),
        ("scale", records.CHURN, "jaxsok"),
        ("S1", records.SERVED, "jaxsok"),
        ("S1", records.SERVED, "xla"),
        ("S1", records.SERVED_FLOOR, "limit"),
        ("DLRM", records.SERVED, "jaxsok"),
        ("DLRM", records.SERVED, "xla"),
        ("W1", records.PACK, "jaxsok"),
        ("W5", records.PACK, "plain"),
        ("W5", records.HOST_COPY, "limit"),
    } <= measured
    assert all(record.timing.ms > 0 for record in found)
    by_part = {part: [record for record in found if record.part == part] for part in tables.PARTS}
    alone = {run.DCNV2} if jax.default_backend() == "cpu" else {run.DCNV2, "cpu"}
    alone |= {"fresh"} if bench_fresh.redis_program() is None else set()
    assert all(by_part[part] for part in tables.PARTS if part not in alone)
    assert {record.distribution for record in by_part["skew"] if record.workload == "W1"} == set(bench_skew.KEYS)
    assert {record.variant for record in by_part["skew"] if record.workload == "W5"} == {
        f"bags of {hotness}" for hotness in bench_skew.HOTNESS
    }
    assert all(record.notes["rows_stay"] for record in found if record.what == records.GROW)
    # The page reads this run's measurements, and takes the others from full-size results.
    reached = [target.name for target in targets.TARGETS if target.reading(targets.Found(found)) is not None]
    for wanted in (
        "W1's shape, one key a table",
        "W1's shape, one key in all",
        "churn",
        "8 frozen tables",
        "CPU: lookup + update, SGD, uni",
    ):
        assert any(wanted in name for name in reached) or jax.default_backend() != "cpu"
    assert all(len(table) == len(columns) for _, columns, rows in tables.all_of(found, False) for table in rows)
    assert all(row[tables.COLUMNS.index("limit ms")] != tables.NOTHING for row in tables.rows(found))

    page = tmp_path / "performance.md"
    markers = [line for part in report.PARTS for line in (*report.markers(part), "between")]
    page.write_text("\n".join(["before", markers[0], "old", *markers[1:-1], "after\n"]))
    report.main([str(path), "--document", str(page)])
    written = page.read_text()
    assert written.startswith("before\n")
    assert written.endswith("after\n")
    assert "old" not in written
    assert "between" in written
    assert "[results](results/results.md)" in written
    tables_of_run = (tmp_path / "results" / "results.md").read_text()
    assert "forward + update, rowwise_adagrad" in tables_of_run
    assert f"`python -m jaxsok bench --quick --workloads W1,W5,H1 --only {parts} " in tables_of_run
    for part, (title, *_) in tables.PARTS.items():
        assert title.rstrip(":") in tables_of_run or part in {*alone, "cpu"}
    assert "images/" not in written  # plots are of full-size runs on a GPU
    assert path.with_suffix("").is_dir() == (plots.why_none() is None)


@pytest.mark.slow
@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_a_quick_run_on_a_mesh_measures_everything(tmp_path, monkeypatch, small_m1):
    monkeypatch.setattr(run, "has_gpu", lambda: jax.default_backend() == "gpu")
    monkeypatch.setattr(dlrm, "BOTTOM", (16,))
    monkeypatch.setattr(dlrm, "TOP", (16,))
    path = tmp_path / "results.json"
    num_devices = 4 if len(jax.devices()) >= 4 else 2  # 8 threads on two cores wait for each other
    arguments = ["--only", "exchange", "--workloads", "M1", "--devices", str(num_devices), "--quick"]
    arguments += ["--scale", "0.0005", "--repetitions", "2", "--batch-ms", "1", "--out", str(path), "--commit", "abc"]
    recorder = run.main(arguments)
    assert recorder.failures == []

    about, found, _ = records.load(path)
    assert about["num_devices"] == [num_devices]
    measured = {
        (record.what, record.notes["program"], record.notes["wire"], record.notes["front_end"]) for record in found
    }
    whole = {
        (what, program)
        for what in (records.EVALUATION, records.TRAINING, records.STEP)
        for program in ("single", "planned", "pipelined")
    }
    parts = (
        "DISTINCT",
        "KEY_EXCHANGE",
        "OWNER_LOOKUP",
        "ROW_EXCHANGE",
        "COMBINE",
        "TRANSPOSE",
        "GRADIENT_EXCHANGE",
        "OWNER_UPDATE",
    )
    assert measured == (
        {(what, program, "float32", "jit") for what, program in whole}
        | {(what, program, "bfloat16", "jit") for what, program in whole if program != "single"}
        | {(getattr(records, part), "apart", "float32", "jit") for part in parts}
        | {(records.ALL_TO_ALL, "alone", wire, "jit") for wire in ("float32", "bfloat16")}
        | {(records.FORWARD, "take", "float32", "jit"), (records.STEP, "take", "float32", "jit")}
        | {(records.PLAN, "plan", "float32", "jit")}
        | {(records.DLRM, program, "float32", "jit") for program in ("pipelined", "exact ahead", "stale ahead")}
        | {(records.STEP, "planned", "float32", "pmap")}
    )
    assert all(record.timing.ms > 0 for record in found)
    # A whole step sends requests, and rows twice; bfloat16 halves the rows.
    sent = {
        (record.notes["program"], record.notes["wire"]): record.moved_bytes
        for record in found
        if record.what == records.STEP
    }
    assert sent["pipelined", "float32"] - sent["pipelined", "bfloat16"] == sent["planned", "bfloat16"] > 0
    assert len(tables.exchange_rows(found, False)) == len(found)


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
def test_a_quick_run_of_training_measures_the_whole_and_its_parts(tmp_path, monkeypatch, number):
    if len(jax.devices()) < number:
        pytest.skip(f"needs {number} devices; there are {len(jax.devices())}")
    monkeypatch.setattr(run, "has_gpu", lambda: jax.default_backend() == "gpu")
    path = tmp_path / "results.json"
    arguments = ["--only", "dcnv2", "--quick", "--keys", "zipf1.05", "--devices", str(number), "--seconds", "0.01"]
    arguments += ["--repetitions", "2", "--batch-ms", "1", "--scale", "0.0001", "--optimizers", "rowwise_adagrad"]
    with jax.numpy_dtype_promotion("standard"):  # Optax raises a Python float to an int32
        recorder = run.main(
            [*arguments, "--train=--wire bfloat16 --num-threads 1", "--out", str(path), "--commit", "abc"]
        )
    assert recorder.failures == []
    about, found, _ = records.load(path)
    assert about["options"]["parts"] == [run.DCNV2] and about["options"]["train"].startswith("--wire")
    measured = [(record.what, record.variant) for record in found]
    assert measured == [
        (records.READ, "disk"),
        (records.READ, "page cache"),
        (records.READ, "Parquet"),
        (records.TRAIN, ""),
        (records.DLRM, ""),
        (records.PLAN, ""),
        (records.TRAINING, ""),
        (records.STEP, ""),
        (records.DENSE, ""),
    ]
    whole = found[3]
    assert whole.timing.repetitions == 3 and whole.timing.ms > 0 and whole.notes["cores"] > 0
    assert whole.num_keys == 256 * 214 and 256 < whole.num_unique < whole.num_keys
    assert (whole.notes["num_samples"], whole.notes["num_devices"], whole.notes["num_threads"]) == (256, number, 1)
    assert whole.notes["wire"] == ("-" if number == 1 else "bfloat16, bfloat16")
    shown = [table for title, _, table in tables.all_of(found, False) if title.startswith("DLRM-DCNv2")]
    assert len(shown) == 1 and len(shown[0]) == len(found)
    if number == 1:
        wanted = 256 / whole.timing.ms * 1e-3
        (target,) = [target for target in targets.TARGETS if "DCNv2" in target.name and "rowwise" in target.name]
        assert target.reading(targets.Found(found)) == pytest.approx(wanted)
        assert target.row(targets.Found(found))[2].startswith(f"{wanted:.2f} (short: 3 runs of ")
    page = report.page(path)
    assert "read, pack and copy, page cache" in page
    assert "training 3 runs of 0.01 s, `--wire bfloat16 --num-threads 1`; parts 2 repetitions of 1 ms" in page
