"""Tests bad declarations: each raises a clear error, before anything is allocated."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bad_input_cases import BAD_KIND, DIM, SGD, over_two, raises

import jaxsok
from jaxsok import policies


def _float_score(facts):
    return facts.last_step.astype(jnp.float32)


@pytest.mark.parametrize(
    ("kind", "parts", "arguments"),
    [
        (ValueError, ("dim", "0"), {"dim": 0}),
        (ValueError, ("dim", "-3"), {"dim": -3}),
        (TypeError, ("dim", "2.5"), {"dim": 2.5}),
        (ValueError, ("capacity", "0"), {"capacity": 0}),
        (ValueError, ("capacity", "-1"), {"capacity": -1}),
        (TypeError, ("capacity", "1.5"), {"capacity": 1.5}),
        (ValueError, ("max_capacity", "4"), {"capacity": 8, "max_capacity": 4}),
        (ValueError, ("max_capacity", "0"), {"max_capacity": 0}),
        (ValueError, ("dtype", "int8"), {"dtype": "int8"}),
        (ValueError, ("dtype", "bfloat16"), {"dtype": jnp.bfloat16}),
        (ValueError, ("embedding_dtype", "bfloat16"), {"embedding_dtype": "bfloat16"}),
        (ValueError, ("embedding_dtype", "float16"), {"dtype": "bfloat16", "embedding_dtype": "float16"}),
        (ValueError, ("rounding", "up"), {"dtype": "bfloat16", "rounding": "up"}),
        (ValueError, ("row_gradient", "average"), {"row_gradient": "average"}),
        (ValueError, ("unknown", "nan"), {"unknown": "nan"}),
        (TypeError, ("initializer", "glorot"), {"initializer": "glorot"}),
        (TypeError, ("initializer",), {"initializer": np.zeros}),
        (TypeError, ("eviction", "scores float32[3]", "uint32[3]"), {"eviction": policies.LowestScore(_float_score)}),
        (
            TypeError,
            ("eviction", "got 3 scores"),
            {"eviction": policies.LowestScore(lambda facts: (facts.last_step,) * 3)},
        ),
        (TypeError, ("optimizer", "sgd"), {"optimizer": "sgd"}),
        (TypeError, ("optimizer",), {"optimizer": None}),
        (ValueError, ("name",), {"name": ""}),
        (TypeError, ("name", "3"), {"name": 3}),
    ],
)
def test_table_spec(kind, parts, arguments):
    """Bad arguments of TableSpec are refused."""
    with raises(kind, "TableSpec", *parts):
        jaxsok.TableSpec(**{"name": "user", "dim": DIM, "optimizer": SGD, **arguments})


@pytest.mark.parametrize(
    ("kind", "parts", "arguments"),
    [
        (ValueError, ("combiner", "max"), {"combiner": "max"}),
        (ValueError, ("max_keys", "0"), {"max_keys": 0}),
        (ValueError, ("max_keys", "-5"), {"max_keys": -5}),
        (ValueError, ("max_hotness", "0"), {"max_hotness": 0, "combiner": None}),
        (ValueError, ("key_dtype", "int16"), {"key_dtype": "int16"}),
        (ValueError, ("name",), {"name": ""}),
    ],
)
def test_feature_spec(kind, parts, arguments):
    """Bad arguments of FeatureSpec are refused."""
    with raises(kind, "FeatureSpec", *parts):
        jaxsok.FeatureSpec(**{"name": "user", "table": "user", **arguments})


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("num_embeddings", "wanted capacity."),  # torch, TorchRec
        ("vocabulary_size", "wanted capacity."),  # TensorFlow
        ("embedding_dim", "wanted dim."),
        ("init_fn", "wanted initializer."),
        ("pooling", "wanted FeatureSpec(combiner=...)."),
        ("capactiy", "wanted capacity."),
        ("zzz", "wanted name, dim, optimizer, initializer, capacity,"),
    ],
)
def test_arguments_of_other_libraries(name, wanted):
    """An unknown argument of a table is refused with its name in this library."""
    with raises(TypeError, "TableSpec", f"{name}: got an argument of that name", wanted):
        jaxsok.TableSpec("user", **{name: 100})


def test_arguments_of_features_in_other_libraries():
    """Arguments of features get the same help; Python still reports missing arguments."""
    with raises(TypeError, "FeatureSpec: table_name", "wanted table."):
        jaxsok.FeatureSpec("user", table_name="user")
    with raises(TypeError, "FeatureSpec: pooling", "wanted combiner."):
        jaxsok.FeatureSpec("user", "user", pooling="sum")
    with raises(TypeError, "missing", "optimizer"):
        jaxsok.TableSpec("user", DIM)


def test_an_optax_transformation_as_optimizer():
    """The message names the function that makes an optimizer of it."""
    optax = pytest.importorskip("optax")
    with raises(TypeError, "TableSpec", "optimizer", "an Optax", "jaxsok.optim.lift("):
        jaxsok.TableSpec("user", DIM, optax.adam(1e-3))
    jaxsok.TableSpec("user", DIM, jaxsok.optim.lift(optax.adam(1e-3)))
    for function in (optax.adam, jaxsok.optim.adam):
        with raises(TypeError, "TableSpec", "optimizer", "got adam itself", "call it"):
            jaxsok.TableSpec("user", DIM, function)


def test_two_tables_of_one_name():
    """Table names must be distinct, since a key's initial row depends on the name."""
    with raises(ValueError, "Collection", "tables", "user"):
        jaxsok.Collection(
            [jaxsok.TableSpec("user", 4, SGD), jaxsok.TableSpec("user", 8, SGD)], [jaxsok.FeatureSpec("user", "user")]
        )


