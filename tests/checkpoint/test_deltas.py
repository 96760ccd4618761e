"""Exports: a full export and its deltas, in order and only in order, give the current table without removed rows."""

import base64
import copy
import functools
import itertools
import json
import math
import operator
import pathlib
import shutil
import tempfile
import threading
import tracemalloc
import zlib

import checkpoint_cases as cases
import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from checkpoint_cases import assert_same, collection_of, content, tables_of, train, train_step, waiting
from hypothesis import stateful

import jaxsok
from jaxsok import checkpoint, inspection, lives, optim, policies, table_export
from jaxsok.checkpoint import chain as chains, keys_by_row, manifest, restore, save, snapshot
from jaxsok.checkpoint.saved import Source
from jaxsok.interchange import columns
from jaxsok.serving import folders

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="eight devices are made of a CPU")


def two(num_devices=None, **options):
    """Returns a collection with two tables in one store."""
    options = {"statistics": True, "capacity": 64, **options}
    return collection_of([jaxsok.TableSpec(name, 2, cases.ADAM, **options) for name in ("user", "item")], num_devices)


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """Returns a full export and two deltas by four devices, the records of the state at each, and the collection."""
    folder = tmp_path_factory.mktemp("chain")
    collection = collection_of(tables_of(), 4)
    state = train(collection, collection.init(seed=9), 2)
    held, paths = [], [folder / "full", folder / "first", folder / "second"]
    exported = [checkpoint.export_full(paths[0], collection, state, compression="lz4")]
    held.append((content(collection, state), waiting(collection, state, "ad")))
    for number, path in enumerate(paths[1:]):
        state = train(collection, state, 1)
        keys = content(collection, state)["user.keys"]
        state, _ = collection.erase(state, "user", keys[number::7])
        if number == 1:
            state, _ = collection.clear(state, "item")
            state = train(collection, state, 1)
        exported.append(checkpoint.export_delta(path, collection, state, paths[number]))
        held.append((content(collection, state), waiting(collection, state, "ad")))
    return paths, exported, held, state


@pytest.mark.parametrize("num_devices", [3, None])
def test_full_and_deltas_are_the_table(chain, num_devices):
    """Rows, optimizer state, statistics, waiting keys and the step are equal on another mesh, at another capacity."""
    paths, exported, held, state = chain
    other = collection_of(tables_of(capacity=30), num_devices)
    for number in range(3):
        again = checkpoint.load(paths[: number + 1], other)
        assert_same(content(other, again), held[number][0])
        assert waiting(other, again, "ad") == held[number][1]
        assert int(again.step) == exported[number].step
    np.testing.assert_array_equal(np.asarray(again.seed), np.asarray(state.seed))


def test_the_links_of_a_delta_are_found_beside_it(chain):
    paths, _, held, _ = chain
    other = collection_of(tables_of(), 2)
    assert_same(content(other, checkpoint.load(paths[2], other)), held[2][0])


def test_deltas_are_applied_one_by_one(chain):
    """A serving state takes a delta by the path of the export that it holds or by its number; old plans are stale."""
    paths, exported, held, _ = chain
    other = collection_of(tables_of(capacity=60))
    state = checkpoint.load(paths[0], other)
    generation = int(state.stores[0].generation)
    state = checkpoint.apply_delta(paths[1], other, state, after=paths[0])
    assert_same(content(other, state), held[1][0])
    state = checkpoint.apply_delta(paths[2], other, state, after=exported[1].uuid)
    assert_same(content(other, state), held[2][0])
    assert int(state.stores[0].generation) > generation


def test_a_delta_is_small(chain):
    """It leaves out unchanged rows and names removed rows by their keys."""
    _, exported, held, _ = chain
    first, was = held[1][0], held[0][0]
    changed = first["user.statistics"][:, 0] >= 2
    assert exported[1].num_rows["user"] == changed.sum() < changed.size
    gone = np.setdiff1d(was["user.keys"], first["user.keys"])
    assert exported[1].num_tombstones["user"] == gone.size > 0
    # The second delta does not repeat those of the first.
    known = np.union1d(was["user.keys"], first["user.keys"])
    again = np.setdiff1d(
        np.setdiff1d(known, held[2][0]["user.keys"]), np.setdiff1d(was["user.keys"], first["user.keys"])
    )
    assert exported[2].num_tombstones["user"] == again.size


@pytest.mark.parametrize("num_devices", [None, 2])
def test_keys_are_searched_for_only_after_rows_went(tmp_path, monkeypatch, num_devices):
    """A delta costs what changed; after an erase and after a restore, the keys of the chain are looked up."""
    searched, find_keys = [], chains.find_keys

    def find(*arguments):
        searched.append(arguments)
        return find_keys(*arguments)

    monkeypatch.setattr(chains, "find_keys", find)
    collection = two(num_devices)
    state = train(collection, collection.init(seed=1), 1)
    checkpoint.export_full(tmp_path / "0", collection, state)

    def delta(number, is_searched):
        checkpoint.export_delta(tmp_path / f"{number}", collection, state, tmp_path / f"{number - 1}")
        assert bool(searched) == is_searched
        searched.clear()
        again = checkpoint.load(tmp_path / f"{number}", collection)
        assert_same(content(collection, again), content(collection, state))
        return again

    for number in (1, 2):
        state = train(collection, state, 1)
        delta(number, is_searched=False)
    state, _ = collection.erase(state, "item", content(collection, state)["item.keys"][::2])
    state = delta(3, is_searched=True)  # the state is a restored state
    state = train(collection, state, 1)
    delta(4, is_searched=True)
    state = train(collection, state, 1)
    delta(5, is_searched=False)


def test_deltas_in_another_order_are_refused(chain):
    paths, exported, _, _ = chain
    other = collection_of(tables_of(), 2)
    for links, message in (
        ([paths[0], paths[2]], rf"which rests on {exported[1].uuid} .*, after .*, which is {exported[0].uuid}"),
        ([paths[0], paths[1], paths[1]], "apply deltas in order, and none of them twice"),
        ([paths[1], paths[2]], r'got the delta ".*first" first, wanted the full export it rests on'),
        ([paths[0], paths[0]], "a full export, wanted a delta after"),
        ([], "got no folders"),
    ):
        with pytest.raises(ValueError, match=message):
            checkpoint.load(links, other)
    with pytest.raises(TypeError, match="load: path: got Collection, wanted a path"):
        checkpoint.load(other, paths[0])
    state = other.init()
    with pytest.raises(ValueError, match="apply deltas in order"):
        checkpoint.apply_delta(paths[2], other, state, after=paths[0])
    assert other.num_rows(state)["user"] == 0


