"""Exported models: any batch size, other tables, another process; damaged or foreign files are refused with reasons."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from serving_layer_cases import draw_bags, draw_keys, make_tables

import jaxsok
from jaxsok import keys as keys_lib
from jaxsok.serving import artifact, frozen, group, linen, nnx
from jaxsok.serving.errors import RequestError, ServingError, UnknownTableError
from jaxsok.serving.fused import LookupInput, lookup

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = ["cuda" if jax.default_backend() == "gpu" else "cpu"]


@pytest.fixture(autouse=True)
def _whole_products():
    """Sets full precision of matrix products, which a GPU reduces by default."""
    with jax.default_matmul_precision("highest"):
        yield


TABLES = [
    frozen.FrozenTable("user", 6, default=-0.5),
    frozen.FrozenTable("item", 6),
    frozen.FrozenTable("ad", 3, default=0.25, dtype="int8"),
]

INPUTS = {
    "user": artifact.KeysInput("user"),
    "ads": artifact.KeysInput("ad", shape=(2,)),
    "seen": artifact.BagsInput("item", is_weighted=True),
    "liked": artifact.BagsInput("item"),
    "dense": artifact.ArrayInput((4,)),
}

KERNEL = np.random.default_rng(0).normal(size=(6 + 6 + 6 + 6 + 4, 2)).astype(np.float32)


def model(tables, inputs):
    """Applies a fused lookup and a dense layer; one result has no row for each sample."""
    found = lookup(
        tables,
        {
            "user": inputs["user"],
            "ads": LookupInput("ad", inputs["ads"]),
            "seen": LookupInput(
                "item", inputs["seen"].keys, "mean", offsets=inputs["seen"].offsets, weights=inputs["seen"].weights
            ),
            "liked": LookupInput("item", inputs["liked"].keys, "sum", offsets=inputs["liked"].offsets, max_norm=1.5),
        },
    )
    x = [found["user"], found["ads"].reshape(-1, 6), found["seen"], found["liked"], inputs["dense"]]
    return {
        "scores": jnp.matmul(jnp.concatenate(x, axis=-1), KERNEL, precision="highest"),
        "user": found["user"],
        "weights": jnp.asarray(KERNEL[:2]),
    }


def batch(seed, size, num_rows=40):
    """Returns inputs of the model, and its bags as lists."""
    rng = np.random.default_rng(seed)
    seen, seen_pairs = draw_bags(rng, 1, size, is_weighted=True, num_rows=num_rows)
    liked, liked_pairs = draw_bags(rng, 1, size, num_rows=num_rows)
    inputs = {
        "user": draw_keys(rng, 0, size, num_rows),
        "ads": draw_keys(rng, 2, (size, 2), num_rows),
        "seen": seen,
        "liked": liked,
        "dense": rng.normal(size=(size, 4)).astype(np.float32),
    }
    return inputs, seen_pairs, liked_pairs


def scores(known, inputs, seen, liked):
    """Returns what the model gives, in float64."""
    x = [
        known["user"].each(inputs["user"]),
        known["ad"].each(inputs["ads"]).reshape(-1, 6),
        known["item"].bags(seen, "mean"),
        known["item"].bags(liked, "sum", 1.5),
        inputs["dense"],
    ]
    return np.concatenate(x, axis=-1) @ KERNEL.astype(np.float64)


@functools.cache
def tables():
    """Returns the tables of the export."""
    return make_tables(TABLES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns the folder of the exported model."""
    path = tmp_path_factory.mktemp("artifact") / "model"
    artifact.export_model(path, model, tables()[0], INPUTS)
    return path


@pytest.fixture(scope="module")
def served(folder):
    """Returns the loaded model."""
    return artifact.load_model(folder)