def test_two_features_of_one_name():
    """Feature names must be distinct, since batches are dictionaries."""
    with raises(ValueError, "Collection", "features", "f"):
        jaxsok.Collection(
            [jaxsok.TableSpec("user", 4, SGD)], [jaxsok.FeatureSpec("f", "user"), jaxsok.FeatureSpec("f", "user")]
        )


def test_unknown_table():
    """A feature over an undeclared table is refused; the message names the declared tables."""
    with raises(ValueError, "Collection", "f", "itme", "item"):
        jaxsok.Collection([jaxsok.TableSpec("item", 4, SGD)], [jaxsok.FeatureSpec("f", "itme")])


@pytest.mark.parametrize(
    ("make", "arguments", "part"),
    [
        (jaxsok.initializers.normal, {"stddev": -1.0}, "stddev"),
        (jaxsok.initializers.truncated_normal, {"stddev": -1.0}, "stddev"),
        (jaxsok.initializers.uniform, {"low": 1.0, "high": 0.0}, "high"),
        (jaxsok.initializers.constant, {"value": float("nan")}, "value"),
        (jaxsok.initializers.constant, {"value": 3.5e38}, "value"),
        (jaxsok.initializers.uniform, {"low": -3e38, "high": 3e38}, "high - low"),
        (jaxsok.initializers.uniform, {"low": -1e300, "high": 1.0}, "low"),
        (jaxsok.initializers.normal, {"stddev": 1e300}, "stddev"),
    ],
)
def test_initializers(make, arguments, part):
    """Numbers that describe no distribution are refused."""
    with raises(ValueError, make.__name__, part):
        make(**arguments)


@pytest.mark.parametrize(
    ("make", "arguments", "part"),
    [
        (jaxsok.optim.adam, {"b1": 1.0}, "b1"),
        (jaxsok.optim.adam, {"b2": -0.1}, "b2"),
        (jaxsok.optim.adam, {"eps": -1.0}, "eps"),
        (jaxsok.optim.adagrad, {"initial_accumulator_value": -1.0}, "initial_accumulator_value"),
        (jaxsok.optim.rowwise_adagrad, {"initial_accumulator_value": -1.0}, "initial_accumulator_value"),
    ],
)
def test_optimizers(make, arguments, part):
    """Hyper-parameters outside their range are refused."""
    with raises(ValueError, make.__name__, part):
        make(0.1, **arguments)


def test_learning_rate_of_a_wrong_kind():
    """A learning rate that is neither a number, nor an array, nor a function is refused."""
    with raises(TypeError, "learning_rate", "fast"):
        jaxsok.optim.sgd("fast")


def test_weights_without_combiner():
    """Rows that are not combined have no weights: the declaration is refused, not ignored."""
    with raises(ValueError, "FeatureSpec", "weight"):
        jaxsok.FeatureSpec("user", "user", combiner=None, weighted=True)


def test_specs_of_wrong_kinds_in_a_collection():
    """A collection takes lists of specs, not of their names."""
    with raises(TypeError, "Collection", "tables"):
        jaxsok.Collection(["user"], [jaxsok.FeatureSpec("f", "user")])
    with raises(TypeError, "Collection", "features"):
        jaxsok.Collection([jaxsok.TableSpec("user", DIM, SGD)], ["user"])