def test_a_link_that_is_lost_is_named(chain, tmp_path):
    paths, *_ = chain
    shutil.copytree(paths[1], tmp_path / "alone")
    with pytest.raises(ValueError, match=r'got the delta ".*alone" alone, whose base ".*full" is not there; give all'):
        checkpoint.load(tmp_path / "alone", collection_of(tables_of(), 2))


@pytest.mark.parametrize("name", ["export_delta", "begin_export_delta"])
def test_what_is_no_base_is_refused_by_that_name(chain, tmp_path, name):
    """Nothing is written."""
    collection = collection_of(tables_of(), 4)
    state = collection.init()
    for base, kind, message in (
        (None, TypeError, "base: got None, wanted a folder, or what an export returned; export_full begins a chain"),
        (7, TypeError, "base: got int, wanted a path.* of a future, its result"),
        ([], ValueError, "base: got no folders"),
        (tmp_path / "nowhere", FileNotFoundError, 'base: got ".*nowhere", which has no manifest.json'),
        (chain[0][1:], ValueError, 'base: got the delta ".*first" first'),
    ):
        with pytest.raises(kind, match=f"^{name}: {message}"):
            getattr(checkpoint, name)(tmp_path / "written", collection, state, base)
    assert not [*tmp_path.iterdir()]


def test_a_mistyped_path_of_what_a_state_holds_is_no_number_of_an_export(chain, tmp_path):
    paths, *_ = chain
    collection = collection_of(tables_of(), 2)
    state = checkpoint.load(paths[0], collection)
    for after in (str(tmp_path / "ful"), tmp_path / "ful"):
        with pytest.raises(FileNotFoundError, match=r'apply_delta: after: got ".*ful", which has no manifest\.json'):
            checkpoint.apply_delta(paths[1], collection, state, after=after)


def reseal(folder, **values):
    """Writes other values into a manifest, with a valid checksum."""
    path = folder / "manifest.json"
    whole = {**json.loads(path.read_text()), **values}
    whole.pop("checksum")
    path.write_text(manifest._seal(whole))
    return whole["uuid"]


def test_bases_that_lead_in_a_circle_or_elsewhere_are_refused(chain, tmp_path, monkeypatch):
    """Renamed folders and edited manifests are refused."""
    paths, *_ = chain
    collection = collection_of(tables_of(), 2)
    readers = (
        lambda path: checkpoint.load(path, collection),
        lambda path: folders.open_table(path, table="user", dim=cases.DIM),
    )

    def expect_refusal(path, message):
        for read in readers:
            with pytest.raises(ValueError, match=message):
                read(path)

    for path in paths:
        shutil.copytree(path, tmp_path / path.name)
    full, first, second = (tmp_path / path.name for path in paths)
    # "first" is named "full" now, and so is its base: the folder itself.
    full.rename(tmp_path / "elsewhere")
    first.rename(full)
    expect_refusal(full, r'got the delta ".*full", which rests on .* "/.*full", where it was, .*: a folder was renamed')
    assert checkpoint.load([tmp_path / "elsewhere", full, second], collection).step == 5
    full.rename(first)
    (tmp_path / "elsewhere").rename(full)
    # Two deltas are each other's base; one delta is its own base.
    ours = reseal(second)
    theirs = reseal(first, base=ours, base_path="second")
    expect_refusal(
        second, r'got ".*second", whose bases lead in a circle or through more than 10000 deltas, .* wanted a full'
    )
    reseal(first, base=theirs, base_path="first")
    expect_refusal(first, r'got ".*first", whose bases lead in a circle')
    reseal(first, base=theirs, base_path="/etc")
    expect_refusal(first, r'file ".*first/manifest.json", base_path: got \'/etc\', wanted a relative path; ')
    monkeypatch.setattr("jaxsok.checkpoint.chain.MOST_LINKS", 2)
    with pytest.raises(ValueError, match="through more than 2 deltas"):
        checkpoint.load(paths[2], collection)


# Manifests that no export wrote ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Returns a full export, a delta whose manifest uses every field, and the collection."""
    folder = tmp_path_factory.mktemp("small")
    options = {"statistics": True, "capacity": 64}
    collection = collection_of(
        [
            jaxsok.TableSpec("user", 2, cases.ADAM, admission=policies.AdmitByBloom(2, num_keys=50), **options),
            jaxsok.TableSpec("item", 2, optim.lift(optax.adam(0.1)), admission=policies.AdmitByCount(2), **options),
        ]
    )
    state = train(collection, collection.init(seed=1), 2)
    checkpoint.export_full(folder / "full", collection, state)
    state, _ = collection.erase(state, "item", content(collection, state)["item.keys"][:3])
    checkpoint.export_delta(folder / "delta", collection, train(collection, state, 1), folder / "full")
    return folder, collection


def read_all(folder):
    """Reads everything that a folder of saved tables describes."""
    source = Source.of("walked", folder)
    names = list(source.manifest["tables"])
    source.verify(names)
    for name in names:
        for _ in itertools.chain(source.records(name), source.waiting_keys(name)):
            pass
        _, entry = source.store_of(name)
        for item in entry["globals"]:
            manifest.array_from_json(item)
        if source.manifest["bloom"] and sum(size for _, size in entry["bloom_segments"]):
            source.bloom(name, 0)
    inspection.inspect(folder)


def places_in(value, path=()):
    """Yields the paths of all values in JSON."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield (*path, name)
        yield from places_in(item, (*path, name))


BOMB = base64.b64encode(zlib.compress(bytes(1 << 28))).decode()  # 340 KiB of text, 256 MiB of zeros
JUNK = [
    *(None, True, -1, 0, 1, 2**31, 2**32, 2**62, 2**63, 2**64, 2**200, 1.5, math.nan, math.inf),
    *(
        "",
        "..",
        "../full",
        "/etc/passwd",
        "a/b",
        "a\\b",
        "nul\0",
        "\ud800",
        "user",
        "full",
        "delta",
        BOMB,
        "A" * (1 << 20),
    ),
    *([], [[]], [0, 0], [-1, 2**64], {}, {"": 0}, {"../../x": {}}, [None] * 1000),
]


@st.composite
def changes(draw):
    """Draws a change of a manifest: at some path a value is removed, repeated or replaced."""
    kind = draw(st.sampled_from(["gone", "twice", "other", "moved"]))
    return draw(st.integers(0, 10**6)), kind, draw(st.sampled_from(JUNK) | st.integers(-3, 5000))


def change_manifest(whole, change):
    """Returns a manifest with a change."""
    place, kind, value = change
    whole = copy.deepcopy(whole)
    places = list(places_in(whole))
    *path, name = places[place % len(places)]
    above = functools.reduce(operator.getitem, path, whole)
    if kind == "gone":
        del above[name]
    elif kind == "twice" and isinstance(above, list):
        above.insert(name, above[name])
    elif kind == "moved" and isinstance(above[name], int) and not isinstance(above[name], bool):
        above[name] += value if isinstance(value, int) else 1
    else:
        above[name] = value
    return whole


def read_or_refused(folder, read):
    """Returns whether a folder is read; otherwise the error must name it, and reading must take little memory."""
    tracemalloc.start()
    try:
        read()
        return True
    except (ValueError, FileNotFoundError) as error:
        assert str(folder) in str(error), error
        assert "got" in str(error), error
        return False
    finally:
        assert tracemalloc.get_traced_memory()[1] < 1 << 26
        tracemalloc.stop()


def link_copy(path):
    """Copies a folder as links to its files; only the manifest is a separate file."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="changed"))
    for file in path.iterdir():
        if file.name == "manifest.json":
            shutil.copy(file, folder)
        else:
            (folder / file.name).symlink_to(file)
    return folder


