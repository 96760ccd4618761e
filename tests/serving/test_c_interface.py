"""Frozen tables from C (jaxsok.h): the bits of Python, from many threads; bad folders and batches are refused."""

import concurrent.futures
import ctypes
import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import zlib

import jax
import numpy as np
import pytest
from c_interface_cases import (
    BAD_ARGUMENT,
    BAD_FOLDER,
    BAD_INDEX,
    DEVICE_FAILED,
    IN_MEMORY,
    NO_FOLDER,
    UNVERIFIED,
    Feature,
    Gpu,
    Refused,
    Request,
    Tables,
    load,
    open_tables,
)
from serving_cases import (
    ASKED,
    INITIALIZERS,
    UNKNOWN_DIM,
    Trained,
    config_of,
    declare_untrained,
    expect,
    model_of,
    rows_of,
)

from jaxsok import Records, __main__ as command_line, serving
from jaxsok.kernels import library
from jaxsok.serving.frozen import DTYPES, FrozenTable, SizedRecords, freeze, freeze_records
from jaxsok.serving.fused import LookupInput, lookup
from jaxsok.types import PADDING_KEY

ROOT = pathlib.Path(__file__).resolve().parents[2]
CPU = jax.devices("cpu")[0]
PADDING = np.uint64(PADDING_KEY)


