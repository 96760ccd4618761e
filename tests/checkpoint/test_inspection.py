"""Inspection: reports against NumPy, file kinds by content, declarations from files, pictures, the two commands."""

import io
import itertools
import json
import math
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import weakref

import jax
import ml_dtypes
import numpy as np
import programs
import pytest
from hypothesis import given, strategies as st

import jaxsok
from jaxsok import __main__ as command_line, inspection
from jaxsok.checkpoint import export_full
from jaxsok.inspection import counts, pictures
from jaxsok.inspection.counts import QUANTILES
from jaxsok.inspection.kinds import KINDS
from jaxsok.records import Records

ROOT = pathlib.Path(__file__).resolve().parents[2]
SGD = jaxsok.optim.sgd(0.1)

# Reports -------------------------------------------------------------------------------------------------------------


def draw_records(seed, num_rows, dim=3, dtype=np.float32, most=2**32):
    """Draws records from a seed, with zeros and non-finite rows among them."""
    draw = np.random.default_rng(seed)
    rows = (draw.normal(size=(num_rows, dim)) * np.exp(3 * draw.normal(size=(num_rows, 1)))).astype(dtype)
    rows[draw.random(num_rows) < 0.1] = 0
    rows[draw.random(num_rows) < 0.05, 0] = np.inf
    rows[draw.random(num_rows) < 0.05, -1] = np.nan
    keys = draw.permutation(np.arange(num_rows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed))
    state = {"m": np.abs(draw.normal(size=(num_rows, dim))).astype(np.float32), "v": np.ones((num_rows, 1), np.float32)}
    sizes = np.exp(draw.uniform(0, math.log(most), num_rows))
    frequency = np.minimum(sizes, most - 1).astype(np.uint32) * (draw.random(num_rows) > 0.1)
    return Records(keys, rows, state, draw.integers(0, most, num_rows).astype(np.uint32), frequency.astype(np.uint32))


def split(records, places):
    """Splits records into several chunks, some of them empty."""
    edges = [0, *sorted(place % (records.num_rows + 1) for place in places), records.num_rows]
    return [records.take(slice(a, b)) for a, b in itertools.pairwise(edges)]


def check_norms(found, rows):
    """Compares norms in float64, and their quantiles as NumPy defines them."""
    norms = np.linalg.norm(rows.astype(np.float64), axis=1)
    finite = norms[np.isfinite(norms)]
    assert found.dim == rows.shape[1]
    assert found.num_nonfinite == norms.size - finite.size and found.num_zero == (finite == 0).sum()
    if not finite.size:
        assert math.isnan(found.min) and math.isnan(found.max) and not found.bins
        return
    assert found.min == pytest.approx(finite.min(), rel=1e-12) and found.max == pytest.approx(finite.max(), rel=1e-12)
    assert list(found.quantiles) == list(QUANTILES)
    for share, value in found.quantiles.items():
        exact = np.quantile(finite, share, method="inverted_cdf")
        assert value == pytest.approx(exact, rel=0.006, abs=0), share
    above = finite[finite > 0]
    assert sum(octave.num for octave in found.bins) == above.size and len(found.bins) <= 16
    for low, high, num in found.bins:
        # A norm on an edge may fall on either side.
        least = ((above >= low * (1 + 1e-9)) & (above < high * (1 - 1e-9))).sum()
        most = ((above >= low * (1 - 1e-9)) & (above < high * (1 + 1e-9))).sum()
        assert least <= num <= most
    assert all(a.high == b.low for a, b in itertools.pairwise(found.bins))


def octaves(values):
    """Counts the values in [0, 1), [1, 2), [2, 4), ..., by bit length."""
    lengths = [int(value).bit_length() for value in values]
    return {(0, 1) if n == 0 else (2 ** (n - 1), 2**n): lengths.count(n) for n in set(lengths)}


def non_empty(bins):
    """Returns the bins that are not empty."""
    return {(octave.low, octave.high): octave.num for octave in bins if octave.num}