@pytest.mark.parametrize("kind", ["full", "delta"])
@hypothesis.given(some=st.lists(changes(), min_size=1, max_size=3))
@hypothesis.settings(max_examples=75)
def test_manifests_with_other_values_are_read_or_refused(small, kind, some):
    """Although the checksum is valid, every error names the file and the expected value."""
    folder = link_copy(small[0] / kind)
    try:
        whole = json.loads((folder / "manifest.json").read_text())
        whole.pop("checksum")
        for change in some:
            whole = change_manifest(whole, change)
        (folder / "manifest.json").write_text(manifest._seal(whole))
        read_or_refused(folder, lambda: read_all(folder))
    finally:
        shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "delta"])
@hypothesis.given(change=changes())
@hypothesis.settings(max_examples=1000)
def test_manifests_with_other_values_are_loaded_or_refused(small, kind, change):
    """Loading into a state refuses the same manifests."""
    parent, collection = small
    folder = link_copy(parent / kind)
    try:
        whole = json.loads((folder / "manifest.json").read_text())
        whole.pop("checksum")
        (folder / "manifest.json").write_text(manifest._seal(change_manifest(whole, change)))
        path = [parent / "full", folder] if kind == "delta" else folder
        try:
            checkpoint.load(path, collection)
        except (ValueError, FileNotFoundError) as error:
            assert "got" in str(error), error
    finally:
        shutil.rmtree(folder)


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=100)
def test_manifests_with_other_bytes_are_refused(small, data):
    folder = link_copy(small[0] / "delta")
    try:
        path = folder / "manifest.json"
        whole = path.read_bytes()
        begin = data.draw(st.integers(0, len(whole)))
        piece = data.draw(st.binary(max_size=20))
        path.write_bytes(whole[:begin] + piece + whole[begin + data.draw(st.sampled_from([0, 1, len(piece), 64])) :])
        if read_or_refused(folder, lambda: read_all(folder)):
            assert json.loads(path.read_bytes()) == json.loads(whole)
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 200_000, r"maximum recursion depth|nested"),
        (b'{"checksum": 1, "a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", r"recursion|nested"),
        (b'{"checksum": ' + b"1" * 5000 + b"}", r"got Exceeds the limit"),
        (b"[1, 2]", "got a list in place of an object"),
        (b"\xff\xfe", "got no text"),
        (b"{}", "got checksum"),
        (b"null", "got a NoneType in place of an object"),
        (b"", "got Expecting value"),
    ],
)
def test_what_is_no_manifest_is_refused(tmp_path, content, message):
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(checkpoint.CorruptFileError, match=rf'load: file ".*manifest\.json", byte \d+: .*({message})'):
        checkpoint.load(tmp_path, two())


def test_a_manifest_beyond_any_size_is_neither_written_nor_read(tmp_path, monkeypatch):
    collection = two()
    state = train(collection, collection.init(seed=1), 1)
    monkeypatch.setattr("jaxsok.manifests.MOST_BYTES", 1000)
    (tmp_path / "manifest.json").write_bytes(b" " * 1001)
    with pytest.raises(checkpoint.CorruptFileError, match="byte 1000: got 1001 bytes, more than any manifest has"):
        checkpoint.load(tmp_path, collection)
    with pytest.raises(ValueError, match=r"piece_bytes: got a manifest of \d+ bytes, wanted at most 1000: .* larger"):
        checkpoint.export_full(tmp_path / "full", collection, state)
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize("kind", ["files", "tombstones"])
def test_a_damaged_delta_changes_nothing(chain, tmp_path, kind):
    paths, _, held, _ = chain
    shutil.copytree(paths[1], tmp_path / "damaged")
    entry = json.loads((tmp_path / "damaged" / "manifest.json").read_text())["tables"]["user"][kind][0]
    path, byte = tmp_path / "damaged" / entry["name"], entry["batches"][0][0]
    data = bytearray(path.read_bytes())
    data[byte + entry["batches"][0][1] - 1] ^= 1
    path.write_bytes(data)
    other = collection_of(tables_of(), 2)
    state = checkpoint.load(paths[0], other)
    with pytest.raises(checkpoint.CorruptFileError, match=f'apply_delta: file ".*{entry["name"]}", byte {byte}: '):
        checkpoint.apply_delta(tmp_path / "damaged", other, state, after=paths[0])
    with pytest.raises(checkpoint.CorruptFileError, match=f"byte {byte}: "):
        checkpoint.load([paths[0], tmp_path / "damaged"], other, state=state)
    assert_same(content(other, state), held[0][0])


@pytest.mark.parametrize("kind", ["load", "apply_delta"])
def test_what_fails_in_a_delta_leaves_a_state(chain, monkeypatch, kind):
    """The state holds the rows of the base and those of the delta that came before the error."""
    paths, _, held, _ = chain
    other = collection_of(tables_of(), 2)
    state = checkpoint.load(paths[0], other) if kind == "apply_delta" else other.init(seed=1)
    with monkeypatch.context() as patched:
        place = restore.place
        fails = lambda source, *args: place(source, *args) if source.folder == paths[0] else 1 / 0  # noqa: E731
        patched.setattr(restore, "place", fails)
        with pytest.raises(ZeroDivisionError) as caught:
            if kind == "load":
                checkpoint.load(paths[1], other, state=state)
            else:
                checkpoint.apply_delta(paths[1], other, state, after=paths[0])
    assert "the `state` attribute of this error" in caught.value.__notes__[0]
    again = content(other, caught.value.state)
    assert set(again["user.keys"].tolist()) == set(held[0][0]["user.keys"]) & set(held[1][0]["user.keys"])
    state = checkpoint.load(paths[1], other, state=caught.value.state)
    assert_same(content(other, state), held[1][0], names=["user.keys", "user.rows", "item.keys", "item.rows"])


