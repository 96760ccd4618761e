"""The documentation is correct: docstring examples, code of pages and its output, messages, names, numbers, links."""

import ast
import contextlib
import dataclasses
import doctest
import importlib
import inspect
import io
import itertools
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import jaxsok
from jaxsok import enlarge, grow, host_limits, processes, shards, specs as specs_lib, store, types
from jaxsok.kernels import library

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("jaxsok/**/*.py"))
PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md"))]
ALL_MARKDOWN = sorted({*PAGES, "CHANGELOG.md", *(path.relative_to(ROOT).as_posix() for path in ROOT.glob("*/*.md"))})


@pytest.fixture(autouse=True)
def world_of_users(monkeypatch):
    """Runs pages as users do: without the strict promotion and the type checks (if any) of other tests."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"), np.printoptions():
        yield


def blocks_of(text):
    """Yields each fenced block of a page: language, number of lines before it, text, and text since the last block."""
    blocks, end = [], 0
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
        blocks.append((found[1], text[: found.start(2)].count("\n"), found[2], text[end : found.start()]))
        end = found.end()
    assert text.count("\n```") == 2 * len(blocks), "a fence that is not closed, or indented"
    return blocks


def sections(text):
    """Returns the text below each heading of a page; deeper headings end a section as well."""
    parts = re.split(
        r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE), flags=re.MULTILINE
    )
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def table_of(text):
    """Returns the rows of the only Markdown table of a section as lists of cells, without its head."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", text, re.MULTILINE)
    ]
    assert len(rows) > 2 and set("".join(rows[1])) <= set("-:"), "no table, or more than one"
    return rows[2:]


# Code ------------------------------------------------------------------------------------------------------------