def frozen_world(device, num_keys=400, share=1.0):
    """Freezes tables of all dtypes and several dims; most stores hold two tables, and some keys are in both."""
    rng, sources = np.random.default_rng(1), []
    for number, dtype in enumerate((*DTYPES, *DTYPES)):
        for dim in (4, 7, 128):
            table = FrozenTable(f"{dtype}_{dim}_{number}", dim, default=0.5 * number, dtype=dtype)
            keys = rng.integers(2**32, 2**64 - 1, num_keys, np.uint64)
            keys[: num_keys // 2] = np.arange(num_keys // 2)
            rows = rng.standard_normal((num_keys, dim)).astype(np.float32)
            sources.append((table, SizedRecords(num_keys, [Records(keys, rows)])))
    return freeze_records(sources, spare_rows=3, device_share=share, device=device)[0]


@functools.cache
def world():
    return frozen_world(CPU)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder with the frozen tables, which no test changes."""
    path = tmp_path_factory.mktemp("c") / "tables"
    serving.export_frozen(path, world())
    return path


@pytest.fixture
def damaged(folder, tmp_path):
    """Returns a copy of the folder, which a test may change."""
    return pathlib.Path(shutil.copytree(folder, tmp_path / "tables"))


def draw_requests(rng, tables, num_requests=20, most=40):
    """Draws requests of every form; some keys have rows, some have none, and some are padding."""
    requests = []
    names = list(tables.tables)

    def keys(*shape):
        drawn = np.where(rng.random(shape) < 0.7, rng.integers(0, 200, shape), rng.integers(0, 2**62, shape))
        return np.where(rng.random(shape) < 0.1, PADDING, drawn.astype(np.uint64))

    for _ in range(num_requests):
        table, num = names[rng.integers(len(names))], int(rng.integers(0, most))
        combiner = ("sum", "mean", "sqrtn")[rng.integers(3)]
        form = rng.integers(5)
        if form == 0:
            requests.append(Request(table, keys(num)))
        elif form == 1:
            requests.append(Request(table, keys(num, int(rng.integers(1, 5))), combiner))
        else:
            offsets = np.array([0, *np.sort(rng.integers(0, num + 1, int(rng.integers(0, 9)))), num], np.int32)
            weights = rng.standard_normal(num).astype(np.float32) if form == 3 else None
            requests.append(Request(table, keys(num), combiner, offsets, weights))
        if form == 4:
            given = keys(num, 2)
            requests.append(Request(table, given, combiner, weights=np.abs(rng.standard_normal((num, 2)))))
    return requests


def look_up(tables, requests):
    """Returns what a lookup in Python returns."""
    inputs = {
        str(i): LookupInput(
            r.table,
            np.asarray(r.keys, np.uint64),
            r.combiner,
            r.offsets,
            None if r.weights is None else np.asarray(r.weights, np.float32),
        )
        for i, r in enumerate(requests)
    }
    with jax.default_device(next(iter(tables.stores[0].rows.devices()))):
        found = lookup(tables, inputs)
    return [np.asarray(found[str(i)]) for i in range(len(requests))]


def assert_same_bits(got, wanted):
    for array, other in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(array.view(np.uint32), other.reshape(array.shape).view(np.uint32))


# Answers ---------------------------------------------------------------------------------------------------------


def test_what_is_in_a_folder(folder):
    with open_tables(folder) as tables:
        assert tables.tables() == {name: (table.dim, 400) for name, table in world().tables.items()}
        assert all(tables.number(name) == t for t, name in enumerate(tables.tables()))
        assert tables.number("nobody") == -1
        found = tables.library
        assert (found.jaxsok_platform(), found.jaxsok_api_version()) == (b"cpu", 1)
        for number in (-1, len(tables.tables())):
            assert found.jaxsok_table_name(tables.pointer, number) is None
            assert found.jaxsok_table_dim(tables.pointer, number) == -1
            assert found.jaxsok_table_num_rows(tables.pointer, number) == -1


@pytest.mark.parametrize("flags", [0, UNVERIFIED, IN_MEMORY, UNVERIFIED | IN_MEMORY])
def test_lookups_have_the_bits_of_python(folder, flags):
    """Lookups in C have the bits of Python: single keys, bags, weights, all combiners and dtypes, in one call."""
    rng = np.random.default_rng(flags)
    with open_tables(folder, flags=flags) as tables:
        requests = draw_requests(rng, world(), num_requests=40)
        assert_same_bits(tables.lookup(*requests), look_up(world(), requests))
        assert tables.lookup() == []


def test_many_keys_and_tiles(folder):
    """Features may have more bags than one tile, more keys than one chunk, or no keys."""
    rng = np.random.default_rng(2)
    name = "float32_128_0"
    requests = [
        Request(name, rng.integers(0, 500, 5000).astype(np.uint64)),
        Request(name, np.zeros(0, np.uint64)),
        Request(name, rng.integers(0, 500, (700, 3)).astype(np.uint64), "mean"),
        Request(name, np.zeros((0, 3), np.uint64), "mean"),
    ]
    with open_tables(folder) as tables:
        assert_same_bits(tables.lookup(*requests), [*look_up(world(), requests[:3]), np.zeros((0, 128), np.float32)])


def test_rows_are_those_that_were_frozen(tmp_path):
    """Rows equal those of the dicts that were frozen, whatever letters the names have."""
    content = {'Käufer "a"\\\n\x01': rows_of(range(0, 90, 3), 5), "item": rows_of(range(50), 5, version=2)}
    sources = [
        (
            FrozenTable(name, 5, default=-1.5),
            SizedRecords(len(rows), [Records(np.array(list(rows), np.uint64), np.array(list(rows.values())))]),
        )
        for name, rows in content.items()
    ]
    serving.export_frozen(tmp_path / "tables", freeze_records(sources)[0])
    named = freeze_records([(FrozenTable("nul\0", 5), sources[0][1])])[0]
    with pytest.raises(ValueError, match=r"export_frozen: tables: got the name 'nul\\x00', wanted one without NUL"):
        serving.export_frozen(tmp_path / "none", named)
    assert not (tmp_path / "none").exists()
    keys = np.array([0, 1, 3, 87, 90, 2**64 - 1, 2**63], np.uint64)
    with open_tables(tmp_path / "tables") as tables:
        assert tables.tables() == {name: (5, len(rows)) for name, rows in content.items()}
        got = tables.lookup(*(Request(name, keys) for name in content))
    for array, rows in zip(got, content.values(), strict=True):
        np.testing.assert_array_equal(array, expect(rows, keys, -1.5, 5))


def test_unknown_keys_read_their_initial_rows(tmp_path):
    """Unknown keys read what `find` reads in training, for every initializer."""
    collection, state = declare_untrained()
    serving.export_frozen(tmp_path / "tables", freeze(collection, state, tables=list(INITIALIZERS), device=CPU))
    batch = collection.batch({table.name: ASKED for table in collection.tables})
    found, _ = collection.find(state, batch.features)
    with open_tables(tmp_path / "tables") as tables:
        got = tables.lookup(*(Request(name, ASKED) for name in INITIALIZERS))
    wanted = [np.asarray(found[name]).reshape(-1, UNKNOWN_DIM) for name in INITIALIZERS]
    if jax.default_backend() == "cpu":
        assert_same_bits(got, wanted)
    else:
        np.testing.assert_allclose(got, wanted, rtol=1e-6)  # A GPU's sqrt and division may differ in the last bit.


@pytest.mark.parametrize("source", ["export", "delta", "configuration"])
def test_the_command_freezes_what_a_session_serves(source, tmp_path, capsys):
    trained = Trained({"user": 4, "item": 8})
    for table, dim in trained.dims.items():
        trained.set(table, rows_of(range(30), dim))
    monday = path = trained.full(tmp_path / "monday")
    defaults = {"user": None, "item": None}
    if source == "delta":
        trained.set("user", rows_of(range(20, 40), 4, version=1))
        trained.erase("item", range(5))
        path = trained.delta(tmp_path / "tuesday", monday)
    if source == "configuration":
        defaults = {"user": 3.5, "item": None}
    config = config_of(model_of({name: (path, dim) for name, dim in trained.dims.items()}, defaults=defaults))
    if source == "configuration":
        (tmp_path / "hps.json").write_text(json.dumps(config))
        path = str(tmp_path / "hps.json")
    assert command_line.main(["freeze", path, str(tmp_path / "tables")]) == 0
    assert "user: " in capsys.readouterr().out
    keys = np.array([0, 3, 7, 25, 35, 2**63 + 5, PADDING_KEY], np.uint64)
    with serving.open(config, device=CPU) as session, open_tables(tmp_path / "tables") as tables:
        wanted = session.lookup({"user": keys, "item": keys})
        got = tables.lookup(Request("user", keys), Request("item", keys))
    assert_same_bits(got, [wanted["user"], wanted["item"]])
    for source in (path, str(tmp_path / "nowhere")):  # before anything is read
        assert command_line.main(["freeze", source, str(tmp_path / "tables")]) == 2
        assert "exists, wanted a new folder" in capsys.readouterr().err


def test_the_command_refuses_what_names_no_table(tmp_path, capsys):
    config = config_of(*(model_of({"item": (tmp_path, 4)}, name=name) for name in ("first", "second")))
    (tmp_path / "hps.json").write_text(json.dumps(config))
    (tmp_path / "key").write_bytes(b"")
    for arguments, text in (
        ([str(tmp_path / "hps.json")], "model: got None, wanted one of ['first', 'second']"),
        ([str(tmp_path)], "which does not name its table, wanted the HPS configuration"),
        ([str(tmp_path / "nowhere")], f'freeze: source: got "{tmp_path / "nowhere"}", which is not there'),
    ):
        assert command_line.main(["freeze", *arguments, str(tmp_path / "out")]) == 2
        assert text in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_rows_that_stay_in_host_memory(share, tmp_path):
    """A folder of which a GPU would keep a part of the rows has the same answers, and says how many it keeps."""
    tables = frozen_world(CPU, share=share)
    serving.export_frozen(tmp_path / "tables", tables)
    stores = json.loads((tmp_path / "tables" / "frozen.json").read_text())["stores"]
    assert [store["num_device_rows"] for store in stores] == [max(1, round(2 * 400 * share))] * len(stores)
    requests = draw_requests(np.random.default_rng(5), world(), num_requests=40)
    for flags in (0, IN_MEMORY):
        with open_tables(tmp_path / "tables", flags=flags) as opened:
            assert_same_bits(opened.lookup(*requests), look_up(world(), requests))


def test_the_command_keeps_the_rows_used_most_on_the_device(tmp_path):
    """The first rows of the file are those of the keys that an HPS folder counts as used most."""
    folder = tmp_path / "hps" / "item"
    folder.mkdir(parents=True)
    keys, rows = np.arange(20, dtype=np.int64), np.arange(80, dtype=np.float32).reshape(20, 4)
    uses = np.random.default_rng(6).permutation(20).astype(np.int64)
    for name, array in (("key", keys), ("emb_vector", rows), ("meta", uses)):
        array.tofile(folder / name)
    (tmp_path / "hps.json").write_text(json.dumps(config_of(model_of({"item": (str(folder), 4)}))))
    arguments = ["freeze", str(tmp_path / "hps.json"), str(tmp_path / "tables"), "--device-share", "0.25"]
    assert command_line.main(arguments) == 0
    stored = np.fromfile(tmp_path / "tables" / "store_0.rows", np.float32).reshape(20, 4)
    assert {tuple(row) for row in stored[:5]} == {tuple(rows[key]) for key in np.argsort(uses)[-5:]}
    with open_tables(tmp_path / "tables") as tables:
        np.testing.assert_array_equal(tables.lookup(Request("item", keys))[0], rows)


def test_a_folder_without_the_number_of_device_rows_has_all_there(damaged):
    """Folders of earlier releases open."""

    def change(body):
        for store in body["stores"]:
            del store["num_device_rows"]

    manifest_with(damaged, change)
    requests = draw_requests(np.random.default_rng(7), world())
    with open_tables(damaged) as tables:
        assert_same_bits(tables.lookup(*requests), look_up(world(), requests))


def test_threads_get_their_own_answers(folder):
    """Each thread gets its own answers and reads its own errors, also while other threads are refused."""
    seeds = range(32)
    wanted = {}
    for seed in seeds:
        requests = draw_requests(np.random.default_rng(seed), world(), num_requests=8)
        wanted[seed] = (requests, look_up(world(), requests))
    with open_tables(folder) as tables:

        def work(seed):
            requests, answers = wanted[seed]
            for _ in range(10):
                assert_same_bits(tables.lookup(*requests), answers)
                with pytest.raises(Refused, match=f"got {seed + 1000}, wanted 0 to"):
                    feature = tables.pack([Request("int8_4_3", np.zeros(1))])[3][0]
                    feature.table = seed + 1000
                    tables.call([(0, 0)] * 3, [feature])

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(work, seeds))


# On a GPU --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpu_world():
    return frozen_world(jax.devices()[0])


@pytest.mark.gpu
@pytest.mark.parametrize("is_graph", [False, True], ids=["stream", "graph"])
@pytest.mark.parametrize("share", [1.0, 0.3, 0.0])
def test_lookups_on_a_gpu_have_the_bits_of_python(is_graph, share, gpu_world, tmp_path):
    """The kernels of a GPU give the bits of Python, on a stream of the caller and captured in a graph."""
    tables = gpu_world if share == 1.0 else frozen_world(jax.devices()[0], share=share)
    serving.export_frozen(tmp_path / "tables", tables)
    gpu = Gpu()
    with open_tables(tmp_path / "tables", back_end="cuda") as tables:
        assert tables.library.jaxsok_platform() == b"cuda"
        for seed in range(4):
            requests = draw_requests(np.random.default_rng(seed), gpu_world, num_requests=(1, 8, 40, 300)[seed])
            wanted = look_up(gpu_world, requests)
            for is_pinned in (False, True):
                got = gpu.lookup(tables, *requests, is_graph=is_graph, is_pinned=is_pinned)
                assert_same_bits(got, wanted)


@pytest.mark.gpu
def test_threads_on_a_gpu(gpu_world, tmp_path):
    """Threads look up the same tables at one time, each on its own stream."""
    serving.export_frozen(tmp_path / "tables", gpu_world)
    drawn = [draw_requests(np.random.default_rng(seed), gpu_world, num_requests=8) for seed in range(16)]
    wanted = [look_up(gpu_world, requests) for requests in drawn]
    with open_tables(tmp_path / "tables", back_end="cuda") as tables:

        def work(requests, answers):
            gpu = Gpu()
            for _ in range(10):
                assert_same_bits(gpu.lookup(tables, *requests), answers)

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(work, drawn, wanted))


@pytest.mark.gpu
def test_calls_on_a_gpu_that_are_refused(gpu_world, tmp_path):
    serving.export_frozen(tmp_path / "tables", gpu_world)
    assert "device: got -1, wanted 0 to" in refusal(tmp_path / "tables", BAD_ARGUMENT, back_end="cuda", device=-1)
    gpu = Gpu()
    with open_tables(tmp_path / "tables", back_end="cuda") as tables:
        request = Request("float32_4_0", np.arange(4, dtype=np.uint64))
        feature = tables.pack([request])[3][0]
        feature.out = gpu.put(np.zeros(64, np.float32)) + 4
        keys = gpu.put(request.keys)
        with pytest.raises(Refused, match=r"out: got 0x.*, wanted the memory of the embeddings, at a multiple of 16"):
            tables.call([(keys, 4), (None, 0), (None, 0)], [feature])


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="needs a machine without a GPU")
def test_without_a_gpu_its_library_says_so(folder):
    if not library.library_path("cuda").exists():
        pytest.skip("the CUDA library is not built")
    text = refusal(folder, DEVICE_FAILED, back_end="cuda")
    assert "wanted a GPU and its driver; libjaxsok_cpu.so needs neither" in text


# Programs in C and C++ -------------------------------------------------------------------------------------------


def compiler(name):
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} here")
    return found


@pytest.mark.parametrize(
    "standard", ["c99", "c++11", *(pytest.param(newer, marks=pytest.mark.slow) for newer in ("c17", "c++20"))]
)
def test_the_header_compiles_alone(standard, tmp_path):
    is_cpp = standard.startswith("c++")
    source = tmp_path / ("program.cc" if is_cpp else "program.c")
    source.write_text("#include <jaxsok.h>\nint main(void) { return jaxsok_api_version() != JAXSOK_API_VERSION; }\n")
    flags = subprocess.run([sys.executable, "-m", "jaxsok", "flags"], capture_output=True, text=True, check=True)
    warnings = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-std={standard}"]
    command = [compiler("g++" if is_cpp else "gcc"), *warnings, str(source), *flags.stdout.split()]
    subprocess.run([*command, "-o", str(tmp_path / "program")], check=True)
    subprocess.run([str(tmp_path / "program")], check=True)


def build_example(name, folder):
    program = folder / name
    flags = subprocess.run([sys.executable, "-m", "jaxsok", "flags"], capture_output=True, text=True, check=True)
    source = ROOT / "examples" / "c" / f"{name}.cc"
    warnings = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread"]
    command = [compiler("g++"), *warnings, str(source), *flags.stdout.split(), "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def test_the_example_prints_rows(folder, tmp_path):
    program = build_example("lookup_frozen", tmp_path)
    given = ["3", "77", str(2**63 + 1), "-1"]
    found = subprocess.run([program, folder, "float32_4_0", *given], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    keys = np.array([3, 77, 2**63 + 1, PADDING], np.uint64)
    rows = look_up(world(), [Request("float32_4_0", keys)])[0]
    lines = [line.split() for line in found.stdout.splitlines()[-4:]]
    assert [int(line[0]) for line in lines] == keys.tolist()
    np.testing.assert_array_equal(np.array([line[1:] for line in lines], np.float32), rows)
    wrong = [[folder, "float32_4_0", key] for key in ("abc", "3x", "", str(2**64))]
    for arguments in ([folder / "nowhere", "item", "3"], [folder, "missing", "3"], [folder], *wrong):
        found = subprocess.run([program, *arguments], capture_output=True, text=True)
        assert found.returncode == 1 and found.stderr.count("\n") == 1


def test_the_load_program_measures(folder, tmp_path):
    program = build_example("load_frozen", tmp_path)
    found = subprocess.run([program, folder, "4", "0.3"], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    report = json.loads(found.stdout)
    assert report["threads"] == 4 and report["keys"] == 26 and report["lookups"] > 100
    assert 0 < report["p50_us"] <= report["p99_us"] <= report["p999_us"]


# Folders that are wrong ------------------------------------------------------------------------------------------


def refusal(folder, status, **options):
    """Returns the message of an open that is refused, without the part that all messages share."""
    with pytest.raises(Refused) as refused:
        Tables(folder, **options)
    assert refused.value.status == status, str(refused.value)
    text = str(refused.value)
    assert text.startswith("jaxsok_open: ") and ("wanted" in text)
    return text


def test_folders_that_are_not_there(damaged, tmp_path):
    assert f'"{tmp_path}/nowhere/frozen.json": got "No such file' in refusal(tmp_path / "nowhere", NO_FOLDER)
    (damaged / "store_1.rows").unlink()
    assert 'store_1.rows": got "No such file' in refusal(damaged, NO_FOLDER)
    (damaged / "store_0.index").unlink()
    (damaged / "store_0.index").mkdir()
    assert 'store_0.index": got no regular file' in refusal(damaged, BAD_FOLDER)
    (damaged / "frozen.json").unlink()
    os.mkfifo(damaged / "frozen.json")
    assert "frozen.json" in refusal(damaged, BAD_FOLDER)


@pytest.mark.parametrize("flags", [0, UNVERIFIED, IN_MEMORY])
def test_files_of_another_size(folder, damaged, flags):
    """Files that are cut to any length or lengthened are refused, with and without checksums."""
    for file in sorted(folder.glob("store_*")):
        size = file.stat().st_size
        for wrong in (0, 1, size // 2, size - 1, size + 1):
            os.truncate(damaged / file.name, wrong)
            text = refusal(damaged, BAD_FOLDER, flags=flags)
            assert f'{file.name}": got {wrong} bytes, wanted {size}; the folder is damaged' in text
        shutil.copy(file, damaged / file.name)
    with open_tables(damaged, flags=flags):
        pass


def test_every_changed_bit_is_noticed(folder, damaged):
    rng = np.random.default_rng(3)
    for file in sorted(folder.iterdir()):
        content = file.read_bytes()
        for _ in range(12):
            changed = bytearray(content)
            changed[rng.integers(len(content))] ^= 1 << rng.integers(8)
            (damaged / file.name).write_bytes(changed)
            text = refusal(damaged, BAD_FOLDER)
            assert (file.name in text and "the folder is damaged" in text) or "version" in text
        (damaged / file.name).write_bytes(content)
    with open_tables(damaged):
        pass


def test_a_link_that_is_given_another_folder_meanwhile(tmp_path):
    """Without checksums nothing else would notice an index of one folder over the rows of another."""
    keys = np.arange(5000, dtype=np.uint64)
    for name, order in (("1", keys), ("2", keys[::-1])):
        rows = np.repeat(order.astype(np.float32)[:, None] + 1e4 * int(name), 4, 1)
        tables, _ = freeze_records([(FrozenTable("user", dim=4), SizedRecords(len(keys), [Records(order, rows)]))])
        serving.export_frozen(tmp_path / name, tables)
    link, is_over, seen = tmp_path / "current", threading.Event(), set()
    link.symlink_to("1")

    def switch():
        while not is_over.is_set():
            for name in ("2", "1"):
                (tmp_path / "next").symlink_to(name)
                (tmp_path / "next").rename(link)

    thread = threading.Thread(target=switch)
    thread.start()
    try:
        for flags in (UNVERIFIED, 0):
            for _ in range(300):
                with open_tables(link, flags=flags) as tables:
                    found = tables.lookup(Request("user", keys))[0][:, 0] - keys
                assert (found == found[0]).all()
                seen.add(int(found[0]))
    finally:
        is_over.set()
        thread.join()
    assert seen == {10_000, 20_000}


def seal(rest):
    """Returns a manifest with the right checksum."""
    return b'{"checksum": %d,\n' % zlib.crc32(rest) + rest


def manifest_with(folder, change):
    """Returns the manifest of a folder, changed, with its checksum corrected."""
    body = json.loads((folder / "frozen.json").read_text())
    del body["checksum"]
    change(body)
    (folder / "frozen.json").write_bytes(seal(json.dumps(body).encode()[1:]))


HUGE = 2**64
CHANGES = {
    "format": (lambda b: b.update(format="jaxsok-model"), 'format: got "jaxsok-model", wanted jaxsok-frozen'),
    "version": (lambda b: b.update(version=2), "version: got 2, wanted 1; write the folder and link the program"),
    "no stores": (lambda b: b.update(stores=[]), "stores: got no tables"),
    "stores of text": (lambda b: b.update(stores=["x"]), "stores[0].: got another value, wanted an object"),
    "seed": (lambda b: b.update(seed=[1]), "seed: got 1 values, wanted 2"),
    "dim 0": (lambda b: b["stores"][0].update(dim=0), "stores[0].dim: got 0, wanted a whole number from 1 to 1024"),
    "dim 1025": (lambda b: b["stores"][0].update(dim=1025), "stores[0].dim: got 1025"),
    "dim -1": (lambda b: b["stores"][0].update(dim=-1), "stores[0].dim: got a value of another kind"),
    "dim 4.0": (lambda b: b["stores"][0].update(dim=4.0), "stores[0].dim: got a value of another kind"),
    "dim true": (lambda b: b["stores"][0].update(dim=True), "stores[0].dim: got a value of another kind"),
    "another dim": (lambda b: b["stores"][0].update(dim=3), "store_0.rows"),
    "dtype": (lambda b: b["stores"][0].update(dtype="int4"), 'stores[0].dtype: got "int4", wanted float32, bfloat16'),
    "scales": (lambda b: b["stores"][0].update(dtype="int8"), "store_0.rows"),
    "device rows": (lambda b: b["stores"][0].update(num_device_rows=0), "stores[0].num_device_rows: got 0"),
    "too many": (lambda b: b["stores"][1].update(num_device_rows=10**6), "stores[1].num_device_rows: got 1000000"),
    "capacity": (lambda b: b["stores"][1].update(capacity=2**31), "stores[1].capacity: got 2147483648"),
    "capacity 0": (lambda b: b["stores"][1].update(capacity=0), "stores[1].capacity: got 0"),
    "huge": (lambda b: b["stores"][1].update(capacity=HUGE), "wanted a number below 2^64"),
    "buckets": (lambda b: b["stores"][0].update(num_buckets=2**30), "stores[0].num_buckets: got 1073741824"),
    "more buckets": (lambda b: b["stores"][0].update(num_buckets=2**30 - 1), "store_0.index"),
    "salt": (lambda b: b["stores"][0].update(salt=[1, 2**32]), "stores[0].salt[1]: got 4294967296"),
    "words": (lambda b: b["stores"][0]["tables"][0].update(words=[0] * 15), "words: got 15 values, wanted 16"),
    "no name": (lambda b: b["stores"][0]["tables"][0].pop("name"), "tables[0].name: got nothing, wanted a text"),
    "num_rows": (lambda b: b["stores"][0]["tables"][1].update(num_rows=10**6), "tables[1].num_rows: got 1000000"),
    "no tables": (lambda b: b["stores"][0].update(tables=[]), "stores[0].tables: got 0 of them, wanted at least one"),
    "two names": (
        lambda b: b["stores"][0]["tables"].append(b["stores"][0]["tables"][0]),
        'stores: got two tables "float32_4_0", wanted distinct names',
    ),
    "checksums": (lambda b: b["stores"][0].pop("checksums"), "stores[0].checksums: got nothing, wanted an object"),
    "surrogates": (lambda b: b.update(jaxsok="\ud800"), "wanted an escape of a character from 1 to 127"),
    "zero": (lambda b: b["stores"][0]["tables"][0].update(name="a\0b"), "wanted an escape of a character from 1"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_manifests_that_mean_nothing(name, damaged):
    """Each value of a manifest is checked, even when the checksum is right."""
    change, text = CHANGES[name]
    manifest_with(damaged, change)
    for flags in (0, UNVERIFIED):
        assert text in refusal(damaged, BAD_FOLDER, flags=flags)


NO_MANIFESTS = [
    (b"", "byte 0: wanted a value"),
    (b"{", "byte 1: wanted a text"),
    (b"[]", "content: got another value, wanted an object"),
    (b"null", "content: got another value, wanted an object"),
    (b'"frozen"', "content: got another value, wanted an object"),
    (b"{} {}", "byte 3: wanted the end"),
    (b'{"a": 1}', "format: got nothing, wanted a text"),
    (b"\0" * 1000, "byte 0: wanted a value"),
    (b"[" * 100_000, "byte 17: wanted fewer brackets in each other"),
    (b'{"a":' * 100_000, "byte 85: wanted fewer brackets in each other"),
    (b'{"checksum": 1 "format": 2}', "byte 15: wanted a comma or a closing bracket"),
    (b'{"checksum": 1,}', "byte 15: wanted a text"),
    (b'{"checksum"; 1}', "byte 11: wanted a colon"),
    (b'{"checksum": "\\u12"}', "byte 18: wanted four hexadecimal digits"),
    (b'{"checksum": "\\x"}', "byte 15: wanted an escape"),
    (b'{"checksum": "never ends', "byte 24: wanted a text without control characters, and its end"),
    (b'{"checksum": 99999999999999999999999999}', "byte 39: wanted a number below 2^64"),
    (b"\xff\xfe", "byte 0: wanted UTF-8"),
    (b'{"name": "\xc0\x80"}', "byte 10: wanted UTF-8"),
    (b'{"name": "\xbf\xbf"}', "byte 10: wanted UTF-8"),
    (b'{"name": "\xed\xa0\x80"}', "byte 10: wanted UTF-8"),
    (b'{"name": "\xe2\x82', "byte 10: wanted UTF-8"),
]


@pytest.mark.parametrize(("content", "text"), NO_MANIFESTS, ids=range(len(NO_MANIFESTS)))
def test_manifests_that_are_none(content, text, damaged):
    (damaged / "frozen.json").write_bytes(content)
    assert f'frozen.json": {text}' in refusal(damaged, BAD_FOLDER)


def test_a_manifest_that_is_too_large(damaged):
    os.truncate(damaged / "frozen.json", 1 << 40)
    assert "got 1099511627776 bytes, wanted at most" in refusal(damaged, BAD_FOLDER)


def test_any_manifest_opens_or_is_refused(damaged):
    """Manifests with changed, removed or inserted bytes and a right checksum open or are refused, and never crash."""
    rng = np.random.default_rng(4)
    content = (damaged / "frozen.json").read_bytes().partition(b"\n")[2]
    pieces = [b"{", b"}", b"[", b"]", b",", b'"', b"\\", b"\\u00", b"-", b"9" * 20, b"null", b"\xff", b"1e9"]
    statuses = set()
    for _ in range(300):
        changed = bytearray(content)
        for _ in range(rng.integers(1, 4)):
            at, size = int(rng.integers(len(changed))), int(rng.integers(0, 4))
            piece = pieces[rng.integers(len(pieces))] if rng.random() < 0.6 else rng.bytes(int(rng.integers(0, 3)))
            changed[at : at + size] = piece
        (damaged / "frozen.json").write_bytes(seal(bytes(changed)))
        try:
            Tables(damaged, flags=UNVERIFIED).close()
            statuses.add(0)
        except Refused as refused:
            statuses.add(refused.status)
    assert BAD_FOLDER in statuses and statuses <= {0, BAD_FOLDER, NO_FOLDER}


def test_any_index_and_rows_are_safe_to_look_up(folder, damaged):
    """Without checksums, any bytes of index and rows give rows or an error, and no access leaves the buffers."""
    rng = np.random.default_rng(5)
    statuses = set()
    for _ in range(20):
        for file in damaged.glob("store_*"):
            content = np.frombuffer((folder / file.name).read_bytes(), np.uint8).copy()
            where = rng.random(content.size) < (0.001, 0.2, 1.0)[rng.integers(3)]
            content[where] = rng.integers(0, 256, where.sum())
            file.write_bytes(content.tobytes())
        with open_tables(damaged, flags=UNVERIFIED) as tables:
            try:
                tables.lookup(*draw_requests(rng, world()))
                statuses.add(0)
            except Refused as refused:
                statuses.add(refused.status)
    assert BAD_INDEX in statuses and statuses <= {0, BAD_INDEX}


def test_a_folder_is_written_once(folder):
    with pytest.raises(FileExistsError, match=r"export_frozen: path: got .*, which exists, wanted a new folder\."):
        serving.export_frozen(folder, world())
    with pytest.raises(TypeError, match="export_frozen: tables: got int, wanted FrozenTables"):
        serving.export_frozen(folder / "new", 3)
    assert not list(folder.parent.glob("*.writing"))


def test_a_folder_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def fail(array):
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "ascontiguousarray", fail)
    with pytest.raises(OSError, match="no space left"):
        serving.export_frozen(tmp_path / "tables", world())
    assert not list(tmp_path.iterdir())


# Calls that are wrong --------------------------------------------------------------------------------------------


def test_opens_that_are_refused(folder):
    assert "device: got 1, wanted 0: this is libjaxsok_cpu.so" in refusal(folder, BAD_ARGUMENT, device=1)
    assert "flags: got 4, wanted 0, JAXSOK_UNVERIFIED" in refusal(folder, BAD_ARGUMENT, flags=4)
    found, pointer = load(), ctypes.c_void_p(7)
    assert found.jaxsok_open(None, 0, 0, ctypes.byref(pointer)) == BAD_ARGUMENT and pointer.value is None
    assert found.jaxsok_error() == b"jaxsok_open: folder: got NULL, wanted a pointer."
    assert found.jaxsok_open(b"x", 0, 0, None) == BAD_ARGUMENT
    assert found.jaxsok_open(b"x", 0, 0, ctypes.byref(pointer)) == NO_FOLDER and pointer.value is None
    assert found.jaxsok_open(b"", 0, 0, ctypes.byref(pointer)) == BAD_ARGUMENT
    assert found.jaxsok_error() == b'jaxsok_open: folder: got "", wanted the path of a folder.'
    found.jaxsok_close(None)
    assert found.jaxsok_num_tables(None) == -1 and found.jaxsok_find_table(None, b"x") == -1
    assert found.jaxsok_lookup(None, None, None) == BAD_ARGUMENT


BAD_BATCHES = {
    "table": ({"table": -1}, r"features\[1\]\.table: got -1, wanted 0 to 29\."),
    "combiner": ({"combiner": 4}, r"combiner: got 4"),
    "num_keys": ({"num_keys": -1}, r"num_keys: got -1"),
    "keys overlap": ({"first_key": 3}, r"first_key: got 3 with 6 from there, wanted them between 4 and 10"),
    "keys beyond": ({"first_key": 5}, r"first_key: got 5 with 6 from there"),
    "keys far beyond": ({"first_key": 2**63 - 1}, r"first_key: got 9223372036854775807 with 6"),
    "many keys": ({"num_keys": 2**63 - 1}, r"first_key: got 4 with 9223372036854775807"),
    "num_bags": ({"num_bags": -1}, r"num_bags: got -1"),
    "many bags": ({"num_bags": 2**62}, r"num_bags: got 4611686018427387904"),
    "offsets beyond": ({"num_bags": 4}, r"first_offset: got 0 with 5 from there, wanted them between 0 and 4"),
    "offsets before": ({"first_offset": -2}, r"first_offset: got -2"),
    "offsets fall": ({"num_bags": 2, "first_offset": 1}, r"first_offset: got offset 1 at 2 of 3, wanted 5 to 6"),
    "weights beyond": ({"first_weight": 1}, r"first_weight: got 1 with 6"),
    "weights before": ({"first_weight": -3}, r"first_weight: got -3"),
    "no divisor": ({"first_offset": -1, "num_bags": 4}, r"num_bags: got 4, wanted a divisor of 6"),
    "no keys for bags": ({"first_offset": -1, "num_bags": 7}, r"num_bags: got 7, wanted a divisor"),
    "keys without bags": ({"first_offset": -1, "num_bags": 0}, r"num_bags: got 0, wanted a divisor of 6"),
    "rows with weights": ({"combiner": 0, "first_offset": -1, "num_bags": 6}, r"first_weight: got one with JAXSOK"),
    "rows with offsets": ({"combiner": 0}, r"first_offset: got one with JAXSOK_ROWS"),
    "rows": ({"combiner": 0, "first_offset": -1, "first_weight": -1}, r"num_bags: got 1, wanted 6, its num_keys"),
    "no out": ({"out": None}, r"out: got 0, wanted the memory"),
    "odd out": ({"out": 4097}, r"out: got 0x1001, wanted the memory of the embeddings, at a multiple of 4"),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_batches_that_are_refused(name, folder):
    """A batch that is refused writes nothing."""
    changes, text = BAD_BATCHES[name]
    keys, weights = np.arange(10, dtype=np.uint64), np.ones(6, np.float32)
    offsets, out = np.array([0, 5, 5, 1], np.int32), np.full((10, 4), 7, np.float32)
    arrays = [(array.ctypes.data, array.size) for array in (keys, offsets, weights)]
    with open_tables(folder) as tables:
        first = tables.pack([Request("float32_4_0", keys[:4])])[3][0]
        second = type(first)(0, 1, 4, 6, 1, 0, 0, out.ctypes.data)
        first.out = out[6:].ctypes.data
        for field, value in changes.items():
            setattr(second, field, value)
        with pytest.raises(Refused, match=text) as refused:
            tables.call(arrays, [first, second])
        assert refused.value.status == BAD_ARGUMENT
        assert (out == 7).all()


def test_any_batch_is_looked_up_or_refused(folder):
    """Numbers of any size in every field never crash, and nothing is written outside the embeddings."""
    rng, statuses = np.random.default_rng(6), set()
    keys, weights = rng.integers(0, 500, 12).astype(np.uint64), rng.standard_normal(12).astype(np.float32)
    extremes = [-(2**63), -(2**31), -2, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1]
    out = np.zeros((3, 13, 128), np.float32)
    with open_tables(folder) as tables:

        def number(most, bits=64):
            found = int(rng.integers(-1, most)) if rng.random() < 0.95 else extremes[rng.integers(len(extremes))]
            return found % 2**bits - (2**bits if found % 2**bits >= 2 ** (bits - 1) else 0)

        for _ in range(4000):
            offsets = (
                np.sort(rng.integers(0, 6, 8)).astype(np.int32)
                if rng.random() < 0.8
                else rng.integers(-(2**31), 2**31, 8).astype(np.int32)
            )
            arrays = [(array.ctypes.data, array.size) for array in (keys, offsets, weights)]
            features, end = [], 0
            for f in range(rng.integers(1, 4)):
                size = int(rng.integers(0, 5))
                first = end if rng.random() < 0.9 else number(12)
                bags = size if rng.random() < 0.6 else number(8)
                fields = (number(30, 32), number(4, 32), first, size if rng.random() < 0.95 else number(12), bags)
                features.append(Feature(*fields, number(4), number(3), out[f].ctypes.data))
                end += size
            out[:, 12] = 7
            try:
                tables.call(arrays, features)
                statuses.add(0)
            except Refused as refused:
                statuses.add(refused.status)
            assert (out[:, 12] == 7).all()
    assert statuses == {0, BAD_ARGUMENT}


def test_arrays_that_are_refused(folder):
    with open_tables(folder) as tables:
        for arrays, text in (
            ([(None, 1), (None, 0), (None, 0)], "keys: got 1 of them at 0, wanted"),
            ([(4, 1), (None, 0), (None, 0)], "keys: got 1 of them at 0x4, wanted"),
            ([(None, 0), (None, -1), (None, 0)], "offsets: got -1 of them"),
            ([(None, 0), (None, 0), (4096, 2**31)], "weights: got 2147483648 of them"),
        ):
            with pytest.raises(Refused, match=text):
                tables.call(arrays, [])