def declare_capped(num_devices=None):
    """Returns a collection whose table is full and evicts."""
    options = {"capacity": 64, "max_capacity": 64, "eviction": policies.LeastRecentlyUsed(), "statistics": True}
    return collection_of([jaxsok.TableSpec("item", 2, cases.ADAM, **options)], num_devices)


def run_step(collection, state, keys):
    """Runs a step on some keys, after making room for them."""
    features = collection.batch({"item": np.asarray(keys, np.uint64)}).features
    state = collection.grow(state, features)
    return train_step(collection)(state, features)[0]


def test_a_full_table_that_evicts(tmp_path):
    """Removed rows leave first, so the delta of a table that stays at its cap has room."""
    collection = declare_capped()
    state = collection.init(seed=0)
    for keys in (np.arange(20), np.arange(20, 40), np.arange(40, 60)):
        state = run_step(collection, state, keys)
    checkpoint.export_full(tmp_path / "full", collection, state)
    for start in range(100, 200, 10):
        state = run_step(collection, state, np.arange(start, start + 10))
    delta = checkpoint.export_delta(tmp_path / "delta", collection, state, tmp_path / "full")
    assert delta.num_tombstones["item"] + delta.num_rows["item"] > 64
    want = content(collection, state)
    assert_same(content(collection, checkpoint.load([tmp_path / "full", tmp_path / "delta"], collection)), want)
    served = checkpoint.load(tmp_path / "full", collection)
    served = checkpoint.apply_delta(tmp_path / "delta", collection, served, after=tmp_path / "full")
    assert_same(content(collection, served), want)


def test_a_full_table_that_evicts_on_fewer_devices(tmp_path, caplog):
    """Eight shards hold more rows than one may, since hashes are uneven; the next step evicts down to its bound."""
    eight, fewer = declare_capped(8), declare_capped()
    state = eight.init(seed=0)
    for start in range(0, 96, 8):
        state = run_step(eight, state, np.arange(start, start + 8))
    assert eight.num_rows(state) == {"item": 96}
    checkpoint.export_full(tmp_path / "full", eight, state)
    state = run_step(eight, state, np.arange(96, 104))
    checkpoint.export_delta(tmp_path / "delta", eight, state, tmp_path / "full")
    loaded = checkpoint.load(tmp_path / "delta", fewer)
    assert_same(content(fewer, loaded), content(eight, state))
    assert "max_capacity: got " in caplog.text and "the next call of grow evicts" in caplog.text
    loaded = run_step(fewer, loaded, np.arange(200, 208))
    assert 16 <= fewer.num_rows(loaded)["item"] <= 64
    assert loaded.stores[0].capacity > 64  # at most 64 of these rows are used
    for start in range(208, 240, 8):
        loaded = run_step(fewer, loaded, np.arange(start, start + 8))
        assert fewer.num_rows(loaded)["item"] <= 64
    kept = np.asarray(fewer.export_table(loaded, "item")["keys"])
    assert np.isin(np.arange(208, 240), kept).all()


def test_training_goes_on_while_a_delta_is_written(tmp_path, monkeypatch):
    """A delta has the rows of when it began, though the state's memory is reused while its files are written."""
    collection, write, may_write = two(), save.Saving.write, threading.Event()
    spoil = jax.jit(lambda state: jax.tree.map(lambda array: array + np.ones((), array.dtype), state), donate_argnums=0)
    state = train(collection, collection.init(seed=1), 2)
    base = checkpoint.export_full(tmp_path / "full", collection, state, keeps_keys=True)

    def write_late(saving, folder):
        assert may_write.wait(30)
        write(saving, folder)

    monkeypatch.setattr(save.Saving, "write", write_late)
    for number in range(3):
        state = train(collection, state, 1)
        state, _ = collection.erase(state, "user", content(collection, state)["user.keys"][number::7])
        want, kept, path = content(collection, state), jax.tree.map(np.array, state), tmp_path / f"{number}"
        may_write.clear()
        exporting = checkpoint.begin_export_delta(path, collection, state, base, keeps_keys=True)
        assert not exporting.done() and not path.exists()
        spoil(state)
        may_write.set()
        base = exporting.result()
        assert base.path == path and base.kind == "delta" and base.report.total_s > 0
        assert_same(content(collection, checkpoint.load(path, collection)), want)
        state = jax.tree.map(jax.numpy.asarray, kept)


def test_a_delta_that_fails_while_it_is_written_leaves_nothing(tmp_path, monkeypatch):
    collection = two()
    state = train(collection, collection.init(seed=1), 2)
    base = checkpoint.export_full(tmp_path / "full", collection, state)
    with pytest.raises(FileExistsError, match="begin_export_delta: path: got"):
        checkpoint.begin_export_delta(tmp_path / "full", collection, state, base)
    state = train(collection, state, 1)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "write_part", lambda *_: pathlib.Path(tmp_path / "absent" / "part").touch())
        exporting = checkpoint.begin_export_delta(tmp_path / "delta", collection, state, base)
        with pytest.raises(FileNotFoundError, match="absent"):
            exporting.result()
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
    checkpoint.begin_export_delta(tmp_path / "delta", collection, state, base).result()
    assert_same(content(collection, checkpoint.load(tmp_path / "delta", collection)), content(collection, state))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="got 2 processes, wanted one; call export_delta"):
        checkpoint.begin_export_delta(tmp_path / "other", collection, state, base)


def test_a_delta_on_a_checkpoint(tmp_path):
    """The tables' folder of an Orbax checkpoint is a full export too."""
    collection = two()
    state = train(collection, collection.init(seed=1), 2)
    with ocp.CheckpointManager(tmp_path / "manager") as manager:
        manager.save(2, args=ocp.args.Composite(tables=checkpoint.TablesSave(collection, state)))
    base = tmp_path / "manager" / "2" / "tables"
    state = train(collection, state, 1)
    checkpoint.export_delta(tmp_path / "delta", collection, state, base)
    again = checkpoint.load([base, tmp_path / "delta"], collection)
    assert_same(content(collection, again), content(collection, state))


def save_with(collection, state, path):
    """Saves a checkpoint without a manager."""
    ocp.Checkpointer(checkpoint.TablesCheckpointHandler()).save(path, args=checkpoint.TablesSave(collection, state))
    return path


def restored_from(collection, path, **options):
    handler = checkpoint.TablesCheckpointHandler()
    return handler.restore(path, checkpoint.TablesRestore(collection, **options))