def docstrings(name):
    """Returns each docstring of a source file by line; parsing the source prevents decorators from hiding any."""
    for node in ast.walk(ast.parse((ROOT / name).read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            yield node.body[0].lineno, ast.get_docstring(node)


def classes(name):
    """Returns, for the line of each method's docstring, the docstring of its class."""
    for node in ast.walk(ast.parse((ROOT / name).read_text())):
        for method in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(method, ast.FunctionDef) and ast.get_docstring(method) is not None:
                yield method.body[0].lineno, ast.get_docstring(node) or ""


@pytest.mark.parametrize("name", [name for name in MODULES if any(">>> " in text for _, text in docstrings(name))])
def test_examples_of_docstrings(name):
    """Code after >>> runs and gives the output below it; a method continues the example of its class."""
    module = importlib.import_module(name.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    runner, report, of_class = doctest.DocTestRunner(verbose=False), io.StringIO(), dict(classes(name))
    for line, text in docstrings(name):
        names = dict(vars(module))
        for part in (of_class.get(line, ""), text) if ">>> " in text else ():
            test = doctest.DocTestParser().get_doctest(part, names, f"{name}:{line}", name, line - 1)
            runner.run(test, out=report.write, clear_globs=False)
            names = test.globs
    assert runner.tries > 0
    assert runner.failures == 0, report.getvalue()


def test_examples_were_found():
    """The modules with public functions have examples that run."""
    with_examples = {name for name in MODULES if any(">>> " in text for _, text in docstrings(name))}
    assert {"jaxsok/collection.py", "jaxsok/combine.py", "jaxsok/optimizers/fused.py"} <= with_examples


@pytest.mark.parametrize("page", [page for page in PAGES if "```python" in (ROOT / page).read_text()])
def test_code_of_pages(page):
    """The Python of a page runs block after block; a block of text directly after one is its output."""
    blocks, names = blocks_of((ROOT / page).read_text()), {"__name__": "__main__"}
    for i, (language, line, code, _) in enumerate(blocks):
        if language != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * line + code, str(ROOT / page), "exec"), names)
        if i + 1 < len(blocks) and blocks[i + 1][0] == "text" and not blocks[i + 1][3].strip():
            got = [text.rstrip() for text in printed.getvalue().splitlines()]
            assert got == blocks[i + 1][2].splitlines(), f"{page}:{line}"


NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.py"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks(path, monkeypatch):
    """The cells of a notebook run in order and check their results by assertions."""
    cells = re.split(r"^# %%", path.read_text(), flags=re.MULTILINE)
    assert cells[1].startswith(" [markdown]\n# # ") and sum("assert " in cell for cell in cells) > 0
    monkeypatch.chdir(path.parent)  # the working directory of a kernel
    monkeypatch.setattr(sys, "path", list(sys.path))
    exec(compile(path.read_text(), str(path), "exec"), {"__name__": "__main__"})


# Messages --------------------------------------------------------------------------------------------------------

SGD = jaxsok.optim.sgd(0.1)


def item(**options):
    """Returns a collection of a table and a feature, both called "item"."""
    spec = {name: options.pop(name) for name in ("capacity", "max_capacity") if name in options}
    table = jaxsok.TableSpec("item", 4, SGD, **{"capacity": 8, **spec})
    return jaxsok.Collection([table], [jaxsok.FeatureSpec("item", table="item", **options)])


def pack(value, **options):
    """Packs one feature."""
    return item(**options).batch({"item": value})


def step(collection, keys=(7, 8, 9), gradient=1.0, between=lambda state: state):
    """Runs a whole step; the gradient is the same everywhere."""
    batch = collection.batch({"item": np.array(keys)})
    embeddings, state, plan = collection.lookup(collection.init(seed=0), batch.features)
    return collection.update(between(state), plan, {"item": jnp.full(embeddings["item"].shape, gradient)})


def update_with(gradients=None, plan=None, **options):
    """Runs an update with a wrong argument."""
    collection = item()
    batch = collection.batch({"item": np.array([7, 8])})
    _, state, own = collection.lookup(collection.init(seed=0), batch.features)
    gradients = {"item": jnp.ones((2, 4))} if gradients is None else gradients
    collection.update(state, own if plan is None else plan(collection, own, batch), gradients, **options)


def other_collection():
    """Returns a collection whose states and features do not fit that of `item`."""
    return jaxsok.Collection([jaxsok.TableSpec("user", 4, SGD, capacity=8)], [jaxsok.FeatureSpec("item", table="user")])


def grow_beyond_all_limits(monkeypatch):
    """Grows until the row ids run out, with unlimited memory."""
    monkeypatch.setattr(enlarge, "free_bytes", lambda: None)
    collection = item()
    collection.batch({"item": np.arange(8)})
    for module in (specs_lib, enlarge):
        monkeypatch.setattr(module, "MAX_CAPACITY", 8)
    collection.grow(collection.init(), steps=2)


def grow_without_memory(monkeypatch):
    """Grows with a megabyte of free memory."""
    collection = item()
    collection.batch({"item": np.arange(8)})
    state = collection.init()
    monkeypatch.setattr(enlarge, "free_bytes", lambda: 2**20)
    collection.grow(state, steps=10_000)


def init_without_host_memory(monkeypatch):
    """Declares a table in host memory, on one of four devices that share a megabyte."""
    limit = host_limits.HostLimit("/sys/fs/cgroup/job/memory.max", 2**20, "job")
    monkeypatch.setattr(
        enlarge, "share_of_device", lambda shards: host_limits.least_share([(1, [limit]), (3, [limit])])
    )
    monkeypatch.setattr(enlarge, "free_bytes", lambda: None)
    memory = jaxsok.HostMemory(device_rows=8)
    jaxsok.Collection([jaxsok.TableSpec("user", 8, SGD, capacity=10_000, memory=memory)], []).init()


def init_without_memory(monkeypatch):
    """Declares two stores that do not fit together."""
    monkeypatch.setattr(enlarge, "free_bytes", lambda: 2**20)
    tables = [jaxsok.TableSpec("user", 4, SGD, capacity=10_000), jaxsok.TableSpec("item", 8, SGD, capacity=10_000)]
    jaxsok.Collection(tables, []).init()


def load(back_end, exists, monkeypatch):
    """Loads a library that was not built, or an invalid one."""

    class Path(pathlib.PurePosixPath):
        def exists(self):
            return exists

    monkeypatch.setattr(library, "library_path", lambda name: Path(f"jaxsok/_lib/libjaxsok_{name}.so"))
    library._load(back_end)


def erase_all(collection):
    """Erases the keys of `step` between its lookup and its update."""
    return lambda state: collection.erase(state, "item", np.array([7, 8, 9]))[0]


def update_twice():
    """Uses one plan in two updates."""
    collection = item()
    embeddings, state, plan = collection.lookup(collection.init(), pack(np.arange(2)).features)
    state, _ = collection.update(state, plan, embeddings)
    return collection.update(state, plan, embeddings)[1]


def stale_step():
    """Erases a row between lookup and update."""
    collection = item()
    return step(collection, between=erase_all(collection))


def clip(max_norm):
    """Clips with a wrong argument."""
    collection = item()
    embeddings, state, plan = collection.lookup(collection.init(), collection.batch({"item": np.array([7])}).features)
    collection.clip_by_global_norm(state, plan, embeddings, max_norm)


def derivative_of_lookup():
    """Differentiates the loss by the rows, through a lookup."""
    collection = item()
    features = collection.batch({"item": np.array([7])}).features
    jax.vjp(lambda state: collection.lookup(state, features)[0]["item"], collection.init())[1](jnp.ones((1, 4)))


def find_over_batches():
    """Maps `find` over two batches."""
    collection = item()
    features = collection.batch({"item": np.array([7])}).features
    two = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), features)
    jax.vmap(lambda features: collection.find(collection.init(), features)[0])(two)


def traced_rate():
    """Makes an optimizer inside a jitted function."""
    jax.jit(lambda rate: jaxsok.optim.sgd(rate) and rate)(0.1)


def mesh_of(num_devices=2, axes=("data",)):
    """Returns a mesh as long as its first axis; the test is skipped if there are fewer devices."""
    if len(jax.devices()) < num_devices:
        pytest.skip(f"needs {num_devices} devices")
    shape = (num_devices, *[1] * (len(axes) - 1))
    types = (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.make_mesh(shape, axes, axis_types=types, devices=jax.devices()[:num_devices])


def mesh_of_cpus():
    """Returns two CPU devices, even if there are GPUs."""
    return jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:2])


def over(mesh=None, axis="data", exchange=None, tables=None, **options):
    """Returns the collection of `item` over two devices."""
    single = item(**options)
    mesh = mesh_of() if mesh is None else mesh
    return jaxsok.Collection(tables or single.tables, single.features, mesh=mesh, axis=axis, exchange=exchange)