@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 200),
    st.lists(st.integers(0, 2**16), max_size=4),
    st.sampled_from([100, 2**16, 2**20, 2**32]),
)
def test_a_report_is_what_numpy_says(seed, num_rows, places, most):
    """Reports agree with NumPy for any number of rows, in any chunks."""
    records = draw_records(seed, num_rows, most=most)
    found = inspection.report(split(records, places), name="user")
    assert (found.name, found.num_rows, found.dim, found.dtype) == ("user", num_rows, 3, "float32")
    assert found.num_bytes == num_rows * (8 + 12 + 16 + 8)
    if num_rows:
        signed = [int(key) - 2**64 if key >= 2**63 else int(key) for key in records.keys]
        assert (found.min_key, found.max_key) == (min(map(int, records.keys)), max(map(int, records.keys)))
        assert (found.min_signed_key, found.max_signed_key) == (min(signed), max(signed))
        assert found.num_negative == sum(key < 0 for key in signed)
    check_norms(found.norms, records.rows)
    assert list(found.states) == ["m", "v"]
    for name, norms in found.states.items():
        check_norms(norms, records.state[name])

    uses = [int(count) for count in records.frequency]
    assert found.uses.num_uses == sum(uses) and found.uses.num_unused == uses.count(0)
    assert non_empty(found.uses.bins) == octaves(uses)
    if sum(uses):
        top = sorted(uses, reverse=True)[: math.ceil(num_rows * 0.01)]
        assert found.uses.share_of_top == pytest.approx(sum(top) / sum(uses), rel=1e-3)
    else:
        assert math.isnan(found.uses.share_of_top)

    steps = [int(step) for step in records.last_step]
    if steps:
        assert (found.ages.first_step, found.ages.last_step, found.ages.clock) == (min(steps), max(steps), max(steps))
        width = found.ages.resolution
        assert width & (width - 1) == 0 and max(steps) < 2**16 * width and (width == 1 or max(steps) >= 2**15 * width)
        ages = [max(0, max(steps) - (step // width * width + width - 1)) for step in steps]
        assert non_empty(found.ages.bins) == octaves(ages)


def test_ages_are_counted_from_the_clock():
    """Ages count from the given clock, which may lie behind the last use; its default is the last use."""
    records = Records(np.arange(4, dtype=np.uint64), np.ones((4, 1), np.float32), last_step=np.uint32([3, 9, 10, 12]))
    ages = inspection.report([records], clock=11).ages
    assert ages.clock == 11 and non_empty(ages.bins) == {(0, 1): 1, (1, 2): 1, (2, 4): 1, (8, 16): 1}
    assert inspection.report([records]).ages.clock == 12


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_rows_of_other_dtypes(dtype):
    """Norms are taken in float64, where no square of a finite number overflows."""
    records = draw_records(5, 300, dim=7, dtype=dtype)
    found = inspection.report([records])
    assert found.dtype == np.dtype(dtype).name
    check_norms(found.norms, records.rows)


def test_very_large_and_very_small_rows_are_finite():
    """Their squares in float32 would be infinite or zero."""
    rows = np.float32([[3e38, 3e38], [1e-45, 0], [1e-30, 1e-30]])
    found = inspection.report([Records(np.arange(3, dtype=np.uint64), rows)])
    assert found.norms.num_nonfinite == 0 and found.norms.num_zero == 0
    check_norms(found.norms, rows)


@pytest.mark.parametrize("number", [1e300, 1e-200, 5e-324, 1e308])
def test_rows_of_float64_whose_squares_are_not_finite(number):
    rows = np.array([[number, 0, -number], [0, 0, 0], [np.inf, 1, 1], [np.nan, 1, np.inf]])
    found = inspection.report([Records(np.arange(4, dtype=np.uint64), rows)]).norms
    assert (found.num_nonfinite, found.num_zero) == (2, 1)
    assert found.max == pytest.approx(number * math.sqrt(2), rel=1e-12, abs=5e-324)


def test_only_what_every_chunk_has_is_reported():
    """Statistics or state that only some chunks have are left out of the report."""
    whole = draw_records(1, 20)
    part = Records(whole.keys, whole.rows, {"m": whole.state["m"]})
    found = inspection.report([whole, part])
    assert list(found.states) == ["m"] and found.uses is None and found.ages is None
    assert found.num_rows == 40


def test_chunks_of_unlike_tables_are_refused():
    """Chunks with two dims or two dtypes are refused."""
    for other in (draw_records(1, 5, dim=4), draw_records(1, 5, dtype=np.float16)):
        with pytest.raises(ValueError, match=r'table "user": .* wanted one dim and dtype'):
            inspection.report([draw_records(1, 5), other], name="user")


def test_nothing_at_all():
    """A report of no chunk or no row is empty."""
    for chunks in ([], [draw_records(1, 0)]):
        found = inspection.report(chunks, name="user")
        assert found.num_rows == 0 and "0 rows" in str(found)
        assert json.loads(json.dumps(found.to_json(), allow_nan=False))["norms"]["min"] is None


def test_chunks_are_let_go():
    """Inspection takes one pass: no chunk is alive when the next but one is made."""
    seen = []

    def chunks():
        for seed in range(20):
            assert sum(reference() is not None for reference in seen) <= 1
            chunk = draw_records(seed, 50)
            seen.append(weakref.ref(chunk))
            yield chunk

    assert inspection.report(chunks()).num_rows == 1000


def test_text_and_json_tell_the_same():
    """Every printed number is in the JSON."""
    records = draw_records(3, 500, most=1000)
    found = inspection.report([records], name="user")
    text, data = str(found), json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert 'table "user": 500 rows of 3 float32, state m (3), v (1)' in text
    assert f"{found.num_negative:,} negative" in text
    assert f"{found.norms.num_nonfinite}" in text and f"{found.uses.share_of_top:.1%}" in text
    assert data["num_rows"] == 500 and data["norms"]["quantiles"]["0.5"] == found.norms.quantiles[0.5]
    assert sum(octave["num"] for octave in data["uses"]["bins"]) == 500
    longest = max(found.uses.bins, key=lambda octave: octave.num)
    bars = {line.split()[-2]: line.count("#") for line in text.splitlines() if line.endswith("#")}
    assert bars[f"{longest.num:,}"] == 40


def test_a_table_of_a_collection():
    """A trained table is inspected through its records."""
    collection = programs.one_table(optimizer=jaxsok.optim.adagrad(0.1), capacity=64)
    state, _ = programs.learn(collection, collection.init(seed=0), programs.batch(collection, user=np.arange(20)))
    table = collection.export_table(state, "user")
    found = inspection.report([Records(table["keys"], table["rows"], table["state"])], name="user")
    assert found.num_rows == 20 and (found.min_key, found.max_key) == (0, 19)
    check_norms(found.norms, table["rows"])
    check_norms(found.states["accumulator"], table["state"]["accumulator"])


# Pictures ------------------------------------------------------------------------------------------------------------

MAGIC = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.mark.parametrize("end", MAGIC)
def test_reports_are_drawn(tmp_path, end):
    """Tables are drawn with all histograms, with some, and without rows."""
    pytest.importorskip("matplotlib")
    bare = Records(np.arange(3, dtype=np.uint64), np.zeros((3, 2), np.float32))
    name = "a$b^{"  # no formula
    reports = [inspection.report([records], name=name) for records in (draw_records(1, 100), bare, draw_records(1, 0))]
    inspection.draw_reports(reports, tmp_path / f"tables{end}")
    inspection.draw_estimate(jaxsok.memory_estimate([jaxsok.TableSpec("$^{", 4, SGD)]), tmp_path / f"memory{end}")
    for what in ("tables", "memory"):
        assert (tmp_path / f"{what}{end}").read_bytes().startswith(MAGIC[end])


def test_pictures_have_what_was_counted(tmp_path, monkeypatch):
    """The heights of bars are numbers of rows, the lengths are bytes."""
    figure_of = pytest.importorskip("matplotlib.figure").Figure
    figures = []
    monkeypatch.setattr(figure_of, "savefig", lambda figure, path: figures.append(figure))
    found = inspection.report([draw_records(1, 100)], name="user")
    inspection.draw_reports([found], tmp_path / "a.png")
    panels = figures[0].axes
    assert len(panels) == 5 and "user: 100 rows" in panels[0].get_title(loc="left")
    for axes, bins in zip(
        panels,
        (found.norms.bins, found.states["m"].bins, found.states["v"].bins, found.uses.bins, found.ages.bins),
        strict=True,
    ):
        assert [bar.get_height() for bar in axes.patches] == [octave.num for octave in bins]
    estimate = jaxsok.memory_estimate([jaxsok.TableSpec("user", 64, SGD, capacity=2**20)])
    inspection.draw_estimate(estimate, tmp_path / "b.png")
    (axes,) = figures[1].axes
    parts = [size for size in estimate.stores[0].state.values() if size]
    assert sorted(bar.get_width() * 2**20 for bar in axes.patches) == pytest.approx(sorted(parts))
    assert axes.get_xlabel() == "MiB"


def test_pictures_of_caches_have_the_curve(tmp_path, monkeypatch):
    """Each store has a panel with the curve's points, its area and the declared cache, even if no key repeats."""
    figure_of = pytest.importorskip("matplotlib.figure").Figure
    figures = []
    monkeypatch.setattr(figure_of, "savefig", lambda figure, path: figures.append(figure))
    tables = [jaxsok.TableSpec("user", 4, SGD, memory=jaxsok.HostMemory(7)), jaxsok.TableSpec("item", 4, SGD)]
    features = [jaxsok.FeatureSpec("user", "user"), jaxsok.FeatureSpec("item", "item")]
    draw = np.random.default_rng(0)
    batches = [{"user": draw.integers(0, 40, 12), "item": np.arange(12) + 12 * number} for number in range(10)]
    estimates = jaxsok.cache_estimate(tables, features, batches)
    inspection.draw_cache_estimates(estimates, tmp_path / "a.png")
    user, item = figures[0].axes
    curve, declared = user.lines
    np.testing.assert_array_equal(curve.get_ydata(), estimates[0].hit_rates[curve.get_xdata()])
    assert {1, estimates[0].num_keys} <= set(curve.get_xdata()) and set(declared.get_xdata()) == {7}
    (area,) = user.collections
    assert area.get_paths()[0].get_extents().y0 == estimates[0].least_hit_rates[1]
    assert item.get_title(loc="left") == "item" and len(item.lines) == 1


NUMBERS = np.random.default_rng(0)
RANGES = {
    "one value": np.full(10, 0.25),
    "a quarter": NUMBERS.uniform(0.9, 1.1, 100),
    "a third": NUMBERS.uniform(0.1, 0.3, 1000),
    "small and a few": NUMBERS.uniform(1.1e-7, 1.9e-7, 1000),
    "small": NUMBERS.uniform(1.1e-7, 3e-7, 1000),
    "one decade and a half": 10 ** NUMBERS.uniform(-0.7, 0.8, 1000),
    "two decades": 10 ** NUMBERS.uniform(-1, 1, 1000),
    "eight decades": 10 ** NUMBERS.uniform(-6, 2, 1000),
}


@pytest.mark.parametrize("name", RANGES)
def test_ticks_of_a_picture_do_not_overlap(tmp_path, name):
    """Over any range, at least two ticks have labels, and no label overlaps another."""
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = pictures._figure((3 * 3.4, 2.6))  # the size for a table with three panels
    magnitudes = counts.Magnitudes()
    magnitudes.add(RANGES[name])
    all_axes = figure.subplots(1, 3)
    for axes in all_axes:
        pictures._bars(axes, magnitudes.bins(), "black")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    low, high = all_axes[0].get_xlim()
    ticks = [*all_axes[0].xaxis.get_major_ticks(), *all_axes[0].xaxis.get_minor_ticks()]
    shown = [tick.label1 for tick in ticks if low <= tick.get_loc() <= high and tick.label1.get_text()]
    boxes = sorted((label.get_window_extent(canvas.get_renderer()) for label in shown), key=lambda box: box.x0)
    assert len(boxes) >= 2
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


def test_norms_as_large_as_float64_has_them(tmp_path):
    rows = np.array([[1e308], [1e-3], [2.0]])
    found = inspection.report([Records(np.arange(3, dtype=np.uint64), rows)], name="large")
    assert sum(each.num for each in found.norms.bins) == 3 and found.norms.bins[-1].high == sys.float_info.max
    json.dumps(found.to_json(), allow_nan=False)


def test_without_matplotlib_a_picture_is_refused(tmp_path, monkeypatch):
    """The error says what to install."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        inspection.draw_reports([inspection.report([draw_records(1, 5)])], tmp_path / "a.png")


# Kinds of files ------------------------------------------------------------------------------------------------------


def write_hps(folder, records):
    """Writes records as HugeCTR's parameter server lays them out."""
    folder.mkdir(parents=True)
    records.keys.astype("<u8").tofile(folder / "key")
    records.rows.astype("<f4").tofile(folder / "emb_vector")


def write_sok(folder, table, records, name=""):
    """Writes records as SparseOperationKit lays them out, with names in the headers or without."""
    folder.mkdir(parents=True, exist_ok=True)

    def put(end, holds, slot, dtype, array):
        header = (
            name.rjust(256).encode() + struct.pack(">I", holds) + slot.rjust(32).encode() + struct.pack(">I", dtype)
        )
        assert len(header) == 296
        (folder / f"{table}-{end}").write_bytes(header + array.tobytes())

    put("key", 0, "", 1, records.keys.view(np.int64))
    put("weight", 1, "", 5, records.rows)
    for slot, array in records.state.items():
        put(f"Adam-{slot}", 2, slot, 5, array)


def plain(num_rows=40, **fields):
    """Returns finite records."""
    keys = np.arange(num_rows, dtype=np.uint64) * np.uint64(3) + np.uint64(5)
    rows = np.random.default_rng(0).normal(size=(num_rows, 4)).astype(np.float32)
    return Records(keys, rows, **fields)


def kind_of(path):
    """Returns the entry of the registry that matches a path; at most one does."""
    found = [opened.kind for _, open_kind in KINDS if (opened := open_kind(path)) is not None]
    assert len(found) <= 1
    return found[0] if found else None


def test_kinds_are_found_by_content(tmp_path):
    """Each file is of one kind, whatever its suffix."""
    write_hps(tmp_path / "hps", plain())
    write_sok(tmp_path / "sok", "user_0", plain())
    np.savez(tmp_path / "npz", keys=plain().keys)
    (tmp_path / "parquet.txt").write_bytes(b"PAR1...")
    collection = jaxsok.Collection([jaxsok.TableSpec("user", 4, jaxsok.optim.sgd(0.1), capacity=16)], [])
    export_full(tmp_path / "export", collection, collection.init())
    shutil.copytree(tmp_path / "export", tmp_path / "root" / "3" / "tables")
    wanted = {
        "hps": "HPS",
        "sok": "SOK",
        "npz.npz": "npz",
        "parquet.txt": "Parquet",
        "export": "jaxsok",
        "root": "jaxsok",
        "root/3": "jaxsok",
        "root/3/tables": "jaxsok",
    }
    assert {name: kind_of(tmp_path / name) for name in wanted} == wanted


@pytest.mark.parametrize("name", ["nothing", "empty", "text", "folder", "keys alone", "other manifest"])
def test_what_is_of_no_kind_is_refused(tmp_path, name):
    """The message says what was found and lists the known kinds."""
    path = tmp_path / name
    if name == "text":
        path.write_text("hello, world")
    elif name != "nothing":
        path.mkdir()
    if name == "folder":
        (path / "notes.md").write_text("x")
    if name == "keys alone":
        (path / "key").write_bytes(b"12345678")
        (path / "user-key").write_bytes(b"12345678")
    if name == "other manifest":
        (path / "manifest.json").write_text('{"format": "something else"}')
    with pytest.raises((FileNotFoundError, ValueError)) as error:
        inspection.inspect(path)
    got = {"nothing": "no such file", "empty": "empty folder", "text": "b'hello, w'", "folder": "notes.md"}
    for part in (str(path), got.get(name, "a folder of"), "HPS", "SOK", "Parquet", ".npz", "jaxsok"):
        assert part in str(error.value)
    assert kind_of(path) is None


# Declarations from files ---------------------------------------------------------------------------------------------

PYTHON = """
import jaxsok
from jaxsok import optim, policies

limits = optim.Limits(clip_row_norm=1.0, adaptive_clip=optim.AdaptiveClip(ratio=0.5))
tables = [
    jaxsok.TableSpec(
        "user", 64, optim.adam(0.001, limits=limits), capacity=10_000, placement=jaxsok.on(1),
        admission=policies.AdmitByBloom(num_sightings=3, num_keys=50_000),
    ),
    jaxsok.TableSpec(
        "item", 32, optim.rowwise_adagrad(0.01), dtype="bfloat16", placement=jaxsok.REPLICATED,
        initializer=jaxsok.initializers.normal(stddev=0.1), eviction=policies.LeastRecentlyUsed(),
    ),
    jaxsok.TableSpec("tag", 32, optim.sgd(0.01), statistics=True, memory=jaxsok.HostMemory(0.25)),
]
features = [jaxsok.FeatureSpec("user", table="user", max_keys=128)]
exchange = jaxsok.ExchangeSpec(rows="bfloat16")
"""


def test_a_program_declares(tmp_path):
    (tmp_path / "tables.py").write_text(PYTHON)
    names = {"__name__": "tables"}
    exec(PYTHON, names)
    found = inspection.read_spec(tmp_path / "tables.py")
    assert found == inspection.Declared(tuple(names["tables"]), tuple(names["features"]), names["exchange"])


def test_a_collection_declares_as_well(tmp_path):
    """A collection declares its features and the devices of its mesh."""
    source = "import jax, jaxsok, numpy as np\n" + PYTHON.replace("jaxsok.on(1)", "jaxsok.SHARDED").replace(
        "exchange = ", "wire = "
    )
    source += (
        "devices, auto = np.array(jax.devices()[:2]), (jax.sharding.AxisType.Auto,)\n"
        'mesh = jax.sharding.Mesh(devices, ("data",), axis_types=auto)\n'
        'collection = jaxsok.Collection(tables, features, mesh=mesh, axis="data", exchange=wire)\n'
    )
    (tmp_path / "model.py").write_text(source)
    found = inspection.read_spec(tmp_path / "model.py")
    assert found.num_shards == min(2, len(jax.devices())) and found.exchange.rows == "bfloat16"
    assert [table.name for table in found.tables] == ["user", "item", "tag"] and len(found.features) == 1


@pytest.mark.parametrize(
    "source, message",
    [
        ("x = 1", "defines neither"),
        ("tables = [1]", r"tables: got \[1\], wanted a list of TableSpecs"),
        ("tables = []\nfeatures = 3", "features: got 3"),
        ("tables = []\nexchange = 'bfloat16'", "exchange: got 'bfloat16'"),
        ("x = 1\n\nundefined", "line 3: NameError: .*undefined"),
        ("x = (", "line 1: SyntaxError"),
    ],
)
def test_wrong_programs_name_file_and_line(tmp_path, source, message):
    """Errors in a Python file name the file and its line."""
    path = tmp_path / "tables.py"
    path.write_text(source)
    with pytest.raises(ValueError, match=rf"^estimate: {re.escape(str(path))}.*{message}"):
        inspection.read_spec(path)


def test_other_files_declare_nothing(tmp_path):
    """Missing files, unknown suffixes and text that is no program are refused."""
    with pytest.raises(FileNotFoundError, match="no such file"):
        inspection.read_spec(tmp_path / "tables.py")
    for name, content, message in (
        ("tables.toml", b"[[tables]]", r"named \*\.toml, wanted \*\.py: a program that defines `tables`, a list of"),
        ("tables", b"", r"named \*, wanted \*\.py"),
        ("bytes.py", b"\xff", "SyntaxError"),
        ("deep.py", b"a = " + b"[" * 100_000, "SyntaxError|MemoryError"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            inspection.read_spec(tmp_path / name)


# Commands ------------------------------------------------------------------------------------------------------------

TABLE = """
import jaxsok

tables = [jaxsok.TableSpec("user", 4, jaxsok.optim.sgd(0.1))]
"""
FEATURES = 'features = [jaxsok.FeatureSpec("clicked", table="user")]'


def test_estimate_prints_memory_estimate(tmp_path, capsys):
    """The command passes on every option."""
    (tmp_path / "tables.py").write_text(PYTHON)
    declared = inspection.read_spec(tmp_path / "tables.py")
    options = ["--num-rows", "item=1e6", "--num-rows", "30000", "--shards", "4", "--num-samples", "64", "--steps", "2"]
    assert command_line.main(["estimate", str(tmp_path / "tables.py"), *options, "--device-bytes", "80GiB"]) == 0
    expected = jaxsok.memory_estimate(
        declared.tables,
        declared.features,
        num_shards=4,
        num_rows={"user": 30_000, "item": 1_000_000, "tag": 30_000},
        num_samples=64,
        exchange=declared.exchange,
        steps=2,
        device_bytes=80 * 2**30,
    )
    assert capsys.readouterr().out == f"{expected}\n"


def test_estimate_of_the_file_alone(tmp_path, capsys):
    """The file alone means one device and the declared capacities, and a picture can be drawn."""
    pytest.importorskip("matplotlib")
    (tmp_path / "tables.py").write_text(TABLE)
    picture = tmp_path / "memory.png"
    assert command_line.main(["estimate", str(tmp_path / "tables.py"), "--picture", str(picture)]) == 0
    expected = jaxsok.memory_estimate([jaxsok.TableSpec("user", 4, SGD)])
    assert capsys.readouterr().out == f"{expected}\n"
    assert picture.read_bytes().startswith(MAGIC[".png"])


def test_estimate_of_a_sample(tmp_path, capsys):
    """A batch covers all devices; leftover samples at the end are no batch."""
    pytest.importorskip("matplotlib")
    path, log, picture = tmp_path / "tables.py", tmp_path / "log.npz", tmp_path / "caches.svg"
    path.write_text(TABLE.replace("(0.1)", "(0.1), memory=jaxsok.HostMemory(20)") + FEATURES)
    keys = np.random.default_rng(0).integers(0, 50, (67, 3))
    np.savez(log, clicked=keys, other=np.zeros(3))
    options = ["--num-samples", "8", "--shards", "2", "--sample", str(log), "--cache-picture", str(picture)]
    assert command_line.main(["estimate", str(path), *options]) == 0
    declared = inspection.read_spec(path)
    batches = [{"clicked": keys[begin : begin + 16]} for begin in (0, 16, 32, 48)]
    (expected,) = jaxsok.cache_estimate(declared.tables, declared.features, batches, num_shards=2)
    assert expected.num_batches == 4 and expected.device_rows == 20
    assert capsys.readouterr().out.endswith(f"\n\n{expected}\n")
    assert picture.read_bytes().startswith(MAGIC[".svg"])


def _damage():
    """Returns a compressed archive with a damaged stream."""
    file = io.BytesIO()
    np.savez_compressed(file, clicked=np.random.default_rng(0).integers(0, 2**40, 999))
    data = bytearray(file.getvalue())
    data[100:140] = bytes(40)
    return bytes(data)


DAMAGED = _damage()


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "No such file"),
        (b"hello", "wanted a .npz file with the arrays"),
        (b"PK\x03\x04", "wanted a .npz file with the arrays"),
        (DAMAGED, "wanted a .npz file with the arrays"),
        ({"user": np.arange(9)}, "clicked is not a file in the archive"),
        ({"clicked": np.arange(3)}, "got arrays of [3] samples, wanted at least 4"),
        ({"clicked": np.int64(3)}, "got arrays of [0] samples, wanted at least 4"),
        ({"clicked": np.ones(9)}, 'cache_estimate: batches[0]: feature "clicked"'),
    ],
)
def test_wrong_samples_are_refused(tmp_path, capsys, content, message):
    """The command exits with status 2 and one line."""
    path, log = tmp_path / "tables.py", tmp_path / "log.npz"
    path.write_text(TABLE + FEATURES)
    if isinstance(content, bytes):
        log.write_bytes(content)
    elif content is not None:
        np.savez(log, **content)
    assert command_line.main(["estimate", str(path), "--num-samples", "4", "--sample", str(log)]) == 2
    out, error = capsys.readouterr()
    assert out == "" and message in error and len(error.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--sample", "log.npz"], "--sample: got no --num-samples"),
        (["--cache-picture", "caches.png"], "--cache-picture: got no --sample"),
        (["--cache-picture", "caches.docx"], "wanted a file .png"),
        (["--num-rows", "usr=3"], 'got table "usr", wanted one of'),
        (["--num-rows", "many"], "--num-rows: got 'many'"),
        (["--num-rows", "1.5"], "--num-rows: got '1.5'"),
        (["--device-bytes", "80 apples"], "--device-bytes: got '80 apples'"),
        (["--device-bytes", "1..5e3"], "--device-bytes"),
        (["--picture", "memory.docx"], "wanted a file .png"),
        (["--picture", "no/such/folder/memory.png"], "wanted a file in a folder that exists"),
        (["--shards", "0"], "num_shards"),
        (["--steps", "0"], "steps"),
    ],
)
def test_wrong_options_are_refused(tmp_path, capsys, arguments, message):
    """The command exits with status 2 and one line, without a traceback."""
    (tmp_path / "tables.py").write_text(TABLE)
    assert command_line.main(["estimate", str(tmp_path / "tables.py"), *arguments]) == 2
    out, error = capsys.readouterr()
    assert out == "" and message in error and len(error.splitlines()) == 1


def test_numbers_with_units():
    """Units are powers of 1000 and of 1024."""
    for text, number in {
        "0": 0,
        "1000": 1000,
        "1e3": 1000,
        "141e9": 141 * 10**9,
        "80GiB": 80 * 2**30,
        "80GB": 80 * 10**9,
        "1.5Ki": 1536,
        "2M": 2_000_000,
        "1 TiB": 2**40,
    }.items():
        assert command_line._number("--device-bytes", text) == number


def test_unknown_arguments_are_refused(capsys):
    """The parser refuses them, except for the benchmarks, which have a parser of their own."""
    with pytest.raises(SystemExit):
        command_line.main(["estimate", "tables.py", "--nonsense"])
    assert "--nonsense" in capsys.readouterr().err


def test_inspect_of_nothing(tmp_path, capsys):
    """The command prints the message and exits with status 2."""
    assert command_line.main(["inspect", str(tmp_path / "gone")]) == 2
    assert "no such file or folder" in capsys.readouterr().err


def test_commands_start_outside_the_checkout(tmp_path):
    """The command runs as a process of its own."""
    (tmp_path / "tables.py").write_text(TABLE)
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-m", "jaxsok", "estimate", "tables.py", "--num-rows", "1e6"]
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert "1,000,000" in found.stdout and "bytes a key" in found.stdout