# Lineages are kept on the host, by the same code on any mesh.
@pytest.mark.parametrize("num_devices", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_a_base_that_was_lost_is_refused(tmp_path, num_devices):
    """After a restore to an earlier state and more training, a later export is no base; the restored export is."""
    collection = two(num_devices)
    state = train(collection, collection.init(seed=1), 1)
    first = checkpoint.export_full(tmp_path / "first", collection, state)
    saved = save_with(collection, state, tmp_path / "saved")
    # The steps are equal, so only the lineage shows what was done in between.
    checkpoint.export_delta(tmp_path / "second", collection, state, first.path)
    state = train(collection, state, 1)
    checkpoint.export_delta(tmp_path / "lost", collection, state, tmp_path / "second")
    state = train(collection, restored_from(collection, saved), 3)
    for base in ("second", "lost"):
        with pytest.raises(ValueError, match=rf'export_delta: base: got ".*{base}", exported by a state \(lineage'):
            checkpoint.export_delta(tmp_path / "delta", collection, state, tmp_path / base)
    assert not (tmp_path / "delta").exists() and not (tmp_path / "delta.writing").exists()
    for number, base in enumerate((first.path, saved)):
        path = tmp_path / f"good{number}"
        checkpoint.export_delta(path, collection, state, base)
        assert_same(content(collection, checkpoint.load(path, collection)), content(collection, state))
    # The same holds when that lineage is lost too.
    again = save_with(collection, state, tmp_path / "again")
    other = train(collection, state, 1)
    checkpoint.export_delta(tmp_path / "gone", collection, other, tmp_path / "good1")
    state = train(collection, checkpoint.load(again, collection), 2)
    checkpoint.export_delta(tmp_path / "last", collection, state, tmp_path / "good0")
    assert_same(content(collection, checkpoint.load(tmp_path / "last", collection)), content(collection, state))
    with pytest.raises(ValueError, match=r'base: got ".*gone", exported by a state'):
        checkpoint.export_delta(tmp_path / "none", collection, state, tmp_path / "gone")


@pytest.mark.parametrize("is_same_process", [True, False])
def test_a_base_of_another_beginning_is_refused(tmp_path, monkeypatch, is_same_process):
    """The seed is equal, but training started over, or rows were restored without the optimizer state."""
    collection = two()
    state = train(collection, collection.init(seed=1), 1)
    checkpoint.export_full(tmp_path / "full", collection, state)
    if not is_same_process:
        monkeypatch.setattr(lives, "IN_THIS_PROCESS", lives.Lives())
    init = jax.jit(lambda: collection.init(seed=1))
    others = [
        train(collection, collection.init(seed=1), 2),
        train(two(), two().init(seed=1), 2),
        train(collection, init(), 2),
        checkpoint.load(tmp_path / "full", collection, optimizer_state="initial"),
    ]
    for other in others:
        with pytest.raises(ValueError, match="write a full export"):
            checkpoint.export_delta(tmp_path / "delta", collection, other, tmp_path / "full")
    if is_same_process:
        # The second state of a compiled `init` did not come from the first either.
        checkpoint.export_full(tmp_path / "of_jit", collection, init())
        with pytest.raises(ValueError, match="write a full export"):
            checkpoint.export_delta(tmp_path / "delta", collection, train(collection, init(), 1), tmp_path / "of_jit")
        # The first state goes on.
        state = train(collection, state, 1)
        checkpoint.export_delta(tmp_path / "delta", collection, state, tmp_path / "full")
        again = checkpoint.load([tmp_path / "full", tmp_path / "delta"], collection)
        assert_same(content(collection, again), content(collection, state))


def test_the_lineage_of_a_run_is_that_of_another(monkeypatch):
    """The first state of a seed, and the second, have the same words as in another process (law 3)."""

    def run():
        return [np.asarray(two().init(seed=seed).lineage).tolist() for seed in (1, 2, 1, 1, 2)]

    monkeypatch.setattr(lives, "IN_THIS_PROCESS", lives.Lives())
    first = run()
    assert len(set(map(tuple, first))) == 5
    monkeypatch.setattr(lives, "IN_THIS_PROCESS", lives.Lives())
    assert run() == first


def test_a_state_brought_forward_by_deltas_may_go_on(chain, tmp_path):
    """A state after some deltas may export on each of them, but not on a later delta of the chain."""
    paths, *_ = chain
    collection = collection_of(tables_of(), 4)
    state = checkpoint.apply_delta(paths[1], collection, checkpoint.load(paths[0], collection), after=paths[0])
    state = train(collection, state, 1)
    for base in paths[:2]:
        path = tmp_path / f"on {base.name}"
        checkpoint.export_delta(path, collection, state, base)
        assert_same(content(collection, checkpoint.load(path, collection)), content(collection, state))
    state = train(collection, state, 3)
    with pytest.raises(ValueError, match="write a full export"):
        checkpoint.export_delta(tmp_path / "fork", collection, state, paths[2])


@pytest.mark.parametrize(
    "field", ["lineage", "unknown", "keys_per_step", "assigned_per_step", "looks", "most_positions", "name"]
)
def test_a_folder_without_a_field_is_refused(tmp_path, field):
    """Each says what a restored state, a delta or a served table would otherwise guess."""
    table = jaxsok.TableSpec("user", 4, optim.lift(optax.adam(0.1)), capacity=8)
    collection = jaxsok.Collection([table], [])
    checkpoint.export_full(tmp_path / "full", collection, collection.init())
    body = manifest.read("test", tmp_path / "full")
    where = {"lineage": body, "unknown": body["tables"]["user"], "name": body["stores"][0]["globals"][0]}
    del where.get(field, body["stores"][0])[field]
    (tmp_path / "full" / manifest.NAME).write_text(manifest._seal(body))
    with pytest.raises(checkpoint.CorruptFileError, match=rf"manifest\.json.*{field}: got None, wanted a value"):
        checkpoint.load(tmp_path / "full", collection)


@pytest.mark.usefixtures("looks_ahead")
def test_exports_after_two_discarded_steps_with_lookups_ahead(tmp_path):
    """The lookup ahead had the number of a step that did not come, which is later than the time of the export."""
    tables = [jaxsok.TableSpec("item", 4, optim.sgd(0.1), capacity=64, statistics=True)]
    collection = jaxsok.Collection(tables, [jaxsok.FeatureSpec("clicked", "item")])

    @jax.jit
    def step(state, plan, is_updated):
        rows, state, plan = collection.lookup(state, plan)
        gradients = jax.tree.map(lambda each: each + 0.1, rows)
        update = lambda state: collection.update(state, plan, gradients)[0]  # noqa: E731
        return jax.lax.cond(is_updated, update, collection.discard, state)

    state = collection.init(seed=0)
    raws = [{"clicked": np.arange(8) + 4 * number} for number in range(6)]
    for number, (batch, plan) in enumerate(collection.pipeline(raws, lookahead=1)):
        if number in (3, 4):
            state = collection.drain(state)
        state = step(collection.grow(state, batch), plan, number not in (2, 3))
        if number == 3:
            assert collection.export_table(state, "item")["last_step"].max() == int(state.step) + 1
            checkpoint.export_full(tmp_path / "full", collection, state)
        if number == 4:
            exported = checkpoint.export_delta(tmp_path / "delta", collection, state, tmp_path / "full")
            break
    assert exported.num_rows["item"] >= 8
    again = checkpoint.load([tmp_path / "full", tmp_path / "delta"], collection)
    names = ["item.keys", "item.rows"]
    assert_same(content(collection, again), content(collection, state), names=names)


def test_the_users_clock(tmp_path):
    """If lookups take a clock, exports take it as well; rows of the base's own time are in the delta."""
    collection = two()
    lookup = jax.jit(lambda state, features, clock: collection.lookup(state, features, clock=clock)[1])

    def at(state, clock, keys):
        features = collection.batch({"user": np.array(keys), "item": np.array(keys)}).features
        return lookup(state, features, np.uint32(clock))

    state = at(at(collection.init(), 1000, [1, 2]), 2000, [3, 4])
    checkpoint.export_full(tmp_path / "full", collection, state, clock=2000)
    state = at(state, 2000, [5, 6])
    exported = checkpoint.export_delta(tmp_path / "delta", collection, state, tmp_path / "full", clock=2500)
    assert exported.num_rows == {"user": 4, "item": 4} and (exported.clock, exported.step) == (2500, 0)
    again = checkpoint.load(tmp_path / "delta", collection)
    assert_same(content(collection, again), content(collection, state))
    with pytest.raises(ValueError, match=r"base: got .* of time 2500, wanted one of 2400 or earlier"):
        checkpoint.export_delta(tmp_path / "again", collection, state, tmp_path / "delta", clock=2400)


@pytest.mark.parametrize("clock", [None, 5000])
@pytest.mark.parametrize("is_delta", [False, True])
def test_what_is_loaded_into_a_live_state_is_a_change(tmp_path, clock, is_delta):
    """Old rows that were loaded after a base are in the delta on it, whatever last step was saved with them."""
    collection = two()
    old = train(collection, collection.init(seed=2), 1)
    checkpoint.export_full(tmp_path / "old", collection, old)
    old = train(collection, old, 1)
    checkpoint.export_delta(tmp_path / "newer", collection, old, tmp_path / "old")
    state = train(collection, collection.init(seed=1), 4)
    checkpoint.export_full(tmp_path / "full", collection, state, clock=clock)
    options = {"tables": ["user"], "clock": clock}
    if is_delta:
        state = checkpoint.apply_delta(tmp_path / "newer", collection, state, after=tmp_path / "old", **options)
    else:
        state = checkpoint.load(tmp_path / "newer", collection, state=state, **options)
    checkpoint.export_delta(tmp_path / "delta", collection, state, tmp_path / "full", clock=clock)
    again = checkpoint.load([tmp_path / "full", tmp_path / "delta"], collection)
    assert_same(content(collection, again), content(collection, state))


def test_a_delta_behind_a_symbolic_link_finds_its_base(tmp_path):
    """Its path back to the base holds where the folder really is."""
    collection = two()
    (tmp_path / "disk" / "deep" / "deltas").mkdir(parents=True)
    (tmp_path / "deltas").symlink_to(tmp_path / "disk" / "deep" / "deltas")
    state = train(collection, collection.init(), 2)
    full = checkpoint.export_full(tmp_path / "full", collection, state)
    state = train(collection, state, 1)
    first = checkpoint.export_delta(tmp_path / "deltas" / "first", collection, state, base=full)
    second = checkpoint.export_delta(tmp_path / "deltas" / "second", collection, state, base=first)
    for delta in (first, second):
        assert_same(content(collection, checkpoint.load(delta.path, collection)), content(collection, state))
        link = tmp_path / "latest"
        link.unlink(missing_ok=True)
        link.symlink_to(delta.path)
        assert_same(content(collection, checkpoint.load(link, collection)), content(collection, state))
    third = checkpoint.export_delta(tmp_path / "third", collection, state, base=link)
    assert_same(content(collection, checkpoint.load(third.path, collection)), content(collection, state))
    cold = tmp_path / "cold"
    cold.mkdir()
    third.path.rename(cold / "third")  # moved, with a link where it was
    third.path.symlink_to(cold / "third")
    assert_same(content(collection, checkpoint.load(third.path, collection)), content(collection, state))


def test_two_clocks_are_refused(tmp_path):
    """Lookups with a clock and an export without are refused, since the export would seem older than its rows."""
    collection = two()
    keys = np.array([1, 2])
    features = collection.batch({"user": keys, "item": keys}).features
    state = collection.lookup(collection.init(), features, clock=2000)[1]
    with pytest.raises(ValueError, match="export_full: clock: got 0, wanted 2000 or later, the latest last step"):
        checkpoint.export_full(tmp_path / "full", collection, state)
    assert not list(tmp_path.iterdir())
    checkpoint.export_full(tmp_path / "full", collection, state, clock=2000)
    state = collection.lookup(state, features, clock=3000)[1]
    with pytest.raises(ValueError, match="export_delta: clock: got 2500, wanted 3000 or later"):
        checkpoint.export_delta(tmp_path / "delta", collection, state, tmp_path / "full", clock=2500)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_what_cannot_be_exported_is_refused(tmp_path):
    collection = two()
    state = train(collection, collection.init(seed=1), 1)
    checkpoint.export_full(tmp_path / "full", collection, state)
    with pytest.raises(FileExistsError, match=r'export_full: path: got ".*full", which exists'):
        checkpoint.export_full(tmp_path / "full", collection, state)
    plain = collection_of([jaxsok.TableSpec(name, 2, cases.ADAM, capacity=64) for name in ("user", "item")])
    with pytest.raises(ValueError, match=r'table "user": statistics: got False, wanted True'):
        checkpoint.export_delta(tmp_path / "delta", plain, plain.init(), tmp_path / "full")
    other = collection_of([jaxsok.TableSpec("user", 2, cases.ADAM, capacity=64, statistics=True)])
    with pytest.raises(ValueError, match=r"with tables \['item', 'user'\], wanted those of the collection, \['user'\]"):
        checkpoint.export_delta(tmp_path / "delta", other, other.init(), tmp_path / "full")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]