def tables_of(placement, names=("item",)):
    """Returns tables with a placement."""
    return [jaxsok.TableSpec(name, 4, SGD, capacity=8, placement=placement) for name in names]


def pack_over(value, pad_to=None, **options):
    """Packs one feature for two devices."""
    return over(**options).batch({"item": value}, pad_to=pad_to)


def put(keys, mesh, axis):
    """Puts keys on a mesh, their samples split over one axis."""
    words = np.stack([keys, np.zeros_like(keys)], -1).astype(np.uint32)
    return jax.device_put(words, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axis)))


def half_inside():
    """Calls a collection over two axes inside a shard_map over one of them."""
    axes = ("data", "model")
    collection = over(mesh_of(2, axes), axes)
    state, features = collection.init(), collection.batch({"item": np.arange(2)}).features
    split = jax.sharding.PartitionSpec("data")
    body = jax.shard_map(
        lambda state, features: collection.find(state, features)[0],
        mesh=collection.shards.mesh,
        in_specs=(jax.sharding.PartitionSpec(), split),
        out_specs=split,
        axis_names={"data"},
        check_vma=False,
    )
    jax.jit(body)(state, features)


def inside_pmap():
    """Calls a collection over the axis "data" in a pmap with another axis name."""
    collection = over()
    state, features = collection.init(), collection.batch({"item": np.arange(2)}).features
    find = lambda state, features: collection.find(state, features)[0]  # noqa: E731
    parallel = jax.pmap(find, axis_name="batch", devices=jax.devices()[:2])
    parallel(collection.stack(state), collection.stack(features))


def deleted_state():
    """Uses a state that was donated."""
    state = item().init()
    jax.tree.map(lambda leaf: leaf.delete(), state)
    item().lookup(state, pack(np.array([7])).features)


def stacked_twice():
    """Stacks a state that was stacked before."""
    collection = over()
    state = collection.init()
    collection.stack(state)
    collection.stack(state)


def two_features():
    """Returns a collection of two features of one table."""
    return jaxsok.Collection(item().tables, [jaxsok.FeatureSpec(name, "item") for name in ("item", "user")])


class DataFrame:
    """A stand-in for the frames of Pandas and Polars."""

    columns = ("item",)


def unlike_plans():
    """Gives one update a plan of a pipeline and a plan of a lookup."""
    collection = over()
    features = collection.batch({"item": np.arange(2)}).features
    _, state, first = collection.lookup(collection.init(), features)
    embeddings, state, second = collection.lookup(state, collection.plan(features, send_capacity=(4,)))
    collection.update(state, [first, second], [embeddings, embeddings])


def unlike_processes(monkeypatch):
    """Simulates another process that declares something else."""
    monkeypatch.setattr(processes, "gather", lambda topic, own: ["seed: 0", own])
    processes.require_same("init", ["seed: 1"])


def ragged_in_processes(monkeypatch):
    """Simulates a mesh with devices of two processes."""
    monkeypatch.setattr(shards.MeshShards, "num_processes", 2)
    pack_over(RAGGED)


RAGGED = jaxsok.Bags(np.arange(6), lengths=np.array([2, 4]))
ONES = np.ones(6, np.float32)