def test_spec_fields_are_checked_when_replaced():
    """dataclasses.replace runs the same checks."""
    with raises(ValueError, "TableSpec", "dim", "0"):
        dataclasses.replace(jaxsok.TableSpec("user", DIM, SGD), dim=0)


# --------------------------------------------------------------------------------------------------------------
# On a mesh


@pytest.mark.parametrize(
    ("kind", "axis", "parts"),
    [
        (ValueError, "model", ("'model'", "data")),
        (ValueError, ("data", "model"), ("'model'", "data")),
        (TypeError, None, ("None", "name")),
        (TypeError, (), ("()", "name")),
        (TypeError, 0, ("0", "name")),
        (TypeError, ("data", "data"), ("data", "tuple")),
    ],
)
def test_axis(kind, axis, parts):
    """The axis must be a name of the mesh or several distinct names; the message lists the names."""
    with raises(kind, "Collection", "axis", *parts):
        over_two(axis=axis)


@dataclasses.dataclass(frozen=True)
class _Device:
    id: int
    process_index: int
    platform: str = "cpu"
    device_kind: str = "none"


def test_processes_with_more_devices_than_others(monkeypatch):
    """JAX cannot place arrays on such a mesh when a checkpoint is loaded, so it is refused from the start."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    mesh = jax.sharding.Mesh(np.array([_Device(0, 0), _Device(1, 0), _Device(2, 1)]), ("data",))
    tables, features = [jaxsok.TableSpec("user", DIM, SGD)], [jaxsok.FeatureSpec("user", "user")]
    with raises(ValueError, "Collection", "mesh", "{0: 2, 1: 1} devices", "as many of each"):
        jaxsok.Collection(tables, features, mesh=mesh, axis="data")


def test_axis_and_mesh_belong_together():
    """A mesh without an axis, an axis without a mesh, and a mesh of another type are refused."""
    tables, features = [jaxsok.TableSpec("user", DIM, SGD)], [jaxsok.FeatureSpec("user", "user")]
    with raises(ValueError, "Collection", "axis", "data", "mesh"):
        jaxsok.Collection(tables, features, axis="data")
    with raises(TypeError, "Collection", "mesh", "list", "jax.make_mesh"):
        jaxsok.Collection(tables, features, mesh=jax.devices(), axis="data")


@pytest.mark.parametrize(("kind", "device"), [(ValueError, -1), (BAD_KIND, 1.0), (BAD_KIND, True), (BAD_KIND, "gpu:0")])
def test_device_of_on(kind, device):
    """The device of `on` must be the number of a shard."""
    with raises(kind, "on", "device", device):
        jaxsok.on(device)


def test_a_device_outside_the_axis():
    """on(2) is refused for two shards; on one device all placements are equal and none is refused."""
    tables = [jaxsok.TableSpec("user", DIM, SGD, capacity=16, placement=jaxsok.on(2))]
    with raises(ValueError, "Collection", "user", "placement", "on(2)", "0 to 1"):
        over_two(tables=tables)
    jaxsok.Collection(tables, [jaxsok.FeatureSpec("user", "user")])


@pytest.mark.parametrize("placement", ["sharded", None, 3])
def test_placement(placement):
    """The message names the three placements."""
    with raises(TypeError, "TableSpec", "user", "placement", placement, "SHARDED", "REPLICATED", "on("):
        jaxsok.TableSpec("user", DIM, SGD, placement=placement)


@pytest.mark.parametrize(
    ("kind", "parts", "arguments"),
    [
        (ValueError, ("rows", "float64"), {"rows": "float64"}),
        (ValueError, ("gradients", "int8"), {"gradients": "int8"}),
        (ValueError, ("send_capacity", "0"), {"send_capacity": 0}),
        (TypeError, ("send_capacity", "1.5"), {"send_capacity": 1.5}),
    ],
)
def test_exchange_spec(kind, parts, arguments):
    """Bad arguments of ExchangeSpec are refused."""
    with raises(kind, "ExchangeSpec", *parts):
        jaxsok.ExchangeSpec(**arguments)


def test_exchange_of_a_collection():
    """The exchange must be a spec with room for one key of each table, since such keys may share a hash."""
    with raises(TypeError, "Collection", "exchange", "bfloat16", "ExchangeSpec"):
        over_two(exchange="bfloat16")
    tables = [jaxsok.TableSpec(name, DIM, SGD, capacity=16) for name in ("user", "item")]
    with raises(ValueError, "Collection", "exchange", "send_capacity", "got 1", "at least 2"):
        over_two(tables=tables, exchange=jaxsok.ExchangeSpec(send_capacity=1))