@pytest.mark.parametrize(("clock", "error"), [(2**32, ValueError), (-1, ValueError), (1.5, TypeError)])
def test_a_clock_that_is_no_uint32_is_refused(tmp_path, clock, error):
    """Exports refuse it as lookups do, since files written with it could not be read."""
    collection = two()
    state = collection.init()
    checkpoint.export_full(tmp_path / "full", collection, state, clock=2**32 - 1)
    with pytest.raises(error, match="export_full: clock: got"):
        checkpoint.export_full(tmp_path / "other", collection, state, clock=clock)
    with pytest.raises(error, match="export_delta: clock: got"):
        checkpoint.export_delta(tmp_path / "other", collection, state, tmp_path / "full", clock=clock)
    with pytest.raises(error, match="TablesSave: clock: got"):
        checkpoint.TablesCheckpointHandler().save(tmp_path, checkpoint.TablesSave(collection, state, clock=clock))
    assert not (tmp_path / "other").exists()
    assert collection.num_rows(checkpoint.load(tmp_path / "full", collection))["user"] == 0


def test_an_export_that_ended_early_leaves_nothing_to_read(tmp_path, monkeypatch, caplog):
    """The folder gets its name at the end; leftovers of an earlier export do not get in the way."""
    collection = two()
    state = train(collection, collection.init(seed=1), 1)

    def fails(*args):
        raise OSError("no space")

    with monkeypatch.context() as patched:
        patched.setattr("jaxsok.checkpoint.manifest.write_part", fails)
        with pytest.raises(OSError, match="no space"):
            checkpoint.export_full(tmp_path / "full", collection, state)
    assert not list(tmp_path.iterdir())
    # A killed process cleans nothing up, and no other process can know that it stopped writing.
    half = tmp_path / "full.0badcafe.writing"
    half.mkdir()
    (half / "table_0000.process_00000.arrow").write_bytes(b"half")
    with pytest.raises(FileNotFoundError, match=r"which has no manifest\.json"):
        checkpoint.load(half, collection)
    checkpoint.export_full(tmp_path / "full", collection, state)
    assert half.exists() and r"full.0badcafe.writing" in caplog.text
    assert "remove those that no process writes" in caplog.text
    assert sorted(tmp_path.iterdir()) == [tmp_path / "full", half]
    assert_same(content(collection, checkpoint.load(tmp_path / "full", collection)), content(collection, state))