PROVOKED = {
    # Declaring
    "dim": lambda: jaxsok.TableSpec("item", 0, SGD),
    "dim of another kind": lambda: jaxsok.TableSpec("item", 2.5, SGD),
    "name": lambda: jaxsok.TableSpec("", 4, SGD),
    "max_capacity": lambda: jaxsok.TableSpec("item", 4, SGD, max_capacity=1000),
    "optimizer": lambda: jaxsok.TableSpec("item", 4, "sgd"),
    "optax": lambda: jaxsok.TableSpec("item", 4, pytest.importorskip("optax").adam(1e-3)),
    "optimizer that is not called": lambda: jaxsok.TableSpec("item", 4, jaxsok.optim.adam),
    "argument of torch": lambda: jaxsok.TableSpec("item", num_embeddings=100),
    "initializer": lambda: jaxsok.TableSpec("item", 4, SGD, initializer="glorot"),
    "dtype": lambda: jaxsok.TableSpec("item", 4, SGD, dtype="float64"),
    "embedding_dtype": lambda: jaxsok.TableSpec("item", 4, SGD, dtype="bfloat16", embedding_dtype="float16"),
    "rounding": lambda: jaxsok.TableSpec("item", 4, SGD, rounding="up"),
    "row_gradient": lambda: jaxsok.TableSpec("item", 4, SGD, row_gradient="average"),
    "unknown": lambda: jaxsok.TableSpec("item", 4, SGD, unknown="nan"),
    "combiner": lambda: jaxsok.FeatureSpec("item", "item", combiner="max"),
    "weights without combiner": lambda: jaxsok.FeatureSpec("item", "item", combiner=None, weighted=True),
    "max_hotness with combiner": lambda: jaxsok.FeatureSpec("item", "item", max_hotness=8),
    "key_dtype": lambda: jaxsok.FeatureSpec("item", "item", key_dtype="int16"),
    "two of one name": lambda: jaxsok.Collection([item().tables[0]] * 2, []),
    "no tables": lambda: jaxsok.Collection([], []),
    "unknown table": lambda: jaxsok.Collection(item().tables, [jaxsok.FeatureSpec("clicked", table="itme")]),
    "not a spec": lambda: jaxsok.Collection(["item"], []),
    "too many features": lambda: jaxsok.Collection(
        item().tables, [jaxsok.FeatureSpec(f"clicked {i}", table="item") for i in range(1025)]
    ),
    "too many rows": lambda: jaxsok.Collection([jaxsok.TableSpec(name, 4, SGD, capacity=2**30) for name in "ab"], []),
    "learning rate": lambda: jaxsok.optim.sgd("fast"),
    "traced learning rate": traced_rate,
    "b1": lambda: jaxsok.optim.adam(1e-3, b1=1.0),
    "nesterov": lambda: jaxsok.optim.sgd(0.1, nesterov=True),
    "positive learning rate": lambda: jaxsok.optim.ftrl(0.0),
    "limits": lambda: jaxsok.optim.adam(0.1, limits=1.0),
    "limit": lambda: jaxsok.optim.Limits(clip_row_norm=0.0),
    "uniform": lambda: jaxsok.initializers.uniform(1.0, -1.0),
    "normal": lambda: jaxsok.initializers.normal(stddev=-1.0),
    # Packing
    "no mapping": lambda: item().batch([1, 2]),
    "data frame": lambda: item().batch(DataFrame()),
    "label of another size": lambda: item().batch({"item": np.arange(4), "label": np.ones(3)}),
    "empty list": lambda: pack([]),
    "ragged lists": lambda: pack([[7, 8], [9]]),
    "missing feature": lambda: item().batch({"itme": np.array([7])}),
    "float keys": lambda: pack(np.array([7.0])),
    "a scalar": lambda: pack(np.int64(7)),
    "three axes": lambda: pack(np.zeros((2, 3, 4), np.int64)),
    "narrowed keys": lambda: pack(jnp.array([7, 8], jnp.int32)),
    "no words": lambda: pack(jnp.array([7, 8, 9], jnp.uint32)),
    "float keys on the device": lambda: pack(jnp.array([7.0, 8.0])),
    "lengths and offsets": lambda: pack(jaxsok.Bags(np.arange(6), lengths=np.array([6]), offsets=np.array([0, 6]))),
    "ragged rectangle": lambda: pack(jaxsok.Bags(np.zeros((2, 3), np.int64), lengths=np.array([3, 3]))),
    "float lengths": lambda: pack(jaxsok.Bags(np.arange(6), lengths=np.array([2.0, 4.0]))),
    "negative lengths": lambda: pack(jaxsok.Bags(np.arange(6), lengths=np.array([7, -1]))),
    "offsets from 1": lambda: pack(jaxsok.Bags(np.arange(6), offsets=np.array([1, 6]))),
    "falling offsets": lambda: pack(jaxsok.Bags(np.arange(6), offsets=np.array([0, 4, 2, 6]))),
    "past the end": lambda: pack(jaxsok.Bags(np.arange(6), lengths=np.array([3, 4]))),
    "keys in no bag": lambda: pack(jaxsok.Bags(np.arange(6), lengths=np.array([2, 3]))),
    "max_keys": lambda: pack(RAGGED, max_keys=4),
    "max_hotness": lambda: pack(RAGGED, combiner=None, max_hotness=3),
    "weights missing": lambda: pack(RAGGED, weighted=True),
    "weights not declared": lambda: pack(dataclasses.replace(RAGGED, weights=ONES)),
    "integer weights": lambda: pack(dataclasses.replace(RAGGED, weights=np.arange(6)), weighted=True),
    "shape of weights": lambda: pack(dataclasses.replace(RAGGED, weights=ONES[:5]), weighted=True),
    "NaN weights": lambda: pack(dataclasses.replace(RAGGED, weights=ONES * np.nan), weighted=True),
    # Lookup, find, update
    "not a state": lambda: item().lookup({}, pack(np.array([7])).features),
    "state of other specs": lambda: item().lookup(other_collection().init(), pack(np.array([7])).features),
    "state of another dim": lambda: item().lookup(
        jaxsok.Collection([jaxsok.TableSpec("item", 8, SGD, capacity=8)], []).init(), pack(np.array([7])).features
    ),
    "deleted state": deleted_state,
    "stacked twice": stacked_twice,
    "raw features": lambda: item().find(item().init(), {"item": np.array([7])}),
    "features of other specs": lambda: other_collection().find(other_collection().init(), pack(np.array([7])).features),
    "plan of no lookup": lambda: update_with(plan=lambda collection, own, batch: collection.plan(batch.features)),
    "plans and gradients": lambda: update_with(plan=lambda collection, own, batch: [own, own]),
    "no gradient": lambda: update_with({}),
    "unknown gradient": lambda: update_with({"item": jnp.ones((2, 4)), "itme": jnp.ones((2, 4))}),
    "shape of gradient": lambda: update_with({"item": jnp.ones((2, 3))}),
    "integer gradient": lambda: update_with({"item": jnp.ones((2, 4), jnp.int32)}),
    "rate of update": lambda: update_with(learning_rate=jnp.ones(3)),
    # Other calls
    "seed": lambda: item().init(seed=-1),
    "traced state": lambda: jax.jit(lambda state: item().grow(state))(item().init()),
    "steps": lambda: item().grow(item().init(), steps=0),
    "no batch": lambda: item().grow(item().init(), {"item": np.array([7])}),
    "steps of a list": lambda: item().grow(item().init(), [7, 8], steps=3),
    "table": lambda: item().export_table(item().init(), "itme"),
    "keys to erase": lambda: item().erase(item().init(), "item", np.array([[7]])),
    "not jitted": lambda: item().ahead(step),
    "no state for ahead": lambda: item().ahead(jax.jit(step))(None),
    "label": lambda: pack(np.array([7]))["label"],
    "mask": lambda: pack(np.array([7])).features.mask("itme"),
    # On a mesh
    "axis": lambda: over(axis="model"),
    "axis without a mesh": lambda: jaxsok.Collection(item().tables, item().features, axis="data"),
    "no mesh": lambda: over(mesh="data"),
    "no axis": lambda: over(axis=3),
    "placement": lambda: jaxsok.TableSpec("item", 4, SGD, placement="replicated"),
    "no shard": lambda: jaxsok.on(-1),
    "on a device that is not there": lambda: over(tables=tables_of(jaxsok.on(2))),
    "dtype of the wire": lambda: jaxsok.ExchangeSpec(rows="int8"),
    "no send_capacity": lambda: jaxsok.ExchangeSpec(send_capacity=0),
    "unknown wire": lambda: jaxsok.ExchangeSpec(wire="nvlink"),
    "windows on CPUs": lambda: over(mesh=mesh_of_cpus(), exchange=jaxsok.ExchangeSpec(wire="window")),
    "not an exchange": lambda: over(exchange="bfloat16"),
    "small send_capacity": lambda: over(
        tables=tables_of(jaxsok.SHARDED, ("item", "user")), exchange=jaxsok.ExchangeSpec(send_capacity=1)
    ),
    "uneven batch": lambda: pack_over(np.arange(3)),
    "uneven device arrays": lambda: pack_over(put(np.arange(3), mesh_of(1), None)),
    "samples on another axis": lambda: over(mesh_of(2, ("model", "data"))).batch(
        {"item": put(np.arange(4), mesh_of(2, ("model", "data")), "model")}
    ),
    "ragged keys and device arrays": lambda: pack_over(
        jaxsok.Bags(jnp.zeros((4, 2), jnp.uint32), lengths=RAGGED.lengths)
    ),
    "keys of one shard": lambda: pack_over(RAGGED, max_keys=6),
    "ragged keys in processes": ragged_in_processes,
    "pad_to": lambda: pack_over(np.arange(3), pad_to=0),
    "too small pad_to": lambda: pack_over(np.arange(3), pad_to=2),
    "pad_to of device arrays": lambda: pack_over(jnp.zeros((3, 2), jnp.uint32), pad_to=4),
    "unlike features": lambda: two_features().batch({"item": np.arange(3), "user": np.arange(2)}, pad_to=4),
    "not named in pmap": inside_pmap,
    "stacked state": lambda: over().grow(over().stack(over().init())),
    "state of another mesh": lambda: item().lookup(over().init(), pack(np.arange(2)).features),
    "state of one device": lambda: over().lookup(item().init(), pack_over(np.arange(2)).features),
    "send_capacity on one device": lambda: item().plan(pack(np.arange(2)).features, send_capacity=(4,)),
    "one send_capacity": lambda: over().plan(pack_over(np.arange(2)).features, send_capacity=4),
    "send_capacity of a plan": lambda: over().plan(pack_over(np.arange(2)).features, send_capacity=(0,)),
    "unlike plans": unlike_plans,
    "half inside": half_inside,
    "stack on one device": lambda: item().stack(item().init()),
    "unlike processes": unlike_processes,
    "max_norm": lambda: clip("large"),
    "negative max_norm": lambda: clip(-1.0),
    "derivative of a lookup": derivative_of_lookup,
    "find over batches": find_over_batches,
    # What a step counted
    "full": lambda: step(item(capacity=2, max_capacity=2))[1].check(),
    "not finite": lambda: step(item(), gradient=np.inf)[1].check(),
    "stale": lambda: stale_step()[1].check(),
    "misused": lambda: update_twice().check(),
    # Memory
    "init": init_without_memory,
    "init in host memory": init_without_host_memory,
    "grow": grow_without_memory,
    "row ids": grow_beyond_all_limits,
    # Libraries
    "CPU library": lambda monkeypatch: load("cpu", False, monkeypatch),
    "CUDA library": lambda monkeypatch: load("cuda", False, monkeypatch),
}