def assert_serves(served, given, known, size, seed=1, num_rows=40, **options):
    inputs, seen, liked = batch(seed, size, num_rows)
    out = served.call(given, inputs, **options)
    assert list(out) == ["scores", "user", "weights"]
    np.testing.assert_allclose(out["scores"], scores(known, inputs, seen, liked), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(out["user"], known["user"].each(inputs["user"]), rtol=1e-6)
    np.testing.assert_array_equal(out["weights"], KERNEL[:2])


def test_it_says_what_it_wants_and_gives(served, folder):
    assert served.inputs == INPUTS
    assert served.tables == {table.name: table for table in TABLES}
    assert served.outputs == {
        "scores": artifact.OutputSpec(("b", 2), "float32"),
        "user": artifact.OutputSpec(("b", 6), "float32"),
        "weights": artifact.OutputSpec((2, 2), "float32"),
    }
    assert [name for name, output in served.outputs.items() if output.is_batched] == ["scores", "user"]
    assert served.platforms == ("cpu", "cuda")
    assert sorted(path.name for path in folder.iterdir()) == ["model.json", "model.stablehlo"]
    # The file holds neither rows nor index, so it does not grow with the tables.
    assert (folder / "model.stablehlo").stat().st_size < 200_000


@pytest.mark.parametrize("size", [1, 7, 33])
def test_one_file_serves_every_batch_size(served, size):
    assert_serves(served, *tables(), size, seed=size)


def test_bits_are_those_of_the_model(served):
    given, _ = tables()
    inputs, _, _ = batch(2, 9)
    words = {name: jnp.asarray(keys_lib.to_words(inputs[name], "test")) for name in ("user", "ads")}
    bags = {
        name: jaxsok.Bags(
            jnp.asarray(keys_lib.to_words(inputs[name].keys, "test")),
            offsets=jnp.asarray(inputs[name].offsets, jnp.int32),
            weights=None if inputs[name].weights is None else jnp.asarray(inputs[name].weights),
        )
        for name in ("seen", "liked")
    }
    wanted = model(given, {**words, **bags, "dense": jnp.asarray(inputs["dense"])})
    got = served.call(given, inputs)
    np.testing.assert_array_equal(got["user"], wanted["user"])
    again = served.call(given, {**inputs, **words})
    np.testing.assert_array_equal(again["scores"], got["scores"])


def test_outputs_between_samples_are_neither_padded_nor_joined(tmp_path):
    """A sample's row has a number for each sample: padding would add columns, and joining those of other clients."""
    given, _ = make_tables([frozen.FrozenTable("user", 4)])
    gram = lambda tables, inputs: {"gram": inputs["x"] @ inputs["x"].T}  # noqa: E731
    artifact.export_model(tmp_path / "model", gram, given, {"x": artifact.ArrayInput((2,))})
    served, x = artifact.load_model(tmp_path / "model"), np.arange(6, dtype=np.float32).reshape(3, 2)
    assert served.outputs["gram"].shape == ("b", "b") and not served.is_per_sample
    np.testing.assert_array_equal(served.call(given, {"x": x})["gram"], x @ x.T)


def test_tables_can_be_replaced(served):
    for num_rows, spare_rows in [(300, 0), (5, 1000)]:
        assert_serves(served, *make_tables(TABLES, 1, num_rows, spare_rows), 7, num_rows=num_rows)


def test_tables_may_lie_elsewhere_and_have_other_defaults(served):
    order = [
        frozen.FrozenTable("other", 4),
        frozen.FrozenTable("item", 6, default=3.0),
        frozen.FrozenTable("ad", 3, default=-1.0, dtype="int8"),
        frozen.FrozenTable("more", 6, default=9.0),
        frozen.FrozenTable("user", 6, default=1.0),
    ]
    given, known = make_tables(order, seed=3)
    rng = np.random.default_rng(4)
    bags, pairs = draw_bags(rng, 1, 6)
    ones = [[(key, 1.0) for key, _ in bag] for bag in pairs]
    weighted = jaxsok.Bags(bags.keys, offsets=bags.offsets, weights=np.ones(bags.keys.size, np.float32))
    inputs = {"user": draw_keys(rng, 4, 6), "ads": draw_keys(rng, 2, (6, 2)), "seen": weighted, "liked": bags}
    inputs["dense"] = np.zeros((6, 4), np.float32)
    got = served.call(given, inputs)
    np.testing.assert_allclose(got["scores"], scores(known, inputs, ones, ones), rtol=1e-4, atol=1e-5)
    assert (np.asarray(got["user"]) == 1.0).any()


@pytest.mark.parametrize("size", [0, 1, 8, 13])
def test_padded_calls_give_the_same(served, size):
    given, known = tables()
    assert_serves(served, given, known, size, seed=size, pad=True)


def test_a_lookup_is_one_call_with_the_bits_of_a_call_for_each_input(tmp_path):
    """Two stores and four inputs make one call; an artifact whose model looks each input up by itself makes four."""
    given, _ = tables()

    def read(tables, inputs):
        seen = LookupInput("item", inputs["seen"].keys, "mean", inputs["seen"].offsets, inputs["seen"].weights)
        liked = LookupInput("item", inputs["liked"].keys, "sum", inputs["liked"].offsets)
        return {"user": inputs["user"], "ads": LookupInput("ad", inputs["ads"]), "seen": seen, "liked": liked}

    def at_once(tables, inputs):
        return lookup(tables, read(tables, inputs))

    def one_by_one(tables, inputs):
        return {name: lookup(tables, {name: mine})[name] for name, mine in read(tables, inputs).items()}

    of_both, declared = [], {name: spec for name, spec in INPUTS.items() if name != "dense"}
    inputs = {name: mine for name, mine in batch(3, 16)[0].items() if name != "dense"}
    for function, num_calls in ((at_once, 1), (one_by_one, 4)):
        artifact.export_model(tmp_path / function.__name__, function, given, declared)
        served = artifact.load_model(tmp_path / function.__name__)
        lowered = served._program.lower(*served._bind(given), served.read(inputs)[0]).as_text()
        assert lowered.count("stablehlo.custom_call @jaxsok_lookup") == num_calls
        of_both.append(served.call(given, inputs))
    for name, value in of_both[0].items():
        np.testing.assert_array_equal(value, of_both[1][name], err_msg=name)


def test_the_second_program_of_earlier_versions_is_not_read(folder, tmp_path):
    """Until decision 0039 an artifact had a second program, with a call for each input."""
    path, manifest = _copy(folder, tmp_path / "model"), artifact.model.MANIFEST
    content = json.loads((path / manifest).read_text()) | {"unfused": {"bytes": 1, "sha256": "0"}}
    content["sha256"] = artifact.model._digest(content)
    (path / manifest).write_text(json.dumps(content))
    (path / "model_unfused.stablehlo").write_bytes(b"1")
    assert_serves(artifact.load_model(path), *tables(), 7)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_models_of_a_training_on_a_mesh(axis_type, tmp_path):
    """A folder that was written under `jax.set_mesh`, of parameters on a mesh, is for one device, as any other."""
    given, _ = tables()
    mesh = programs.mesh(2, axis_type=axis_type)
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    declared = {"user": artifact.KeysInput("user"), "seen": artifact.BagsInput("item")}
    bags, _ = draw_bags(np.random.default_rng(7), 1, 5)
    inputs = {"user": draw_keys(np.random.default_rng(7), 0, 5), "seen": bags}
    module = LinenModel()
    variables = module.init(jax.random.key(0), **inputs)
    placed = variables | {"params": jax.device_put(variables["params"], whole)}
    nnx_module = NnxModel()
    kernel = nnx_module.out.kernel
    with jax.set_mesh(mesh):
        artifact.export_model(tmp_path / "linen", module, given, declared, variables=placed, platforms=HERE)
        kernel.set_value(jax.device_put(kernel.get_value(), split))
        artifact.export_model(tmp_path / "nnx", nnx_module, given, declared, platforms=HERE)
    artifact.export_model(tmp_path / "linen alone", module, given, declared, variables=variables, platforms=HERE)
    kernel.set_value(jax.device_get(kernel.get_value()))
    artifact.export_model(tmp_path / "nnx alone", nnx_module, given, declared, platforms=HERE)
    for name in ("linen", "nnx"):
        got, wanted = (artifact.load_model(tmp_path / each).call(given, inputs) for each in (name, f"{name} alone"))
        np.testing.assert_array_equal(got["output"], wanted["output"])
    if axis_type == AxisType.Auto:
        constrain = lambda tables, inputs: jax.lax.with_sharding_constraint(inputs["x"], whole)  # noqa: E731
        with pytest.raises(ValueError, match="export_model: model: got one for 2 devices, wanted one for a single"):
            artifact.export_model(tmp_path / "two", constrain, given, {"x": artifact.ArrayInput()}, platforms=HERE)


def test_padded_calls_share_programs(served):
    given, _ = tables()
    before = served._program._cache_size()
    for size in (17, 20, 31, 32):
        inputs, _, _ = batch(0, size)
        bags = {name: jaxsok.Bags(np.arange(size), offsets=np.arange(size + 1)) for name in ("seen", "liked")}
        bags["seen"] = jaxsok.Bags(np.arange(size), offsets=np.arange(size + 1), weights=np.ones(size, np.float32))
        served.call(given, {**inputs, **bags}, pad=True)
    assert served._program._cache_size() <= before + 1


def test_bags_in_every_form(served):
    given, known = tables()
    inputs, _, _ = batch(5, 4)
    rows = np.array([[0, 3], [6, 9], [2**64 - 1, 1], [1, 1]], np.uint64)
    weights = np.array([[1.0, 2.0], [0.5, 0.25], [1.0, 1.0], [1.0, -1.0]], np.float32)
    pairs = [list(zip(keys, line, strict=True)) for keys, line in zip(rows.tolist(), weights.tolist(), strict=True)]
    ones = [[(key, 1.0) for key, _ in bag] for bag in pairs]
    wanted = scores(known, inputs, pairs, ones)
    for form in ({}, {"lengths": np.full(4, 2)}, {"offsets": np.arange(5) * 2}):
        flat = (lambda array: array) if not form else (lambda array: array.reshape(-1))
        bags = {
            "seen": jaxsok.Bags(flat(rows), weights=flat(weights), **form),
            "liked": jaxsok.Bags(flat(rows), **form),
        }
        got = served.call(given, {**inputs, **bags})
        np.testing.assert_allclose(got["scores"], wanted, rtol=1e-4, atol=1e-5)
    none = jaxsok.Bags(np.zeros(0, np.uint64), lengths=np.zeros(4, int))
    weightless = jaxsok.Bags(np.zeros(0, np.uint64), lengths=np.zeros(4, int), weights=np.zeros(0, np.float32))
    got = served.call(given, {**inputs, "seen": weightless, "liked": none})
    empty = [[]] * 4
    np.testing.assert_allclose(got["scores"], scores(known, inputs, empty, empty), rtol=1e-4, atol=1e-5)


def test_the_program_for_cuda_is_in_the_file(folder):
    from jax import export

    exported = export.deserialize(bytearray((folder / "model.stablehlo").read_bytes()))
    assert exported.platforms == ("cpu", "cuda")
    assert "jaxsok_lookup_frozen" in exported.mlir_module()
    # One call for all inputs, and one that combines rows which were clipped.
    assert exported.mlir_module().count("stablehlo.custom_call @jaxsok_lookup_frozen") == 2


FRESH = """
import sys
import numpy as np
from jaxsok import Bags, Records
from jaxsok.serving import artifact, frozen
served = artifact.load_model(sys.argv[1])
assert not [name for name in sys.modules if name.split(".")[0] in ("flax", "optax", "orbax")]
given = np.load(sys.argv[2])
sources = []
for name, table in served.tables.items():
    records = Records(given[f"{name}.keys"], given[f"{name}.rows"])
    sources.append((table, frozen.SizedRecords(len(records.keys), [records])))
tables = frozen.freeze_records(sources)[0]
inputs = {name: given[name] for name in ("user", "ads", "dense")}
for name in ("seen", "liked"):
    weights = given["seen.weights"] if name == "seen" else None
    inputs[name] = Bags(given[name], offsets=given[f"{name}.offsets"], weights=weights)
np.save(sys.argv[3], np.asarray(served.call(tables, inputs)["scores"]))
"""


def test_a_fresh_process_serves_it(folder, tmp_path):
    _, known = tables()
    inputs, seen, liked = batch(6, 5)
    arrays = {name: inputs[name] for name in ("user", "ads", "dense")}
    for name in ("seen", "liked"):
        arrays |= {name: inputs[name].keys, f"{name}.offsets": inputs[name].offsets}
    arrays["seen.weights"] = inputs["seen"].weights
    for name, array in known.items():
        arrays |= {
            f"{name}.keys": np.array(list(array.rows), np.uint64),
            f"{name}.rows": np.array(list(array.rows.values()), np.float32),
        }
    np.savez(tmp_path / "given.npz", **arrays)
    command = [sys.executable, "-c", FRESH, folder, tmp_path / "given.npz", tmp_path / "scores.npy"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    wanted = scores(known, inputs, seen, liked)
    np.testing.assert_allclose(np.load(tmp_path / "scores.npy"), wanted, rtol=1e-4, atol=1e-5)


# Modules -------------------------------------------------------------------------------------------------------------


class NnxModel(flax.nnx.Module):
    """A model of NNX: a group and a dense layer."""

    def __init__(self):
        specs = {"user": "user", "seen": group.LookupSpec("item", "mean")}
        self.embed = nnx.LookupLayers(specs)
        self.out = flax.nnx.Linear(12, 1, rngs=flax.nnx.Rngs(0))

    def __call__(self, user, seen):
        found = self.embed({"user": user, "seen": seen})
        return self.out(jnp.concatenate([found["user"], found["seen"]], axis=-1))


class LinenModel(flax.linen.Module):
    """The same model in Linen."""

    @flax.linen.compact
    def __call__(self, user, seen):
        user = linen.LookupLayer("user", dim=6)(user)
        seen = linen.SparseLookupLayer("item", dim=6)(seen)
        return flax.linen.Dense(1)(jnp.concatenate([user, seen], axis=-1))


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_modules_are_exported(kind, tmp_path):
    given, _ = tables()
    rng = np.random.default_rng(7)
    bags, pairs = draw_bags(rng, 1, 5)
    inputs = {"user": draw_keys(rng, 0, 5), "seen": bags}
    declared = {"user": artifact.KeysInput("user"), "seen": artifact.BagsInput("item")}
    if kind == "nnx":
        module = NnxModel()
        artifact.export_model(tmp_path / "model", module, given, declared, platforms=HERE)
        dense = module.out.kernel[...], module.out.bias[...]
    else:
        module = LinenModel()
        variables = module.init(jax.random.key(0), **inputs)
        artifact.export_model(tmp_path / "model", module, given, declared, variables=variables, platforms=HERE)
        dense = variables["params"]["Dense_0"]["kernel"], variables["params"]["Dense_0"]["bias"]
    larger, known = make_tables(TABLES, seed=8, num_rows=90)
    out = artifact.load_model(tmp_path / "model").call(larger, inputs)["output"]
    x = np.concatenate([known["user"].each(inputs["user"]), known["item"].bags(pairs, "mean")], axis=-1)
    wanted = x @ np.asarray(dense[0], np.float64) + np.asarray(dense[1], np.float64)
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-5)


# Refusals ------------------------------------------------------------------------------------------------------------


def test_bad_exports_are_refused_and_leave_nothing(tmp_path):
    given, _ = tables()
    inputs_of_user = {"user": artifact.KeysInput("user")}
    path = tmp_path / "model"

    def expect_refusal(kind, message, *arguments, **options):
        with pytest.raises(kind, match=message):
            artifact.export_model(path, *arguments, **options)
        assert list(tmp_path.iterdir()) == []

    first = lambda tables, inputs: lookup(tables, {"user": inputs["user"]})["user"]  # noqa: E731
    expect_refusal(TypeError, "tables: got int", first, 3, inputs_of_user)
    expect_refusal(ValueError, "platforms: got \\('tpu',\\)", first, given, inputs_of_user, platforms=("tpu",))
    expect_refusal(ValueError, "platforms: got 'cpu'", first, given, inputs_of_user, platforms="cpu")
    expect_refusal(TypeError, "inputs: got {}", first, given, {})
    expect_refusal(TypeError, 'inputs\\["user"\\]: got tuple', first, given, {"user": (3,)})
    expect_refusal(UnknownTableError, "'usr', wanted one of", first, given, {"user": artifact.KeysInput("usr")})
    expect_refusal(TypeError, "model: got int", 3, given, inputs_of_user)
    expect_refusal(TypeError, "variables: got some for function", first, given, inputs_of_user, variables={})
    expect_refusal(TypeError, "variables: got none", LinenModel(), given, inputs_of_user)
    expect_refusal(TypeError, "got tuple as its result 'output'", lambda tables, inputs: (1, 2), given, inputs_of_user)
    expect_refusal(ValueError, "got no results", lambda tables, inputs: {}, given, inputs_of_user)
    by_size = lambda tables, inputs: first(tables, inputs) if inputs["user"].shape[0] > 8 else 0.0  # noqa: E731
    expect_refusal(Exception, "(?s)comparison.*b", by_size, given, inputs_of_user)
    path.mkdir()
    with pytest.raises(FileExistsError, match="wanted a new folder"):
        artifact.export_model(path, first, given, inputs_of_user)
    assert list(path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "message", "make"),
    [
        (TypeError, "table: got ''", lambda: artifact.KeysInput("")),
        (TypeError, "table: got 3", lambda: artifact.BagsInput(3)),
        (ValueError, "shape: got \\(0,\\)", lambda: artifact.KeysInput("user", (0,))),
        (TypeError, "shape: got 3", lambda: artifact.ArrayInput(3)),
        (TypeError, "dtype: got 'words'", lambda: artifact.ArrayInput((), "words")),
        (ValueError, "at most 32 bits", lambda: artifact.ArrayInput((), "float64")),
    ],
)
def test_inputs_are_refused_when_declared(kind, message, make):
    with pytest.raises(kind, match=message):
        make()