def test_what_is_not_published_is_not_read(tmp_path):
    """If a process dies after the last file and before the rename, its complete folder is ignored."""
    collection = two()
    state = train(collection, collection.init(seed=1), 1)
    checkpoint.export_full(tmp_path / "full", collection, state)
    shutil.copytree(tmp_path / "full", tmp_path / "full.0badcafe.writing")
    assert folders.open_table(tmp_path, table="user", dim=2).path == tmp_path / "full"
    assert inspection.inspect(tmp_path).facts["folder"] == "full"
    columns.save(collection, state, tmp_path / "files", ["user"], format="npz")
    shutil.copy(tmp_path / "files" / "user.npz", tmp_path / "files" / "item.npz.0badcafe.partial")
    assert [table.name for table in inspection.inspect(tmp_path / "files").tables] == ["user"]


def test_some_tables_for_serving(chain):
    """A collection that does not train loads rows alone, of some tables."""
    paths, _, held, _ = chain
    table = jaxsok.TableSpec("user", cases.DIM, optim.sgd(0.0))
    other = collection_of([table], 2)
    options = {"tables": ["user"], "optimizer_state": "initial"}
    state = checkpoint.load(paths[:2], other, **options)
    state = checkpoint.apply_delta(paths[2], other, state, after=paths[1], **options)
    assert_same(content(other, state), held[2][0], names=["user.keys", "user.rows"])


# Keys that are kept ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_devices", [None, 4])
def test_a_base_that_kept_its_keys_is_not_read(tmp_path, num_devices, monkeypatch):
    """Keys that left, also while tables grew, and those that came back to other rows: as if the chain were read."""
    monkeypatch.setattr(keys_by_row, "COMPARED_ROWS", 24)  # several blocks, of which the last two overlap
    collection = two(num_devices)
    state = train(collection, collection.init(seed=1), 1)
    base = checkpoint.export_full(tmp_path / "full", collection, state, keeps_keys=True)
    shutil.copytree(base.path, tmp_path / "kept")
    keys = content(collection, state)["user.keys"]
    state, _ = collection.erase(state, "user", keys[::2])
    others = np.arange(10**6, 10**6 + 100, dtype=np.uint64)  # some take the rows of keys that left
    state = collection.grow(state, 300)
    ones = np.ones((len(others), 2), np.float32)
    state, *_ = collection.assign(state, "user", others, ones)
    state, *_ = collection.assign(state, "user", keys[:6], ones[:6])
    state, _ = collection.clear(state, "item")
    read = checkpoint.export_delta(tmp_path / "read", collection, state, base.path)
    gone = set(keys[6::2].tolist())
    assert gone and read.num_tombstones == {"user": len(gone), "item": base.num_rows["item"]}
    between = checkpoint.export_delta(tmp_path / "between", collection, state, base, keeps_keys=True)
    for file in base.path.glob("*"):
        file.write_bytes(b"")
    with pytest.raises(checkpoint.CorruptFileError):
        checkpoint.export_delta(tmp_path / "fails", collection, state, between.path)
    later = checkpoint.export_delta(tmp_path / "later", collection, state, between)
    assert later.num_tombstones == {"user": 0, "item": 0}  # of a chain only the last manifest was read
    shutil.copytree(tmp_path / "kept", base.path, dirs_exist_ok=True)
    for file in base.path.glob("*.arrow"):
        file.write_bytes(b"")
    compared = checkpoint.export_delta(tmp_path / "compared", collection, state, base)
    assert compared.keys is None and compared.num_tombstones == read.num_tombstones
    assert compared.num_rows == read.num_rows
    for part in ("read", "compared"):
        left = [path.read_bytes() for path in sorted((tmp_path / part).glob("*tombstones*"))]
        assert left and left == [path.read_bytes() for path in sorted((tmp_path / "read").glob("*tombstones*"))]


@pytest.mark.parametrize(("num_devices", "placement"), [(None, "replicated"), (2, "replicated"), (4, "hashed")])
def test_keys_that_another_collection_has_kept(tmp_path, num_devices, placement):
    """Tables in another order, in other stores and on other shards: keys are still those of their tables."""
    specs = [jaxsok.TableSpec(name, 2, cases.ADAM, statistics=True, capacity=64) for name in ("user", "item")]
    placed = {"placement": jaxsok.REPLICATED} if placement == "replicated" else {}
    specs.append(jaxsok.TableSpec("small", 2, cases.ADAM, statistics=True, capacity=64, **placed))
    first, second = collection_of(specs, 4), collection_of(specs[::-1], num_devices)
    state = first.init(seed=1)
    for number, spec in enumerate(specs):
        keys = np.arange(10, dtype=np.uint64) + np.uint64(100 * number)
        state, *_ = first.assign(state, spec.name, keys, np.ones((10, 2), np.float32))
    base = checkpoint.export_full(tmp_path / "full", first, state, keeps_keys=True)
    state = checkpoint.load(base.path, second)
    state, _ = second.erase(state, "user", np.arange(5))
    state, _ = second.erase(state, "small", np.array([203]))
    delta = checkpoint.export_delta(tmp_path / "delta", second, state, base)
    assert delta.num_tombstones == {"user": 5, "item": 0, "small": 1}
    assert_same(content(second, checkpoint.load(delta.path, second)), content(second, state))