def message_of(provoke, monkeypatch):
    """Returns the last line of the traceback, as Python writes it."""
    with pytest.raises(Exception) as info:
        provoke(monkeypatch) if inspect.signature(provoke).parameters else provoke()
    kind = type(info.value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    return f"{name.replace('jaxsok.types', 'jaxsok')}: {' '.join(str(info.value).split())}"


def quoted_messages():
    """Returns each line of text in docs/errors.md."""
    blocks = blocks_of((ROOT / "docs/errors.md").read_text())
    return [line for language, _, text, _ in blocks if language == "text" for line in text.splitlines()]


@pytest.mark.parametrize("name", PROVOKED)
def test_messages_are_quoted_as_they_are(name, monkeypatch):
    """docs/errors.md quotes the messages of the code."""
    assert message_of(PROVOKED[name], monkeypatch) in quoted_messages()


def test_every_quoted_message_is_provoked():
    """Each message in docs/errors.md is provoked once, so none outlives its error."""
    assert len(quoted_messages()) == len(set(quoted_messages())) == len(PROVOKED)


def test_every_class_of_errors_has_a_row():
    """Each raised class has a row in the table of docs/errors.md."""
    raised = set()
    for name in MODULES:
        for node in ast.walk(ast.parse((ROOT / name).read_text())):
            if isinstance(node, ast.Raise) and node.exc is not None:
                name = ast.unparse(node.exc.func if isinstance(node.exc, ast.Call) else node.exc)
                # Reraised errors, and errors made by a function, have other names here.
                raised |= {part for part in name.split(".") if part[0].isupper()}
    rows = [re.findall(r"`(?:jaxsok\.)?(\w+)`", cells[0]) for cells in table_of(sections(errors_page())["Errors"])]
    assert {name for names in rows for name in names} == raised


def errors_page():
    """Returns the text of docs/errors.md."""
    return (ROOT / "docs/errors.md").read_text()


# Names -----------------------------------------------------------------------------------------------------------


def call_of(name, function):
    """Returns a function as the pages write it: without self and annotations."""
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values() if p.name != "self"]
    text = f"{name}{signature.replace(parameters=parameters, return_annotation=signature.empty)}"
    return re.sub(r"e-0(\d)", r"e-\1", text)