def test_bad_calls_are_refused(served):
    given, _ = tables()
    good, _, _ = batch(9, 3)
    keys = np.arange(3)

    def expect_refusal(message, kind=RequestError, tables=given, **changes):
        inputs = {name: spec for name, spec in {**good, **changes}.items() if spec is not None}
        with pytest.raises(kind, match=message):
            served.call(tables, inputs)

    expect_refusal("got \\['ads', 'dense', 'liked', 'seen'\\], wanted", user=None)
    expect_refusal("wanted \\['ads'", more=keys)
    expect_refusal('inputs\\["user"\\]: keys', user=keys / 2)
    expect_refusal('inputs\\["user"\\]: keys', user=np.array([True, False, True]))
    expect_refusal("shape \\[3, 1\\], wanted \\[b\\]", user=keys[:, None])
    expect_refusal("shape \\[3\\], wanted \\[b, 2\\]", ads=keys)
    expect_refusal("got batch sizes .*'user': 2", user=keys[:2])
    expect_refusal("got int64\\[3, 4\\]|got complex", dense=np.zeros((3, 4), complex))
    expect_refusal("got <U1", dense=np.full((3, 4), "a"))
    expect_refusal("got shape \\[3, 5\\], wanted \\[b, 4\\]", dense=np.zeros((3, 5), np.float32))
    expect_refusal("got shape \\[\\], wanted", dense=np.float32(3))
    expect_refusal("wanted jaxsok.Bags", liked=keys)
    expect_refusal("inverse: got one", liked=jaxsok.Bags(keys, inverse=keys))
    expect_refusal("weights: got none", seen=jaxsok.Bags(keys))
    expect_refusal("weights: got some", liked=jaxsok.Bags(keys, weights=np.ones(3, np.float32)))
    expect_refusal("weights: got float32\\[2\\]", seen=jaxsok.Bags(keys, weights=np.ones(2, np.float32)))
    expect_refusal("weights: got infinite", seen=jaxsok.Bags(keys, weights=np.full(3, np.nan, np.float32)))
    expect_refusal("both lengths and offsets", liked=jaxsok.Bags(keys, lengths=keys, offsets=keys))
    expect_refusal("offsets: got 2 then 1 at 1", liked=jaxsok.Bags(keys, offsets=np.array([0, 2, 1, 3])))
    expect_refusal(r"offsets: got shape \[0\], wanted", liked=jaxsok.Bags(keys, offsets=np.array([], int)))
    expect_refusal("lengths: got an end at 4, past the end", liked=jaxsok.Bags(keys, lengths=np.array([2, 1, 1])))
    wrapping = np.array([2**63 - 1, 2**63 - 1, 3])  # their sum is 1 in 64 bits
    expect_refusal("lengths: got a bag of 9223372036854775807", liked=jaxsok.Bags(keys, lengths=wrapping))
    expect_refusal("lengths: got -1, wanted no negative", liked=jaxsok.Bags(keys, lengths=np.array([4, -1, 0])))
    expect_refusal("offsets: got float64", liked=jaxsok.Bags(keys, offsets=np.array([0.0, 1, 2, 3])))
    expect_refusal("wanted \\[num_keys\\]", liked=jaxsok.Bags(keys[:, None], offsets=np.array([0, 1, 2, 3])))
    expect_refusal("tables: got int", TypeError, tables=3)
    some, _ = make_tables(TABLES[:2])
    expect_refusal('wanted "ad" among them', UnknownTableError, tables=some)
    other, _ = make_tables([*TABLES[:2], frozen.FrozenTable("ad", 3)])
    expect_refusal('"ad" of float32\\[3\\], wanted int8\\[3\\]', ServingError, tables=other)
    apart = frozen.FrozenTables(
        (make_tables(TABLES[:1])[0].stores[0], make_tables(TABLES[1:2])[0].stores[0], given.stores[1]),
        frozen.FrozenSpec(((TABLES[0],), (TABLES[1],), (TABLES[2],))),
    )
    expect_refusal("in several stores", ServingError, tables=apart)
    with pytest.raises(RequestError, match="wanted a mapping"):
        served.call(given, [keys])
    nothing, _, _ = batch(9, 0)
    with pytest.raises(RequestError, match="batch of no samples"):
        served.call(given, nothing)