@pytest.mark.parametrize("keeps_keys", [False, True])
def test_a_restored_state_with_fewer_rows_than_were_kept(tmp_path, keeps_keys):
    """Keys that were kept in rows beyond its end are no less gone, and the next delta finds those that it has kept."""
    collection = two()
    keys = np.arange(300)
    state = collection.grow(train(collection, collection.init(seed=1), 1), 4000)
    state, *_ = collection.assign(state, "user", keys, np.ones((300, 2), np.float32))
    state, _ = collection.clear(state, "item")
    state, _ = collection.erase(state, "user", keys[:250])
    base = checkpoint.export_full(tmp_path / "full", collection, state, keeps_keys=True)
    small = checkpoint.load(base.path, collection)
    before, after = (sum(map(len, some.stores[0].records)) for some in (state, small))
    assert after < 300 < before
    small, _ = collection.erase(small, "user", keys[295:])
    first = checkpoint.export_delta(tmp_path / "first", collection, small, base, keeps_keys=keeps_keys)
    assert first.num_tombstones == {"user": 5, "item": 0}
    small, _ = collection.erase(small, "user", keys[290:295])
    second = checkpoint.export_delta(tmp_path / "second", collection, small, first)
    assert second.num_tombstones == {"user": 5, "item": 0}
    loaded = checkpoint.load([base.path, first.path, second.path], collection)
    assert_same(content(collection, loaded), content(collection, small))


@pytest.mark.parametrize(("num_devices", "dtype"), [(None, "float32"), (4, "bfloat16"), (None, "float16")])
def test_changed_rows_that_come_through_pinned_memory(tmp_path, monkeypatch, dtype, num_devices):
    """As on a GPU: rows of every dtype keep their bits, in pieces of any size, and so does their state."""
    monkeypatch.setattr(snapshot, "_to_host", snapshot._copy_to_host)
    monkeypatch.setattr(table_export, "UNPACKED_ROWS", 16)
    table = jaxsok.TableSpec("user", 2, cases.ADAM, statistics=True, capacity=128, dtype=dtype)
    collection = collection_of([table], num_devices)
    rng, state = np.random.default_rng(3), collection.init(seed=1)
    state, *_ = collection.assign(state, "user", np.arange(90), rng.normal(size=(90, 2)).astype(np.float32))
    base = checkpoint.export_full(tmp_path / "full", collection, state, clock=1)
    changed = rng.permutation(90)[:37]
    rows = rng.normal(size=(37, 2)).astype(np.float32)
    state, *_ = collection.assign(state, "user", changed, rows, clock=np.uint32(1))
    for piece_bytes in (1, 200, 1 << 20):
        path = tmp_path / f"{piece_bytes}"
        options = {"clock": 2, "piece_bytes": piece_bytes}
        delta = checkpoint.begin_export_delta(path, collection, state, base, **options).result()
        assert delta.num_rows == {"user": 37}
        assert_same(content(collection, checkpoint.load([base.path, path], collection)), content(collection, state))


def test_a_folder_that_was_written_again_is_no_base(tmp_path):
    """A delta compares with the folder that its base described, and refuses another one of that name."""
    collection = two()
    state = train(collection, collection.init(seed=1), 1)
    base = checkpoint.export_full(tmp_path / "full", collection, state, keeps_keys=True)
    shutil.rmtree(base.path)
    again = checkpoint.export_full(tmp_path / "full", collection, state)
    with pytest.raises(ValueError, match=rf"base: got the export {base.uuid}, whose folder .* has {again.uuid} by now"):
        checkpoint.export_delta(tmp_path / "delta", collection, state, base)
    assert not (tmp_path / "delta").exists()


# In any order ---------------------------------------------------------------------------------------------------------


class Life(stateful.RuleBasedStateMachine):
    """Batches, erasing, clearing and exports in any order; the last export, once loaded, is the live table."""

    def __init__(self):
        super().__init__()
        self.collection = two(capacity=512, admission=policies.AdmitByCount(2))
        self.state = self.collection.init(seed=5)
        self.folder = tempfile.TemporaryDirectory()
        self.links = []

    def teardown(self):
        self.folder.cleanup()

    keys = st.lists(st.integers(0, 30), min_size=4, max_size=4)

    @stateful.rule(user=keys, item=keys, is_step=st.booleans())
    def look_up(self, user, item, is_step):
        features = self.collection.batch({"user": np.array(user), "item": np.array(item)}).features
        if is_step:
            self.state, _ = train_step(self.collection)(self.state, features)
        else:
            _, self.state, _ = self.collection.lookup(self.state, features)

    @stateful.rule(table=st.sampled_from(["user", "item"]), keys=keys)
    def erase(self, table, keys):
        self.state, _ = self.collection.erase(self.state, table, np.array(keys))

    @stateful.rule(table=st.sampled_from(["user", "item"]))
    def clear(self, table):
        self.state, _ = self.collection.clear(self.state, table)

    @stateful.rule(is_kept=st.booleans(), keeps_keys=st.booleans(), is_waited_for=st.booleans())
    def export(self, is_kept, keeps_keys, is_waited_for):
        path = pathlib.Path(self.folder.name) / str(len(self.links))
        rows, step = content(self.collection, self.state), int(self.state.step)
        of_user = waiting(self.collection, self.state, "user")
        if not self.links:
            exported = checkpoint.export_full(path, self.collection, self.state, keeps_keys=keeps_keys)
        else:
            base = self.exported if is_kept else self.links[-1]
            options = self.collection, self.state, base
            if is_waited_for:
                exported = checkpoint.export_delta(path, *options, keeps_keys=keeps_keys)
            else:
                exporting = checkpoint.begin_export_delta(path, *options, keeps_keys=keeps_keys)
                self.look_up([3, 5, 7, 9], [2, 4, 6, 8], True)
                exported = exporting.result()
        assert (exported.keys is not None) == keeps_keys
        self.exported = exported
        self.links.append(path)
        again = checkpoint.load(self.links, self.collection)
        assert_same(content(self.collection, again), rows)
        assert waiting(self.collection, again, "user") == of_user
        assert int(again.step) == step


TestLife = Life.TestCase
TestLife.settings = hypothesis.settings(max_examples=5, stateful_step_count=12, deadline=None)