def members_of(kind):
    """Returns the public fields, properties and methods of a class."""
    fields = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    own = {name for name, value in vars(kind).items() if isinstance(value, property) or inspect.isroutine(value)}
    return {name for name in fields | own if not name.startswith("_")}


def public_names(module):
    """Returns a module's public names: its __all__, or its definitions without an underscore."""
    if hasattr(module, "__all__"):
        return module.__all__
    return [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
    ]


def calls_of(module):
    """Returns the public functions of a module with their arguments, and its classes by name."""
    values = {name: getattr(module, name) for name in public_names(module)}
    return [call_of(name, value) if inspect.isfunction(value) else name for name, value in values.items()]


API_MODULES = (
    "jaxsok",
    *(f"jaxsok.{name}" for name in ("optim", "policies", "initializers")),
    *(f"jaxsok.layers.{name}" for name in ("nnx", "linen")),
    *(f"jaxsok.serving{name}" for name in ("", ".nnx", ".linen", ".hps", ".artifact", ".streams")),
    *(f"jaxsok.interchange.{name}" for name in ("hps", "sok", "torchrec", "columns", "npz")),
    *(f"jaxsok.{name}" for name in ("data", "data.criteo", "inspection", "checkpoint")),
)
"""The modules whose names are public, in the order of docs/api.md."""


def listed_names():
    """Returns the public names in docs/api.md by section."""
    text = (ROOT / "docs/api.md").read_text()
    return {name.strip("`"): re.findall(r"^- `(.*)`$", part, re.MULTILINE) for name, part in sections(text).items()}


def value_of(name):
    """Returns the object of a public name; the test is skipped if its module needs a missing package."""
    module, _, attribute = name.rpartition(".")
    module = pytest.importorskip(module.replace("jaxsok.optim", "jaxsok.optimizers"), exc_type=ImportError)
    return getattr(module, attribute)


@pytest.mark.parametrize("section", API_MODULES)
def test_api_page_lists_every_public_name(section):
    """Exactly the public names of a module are in docs/api.md; all except constants have a docstring."""
    module = pytest.importorskip(section.replace("jaxsok.optim", "jaxsok.optimizers"), exc_type=ImportError)
    listed = listed_names()[section]
    assert sorted(listed) == sorted(f"{section}.{name}" for name in public_names(module))
    values = {name: value_of(name) for name in listed}
    assert not [name for name, value in values.items() if callable(value) and not inspect.getdoc(value)]


def test_api_page_has_every_module():
    """Sections that are no modules show classes that no module offers, which public functions return."""
    others = {section: names for section, names in listed_names().items() if section not in (*API_MODULES, "API")}
    assert set(API_MODULES) <= set(listed_names())
    assert all(names == [section] and inspect.isclass(value_of(section)) for section, names in others.items())