def _copy(folder, to):
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint8", "uint32"])
def test_integers_that_do_not_fit_are_refused(dtype, tmp_path):
    """NumPy's 64-bit integers that do not fit a narrower input are refused, and never cut to their low bits."""
    records = jaxsok.Records(np.array([7], np.uint64), np.array([[1.0]], np.float32))
    tables, _ = frozen.freeze_records([(frozen.FrozenTable("item", dim=1), frozen.SizedRecords(1, [records]))])

    def model(tables, inputs):
        return {"x": inputs["x"]}

    artifact.export_model(tmp_path / "model", model, tables, {"x": artifact.ArrayInput((), dtype)})
    served, limits = artifact.load_model(tmp_path / "model"), np.iinfo(dtype)
    ends = np.array([limits.min, 5, limits.max])
    assert ends.dtype == np.int64
    np.testing.assert_array_equal(served.call(tables, {"x": ends})["x"], ends)
    for wrong in (limits.max + 1, limits.min - 1, 2**32 + 5):
        with pytest.raises(RequestError, match=f"got {wrong}, wanted {limits.min} to {limits.max}, as {dtype} has"):
            served.call(tables, {"x": np.array([1, wrong])})


def test_damaged_and_foreign_folders_are_refused(folder, tmp_path):
    def expect_refusal(message, damage, kind=artifact.ArtifactError):
        path = _copy(folder, tmp_path / f"copy{len(list(tmp_path.iterdir()))}")
        damage(path)
        with pytest.raises(kind, match=message):
            artifact.load_model(path)

    program, manifest = artifact.model.PROGRAM, artifact.model.MANIFEST

    def flip(path):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    def change_sign(path, sign=True, **fields):
        content = json.loads((path / manifest).read_text()) | fields
        if sign:
            content["sha256"] = artifact.model._digest(content)
        (path / manifest).write_text(json.dumps(content))

    expect_refusal("another checksum than the manifest", lambda path: flip(path / program))
    expect_refusal("cut or changed", lambda path: (path / program).write_bytes((path / program).read_bytes()[:-1]))
    expect_refusal("got no such file", lambda path: (path / program).unlink())
    expect_refusal("without model.json", lambda path: (path / manifest).unlink())
    expect_refusal("byte 1: got Expecting", lambda path: (path / manifest).write_text("{"))
    expect_refusal("byte 0: got no text", lambda path: (path / manifest).write_bytes(b"\xff\xfe\x00"))
    expect_refusal("recursion", lambda path: (path / manifest).write_bytes(b'{"format": ' + b"[" * 100_000))
    expect_refusal("got a list in place of an object", lambda path: (path / manifest).write_text("[]"))
    expect_refusal("format None", lambda path: (path / manifest).write_text('{"files": []}'))
    expect_refusal("version 2, wanted 1", lambda path: change_sign(path, version=2))
    expect_refusal("another checksum than it names", lambda path: change_sign(path, sign=False, inputs=[]))
    expect_refusal("inputs", lambda path: change_sign(path, inputs=[{"name": "user", "kind": "text"}]))
    # A manifest with a valid digest: values that are missing or have another type are refused all the same.
    whole = json.loads((folder / manifest).read_text())
    for name in ("jax", "inputs", "outputs", "stores", "program"):
        expect_refusal(f'file ".*{manifest}", {name}', lambda path, name=name: change_sign(path, **{name: None}))
    for name in ("inputs", "outputs", "stores"):
        for key in whole[name][0]:
            bad = [whole[name][0] | {key: [{}]}]
            expect_refusal("model.json", lambda path, name=name, bad=bad: change_sign(path, **{name: bad}))
    expect_refusal("lookups", lambda path: change_sign(path, lookups={"user": "all"}))

    def foreign(path):
        import hashlib

        (path / program).write_bytes(b"no program")
        change_sign(path, program={"bytes": 10, "sha256": hashlib.sha256(b"no program").hexdigest()})

    expect_refusal("does not read", foreign)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        artifact.load_model(tmp_path / "nowhere")


def test_a_program_for_another_platform_is_refused(tmp_path):
    given, _ = tables()
    first = lambda tables, inputs: lookup(tables, {"user": inputs["user"]})["user"]  # noqa: E731
    other = "cuda" if jax.default_backend() == "cpu" else "cpu"
    inputs = {"user": artifact.KeysInput("user")}
    artifact.export_model(tmp_path / "model", first, given, inputs, platforms=[other])
    with pytest.raises(artifact.ArtifactError, match=f"for \\['{other}'\\]"):
        artifact.load_model(tmp_path / "model")


def test_without_flatbuffers_it_says_what_to_install(monkeypatch, folder):
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    with pytest.raises(ImportError, match="jaxsok\\[serving\\]"):
        artifact.load_model(folder)