@pytest.mark.slow
def test_site_shows_every_public_name(tmp_path):
    """The site builds without a warning, and has an entry for each public name and each member of a class."""
    for package in ("sphinx", "myst_nb", "furo"):
        pytest.importorskip(package, reason=f"needs {package}, which `make docs` installs")
    arguments = ["-D", "nb_execution_mode=off"]  # test_notebooks runs them
    command = [sys.executable, str(ROOT / "scripts/build_site.py"), "--build", str(tmp_path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    from sphinx.util import inventory

    text = (tmp_path / "site/objects.inv").read_bytes()
    found = inventory.InventoryFile.loads(text, uri="")
    shown = {name for kind, items in found.data.items() if kind.startswith("py:") for name in items}
    wanted, values = set(), []
    for name in itertools.chain.from_iterable(listed_names().values()):
        value = value_of(name)
        if inspect.ismodule(value) or any(
            value is other for other in values
        ):  # the latter is shown under its first name
            continue
        values += [value] if callable(value) else []
        wanted |= {name} | ({f"{name}.{member}" for member in members_of(value)} if inspect.isclass(value) else set())
    assert len(wanted) > 500
    assert not wanted - shown


# Numbers ---------------------------------------------------------------------------------------------------------


def test_bytes_of_a_row():
    """The table of docs/memory_layout.md agrees with row_bytes and memory_estimate."""
    rows = table_of(sections((ROOT / "docs/memory_layout.md").read_text())["Bytes of a row"])
    assert len(rows) == 20
    capacity = 1 << 20
    for dim, optimizer, *cells in rows:
        make = getattr(jaxsok.optim, optimizer.strip("`"))
        estimate = jaxsok.memory_estimate([jaxsok.TableSpec("user", int(dim), make(0.1), capacity=capacity)])
        (counted,) = estimate.stores
        parts = [counted.state[name] / capacity for name in ("rows", "optimizer_state", "records", "index")]
        assert [int(number) for number in cells] == [*parts, counted.row_bytes]
        assert int(cells[-1]) == round(estimate.bytes_per_key, 2)


def test_bytes_of_workspaces():
    """docs/memory_layout.md has the bytes of workspaces: per key, and the fixed part."""
    rows = table_of(sections((ROOT / "docs/memory_layout.md").read_text())["What a step needs besides"])
    sizes = {
        "lookup": library.load_cpu().JaxsokInsertWorkspaceBytes,
        "plan": library.load_cpu().JaxsokPlanRequestsWorkspaceBytes,
        "update": lambda num_keys: library.load_cpu().JaxsokUpdateWorkspaceBytes(num_keys, 64),
    }
    assert [name for name, *_ in rows] == [f"`{name}`" for name in sizes]
    num_keys = 1 << 20
    for (name, by_key, once), size in zip(rows, sizes.values(), strict=True):
        assert by_key == f"{(size(2 * num_keys) - size(num_keys)) / num_keys:.1f}", name
        number, unit = once.split()
        assert float(number) == pytest.approx(size(0) / {"KiB": 2**10, "MiB": 2**20}[unit], abs=0.05), name


def test_arrays_of_a_store():
    """The arrays in docs/memory_layout.md are those of a state."""
    rows = table_of(sections((ROOT / "docs/memory_layout.md").read_text())["Arrays of a store"])
    fields = [field.name for field in dataclasses.fields(jaxsok.StoreState)]
    assert [name.strip("`") for name, *_ in rows] == fields
    state = item().init().stores[0]
    for (name, dtype, shape), field in zip(rows, fields, strict=True):
        leaves = jax.tree.leaves(getattr(state, field))
        assert all(leaf.dtype == dtype for leaf in leaves), name
        assert all(shape.count(",") == leaf.ndim - 1 for leaf in leaves) or field == "states"


def test_state_of_optimizers():
    """The table of docs/optimizers.md has the state and arguments that the optimizers declare."""
    rows = table_of(sections((ROOT / "docs/optimizers.md").read_text())["Optimizers"])
    states = {call.strip("`"): state for call, _, state, _ in rows}
    dim = 64
    for call, state in states.items():
        make = getattr(jaxsok.optim, call.split("(")[0])
        assert call == call_of(make.__name__, make)
        assert state == (state_of(make(0.1), dim) or "none")
    # Lifted optimizers have the state of the transformation that they lift.
    calls = {call for call in calls_of(jaxsok.optim) if "(" in call and not call.startswith("lift(")}
    assert set(states) == calls


def state_of(optimizer, dim):
    """Returns an optimizer's state as docs/optimizers.md writes it."""
    specs = optimizer.state_specs(dim)
    return "; ".join(f"`{spec.name}`: {'dim' if spec.dim == dim else spec.dim}, {spec.initial_value}" for spec in specs)


def test_state_of_options():
    """Each option in docs/optimizers.md adds the state in its row."""
    rows = table_of(sections((ROOT / "docs/optimizers.md").read_text())["Momentum and weight decay"])
    values = {"momentum=": 0.9, "eps_in_sqrt=True": True, "eps_in_sqrt=False": False}
    values |= {"centered=True": True, "bias_correction=True": True}
    for call, _, state in rows:
        if "(" not in call:
            continue
        name, option = call.strip("`)").split("(")
        make, argument = getattr(jaxsok.optim, name), option.split("=")[0]
        plain, more = make(0.1), make(0.1, **{argument: values[option]})
        assert state_of(more, 64).removeprefix(state_of(plain, 64)).strip("; ") == state


def test_exact_optimizers():
    """A gradient of zero changes nothing for exactly the optimizers that docs/optimizers.md calls exact."""
    for call, _, _, unused in table_of(sections((ROOT / "docs/optimizers.md").read_text())["Optimizers"]):
        name = call.strip("`").split("(")[0]
        optimizer = getattr(jaxsok.optim, name)(0.1)
        row = jnp.array([0.3, -0.2, 0.1])
        states = tuple(jnp.full(spec.dim, spec.initial_value) for spec in optimizer.state_specs(3))
        seen = []
        for step, gradient in enumerate([[1.0, -2.0, 0.5], [0.5, 1.0, -1.0], [0.0, 0.0, 0.0]]):
            hyper = tuple(jnp.asarray(word, jnp.float32) for word in optimizer.hyper(np.int32(step), 0.1))
            inputs = jaxsok.optim.RowInputs(jnp.array(gradient), row, states, jnp.float32(1), hyper)
            row, states = optimizer.step_row(inputs)
            seen.append((row, states))
        same = jax.tree.map(lambda a, b: bool((a == b).all()), seen[1], seen[2])
        assert unused == ("exact" if jax.tree.all(same) else "lazy"), name


def test_limits():
    """docs/growth.md and docs/concepts.md repeat the limits of the code."""
    assert types.MAX_SLABS == 24 and types.MAX_CAPACITY == 2**31 - 1
    assert constants((ROOT / "ffi/core/layout.h").read_text())["kMaxProbes"] == 64
    assert enlarge.GROWTH_FACTOR == 2.0 and enlarge.GENTLE_FACTOR == 1.25 and grow.LOOK_EVERY == 64
    assert grow.FIRST_CALLS == 32 and grow.FIRST_SHARE == 16
    assert store.MIN_BUCKETS == 16


def constants(text):
    """Returns the integers that a C++ header names, constants and enumerators, by name."""
    text = re.sub(r"//[^\n]*", "", text)
    found = re.findall(r"\b(k\w+) = (~?)(?:uint\d+_t)?\{?(\d+)\}?(?: << (\d+))?[,;]", text)
    return {
        name: ~int(number) if inverted else int(number) << int(shift or 0) for name, inverted, number, shift in found
    }


def test_words_of_python_and_cpp():
    """jaxsok/types.py and ffi/core/ name the same numbers."""
    layout = constants((ROOT / "ffi/core/layout.h").read_text())
    update = constants((ROOT / "ffi/core/row_update.h").read_text())

    def words(prefix, names):
        return [layout[prefix + "".join(word.capitalize() for word in name.split("_"))] for name in names]

    assert words("k", types.COUNTERS) == list(range(layout["kNumCounters"]))
    assert words("kCount", [name.removeprefix("num_") for name in types.COUNTS]) == list(range(layout["kNumCounts"]))
    assert words("kCombiner", [str(name) for name in types.COMBINERS]) == list(types.COMBINERS.values())
    for name, number in types.ROW_GRADIENTS.items():
        assert update[f"kRowGradient{name.capitalize()}"] == number
    rows = constants((ROOT / "ffi/core/row_dtype.h").read_text())
    assert words("kRowDtype", types.ROW_DTYPES) == list(types.ROW_DTYPES.values())
    for name, number in types.ROUNDINGS.items():
        assert rows[f"kRounding{name.capitalize()}"] == number
    assert layout["kPaddingKey"] % 2**64 == types.PADDING_KEY and layout["kNoRow"] % 2**32 == types.NO_ROW
    assert layout["kEntriesPerBucket"] == types.ENTRIES_PER_BUCKET and layout["kBagsPerTile"] == types.BAGS_PER_TILE
    assert layout["kMaxSlabs"] == types.MAX_SLABS and layout["kMaxDim"] == types.MAX_DIM
    launch = constants((ROOT / "ffi/kernels/launch_cuda.cuh").read_text())
    assert launch["kMaxFeatures"] == types.MAX_FEATURES
    assert layout["kNumFeatureWords"] == types.NUM_FEATURE_WORDS
    assert layout["kNumTableWords"] == types.NUM_TABLE_WORDS and update["kNumHyper"] == types.NUM_HYPER


# Words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [page for page in ALL_MARKDOWN if "decisions/" not in page and page != "CHANGELOG.md"])
def test_pages_use_plain_words(page):
    """The text of pages avoids words that need a second reading; records are not edited."""
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    assert not re.findall(r"\b(?:beside|nobody|whoever|anew|(?:is|are|was|were) told)\b", text, re.IGNORECASE)


# Links -----------------------------------------------------------------------------------------------------------


def anchor_of(heading):
    """Returns the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-")


def links_of(page):
    """Returns the targets of a page's links that lead to files of the project."""
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"https?:|mailto:", link)]


@pytest.mark.parametrize("page", ALL_MARKDOWN)
def test_links_exist(page):
    """The files, folders and headings that a page links to exist."""
    for link in links_of(page):
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page}: {link}"
        assert target.resolve().is_relative_to(ROOT), f"{page}: {link}"
        if anchor:
            assert anchor in map(anchor_of, sections(target.read_text())), f"{page}: {link}"


def test_files_that_pages_name_exist():
    """A path of the project in a page's code font exists, unless it has a placeholder."""
    named = {
        (page, path)
        for page in PAGES
        for path in re.findall(
            r"`((?:jaxsok|ffi|tests|benchmarks|examples|docs|scripts)/[\w./]+)`", (ROOT / page).read_text()
        )
    }
    assert named
    assert not [(page, path) for page, path in sorted(named) if not (ROOT / path).exists()]


def test_every_page_is_found_from_the_index():
    """docs/index.md and the site's navigation lead to all pages and notebooks; docs/performance.md leads to results."""
    linked = {
        (ROOT / "docs" / link).resolve() for page in ("index", "performance") for link in links_of(f"docs/{page}.md")
    }
    assert {*ROOT.glob("docs/**/*.md"), *NOTEBOOKS} - {ROOT / "docs/index.md"} <= linked
