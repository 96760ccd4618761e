"""Bad input: a clear error before anything changes. Each message names the op, the argument and the actual value."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

import jaxsok

DIM = 4
SGD = jaxsok.optim.sgd(1.0)
BAD_KIND = (TypeError, ValueError)  # a number of another kind may also count as a wrong value


def raises(kind, *parts):
    """Expects an error of one kind whose message has all the parts (op, argument, actual value), whatever the case."""
    return _Raises(kind, parts)


class _Raises:
    def __init__(self, kind, parts):
        self.expected, self.parts = pytest.raises(kind), parts

    def __enter__(self):
        self.info = self.expected.__enter__()
        return self.info

    def __exit__(self, *error):
        if not self.expected.__exit__(*error):
            return False  # another kind of error: pytest shows it
        message = str(self.info.value)
        for part in self.parts:
            assert str(part).lower() in message.lower(), f"{part!r} is not in: {message}"
        return True


# --------------------------------------------------------------------------------------------------------------
# Specs fail when they are declared


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


# --------------------------------------------------------------------------------------------------------------
# Batches fail on the host


@pytest.fixture(scope="module")
def collection():
    """Returns a collection of one plain feature, ragged or not, of at most eight keys."""
    return programs.one_table(max_keys=8)


@pytest.fixture(scope="module")
def weighted():
    """Returns a collection of one weighted feature."""
    return programs.one_table(max_keys=8, weighted=True)


@pytest.mark.parametrize(
    ("kind", "value", "parts"),
    [
        (TypeError, np.array([1.0, 2.0], np.float32), ("float32",)),
        (TypeError, np.array([True, False]), ("bool",)),
        (TypeError, np.array(["a", "b"]), ()),
        (TypeError, np.array([1, 2], object), ("object",)),
        (TypeError, np.array([1 + 2j]), ("complex",)),
        (TypeError, np.ma.array([1, 2], mask=[0, 1]), ("masked", "filled(-1)")),
        (TypeError, jaxsok.Bags(np.ma.array([1, 2], mask=[0, 1]), lengths=np.array([2])), ("masked", "filled(-1)")),
        (BAD_KIND, "keys", ()),
        (BAD_KIND, None, ()),
        (ValueError, np.zeros((2, 3, 4), np.int64), ("2, 3, 4",)),
        (ValueError, np.int64(3), ()),
        (ValueError, jaxsok.Bags(np.zeros((2, 2), np.int64), lengths=np.array([2, 2])), ()),
        (TypeError, jaxsok.Bags(np.array([1.5, 2.5]), lengths=np.array([2])), ("float64",)),
    ],
)
def test_keys(collection, kind, value, parts):
    """A wrong dtype, a wrong rank and missing keys are refused."""
    with raises(kind, "batch", "user", *parts):
        collection.batch({"user": value})


def test_masked_arrays(collection):
    """Their hidden elements are never used: everything that takes arrays refuses them."""
    masked, keys = np.ma.array([1, 2], mask=[0, 1]), np.array([1, 2])
    ones, state = np.array([1, 1]), collection.init(seed=0)
    dim = collection.tables[0].dim
    rows = np.ones((2, dim), np.float32)
    hidden = np.ma.array(rows, mask=rows > 0)
    coo = lambda **given: {"user": jaxsok.Coo(**{"indices": keys - 1, "keys": keys, "shape": (2,)} | given)}  # noqa: E731
    records = lambda **given: [jaxsok.Records(**{"keys": keys.astype(np.uint64), "rows": rows} | given)]  # noqa: E731
    for name, call in {
        "values": lambda: jaxsok.from_kjt(masked, ones, ["user"]),
        "lengths": lambda: jaxsok.from_kjt(keys, masked, ["user"]),
        "weights": lambda: jaxsok.from_kjt(keys, ones, ["user"], weights=masked),
        "keys": lambda: collection.batch(coo(keys=masked)),
        "indices": lambda: collection.batch(coo(indices=masked)),
        "keys ": lambda: collection.assign(state, "user", masked, rows),
        "rows": lambda: collection.assign(state, "user", keys, hidden),
        "keys  ": lambda: collection.erase(state, "user", masked),
        "keys   ": lambda: collection.contains(state, "user", masked),
        "keys    ": lambda: collection.import_table(state, "user", records(keys=masked)),
        "rows ": lambda: collection.import_table(state, "user", records(rows=hidden)),
        "last_step": lambda: collection.import_table(state, "user", records(last_step=masked)),
    }.items():
        with raises(TypeError, f"{name.strip()}: got a masked array, wanted a plain one"):
            call()


@pytest.mark.parametrize("lists", [[[1, 2], [3]], [[], [3]], [np.array([1, 2]), np.array([3])]])
def test_ragged_lists(collection, lists):
    """The message suggests Bags, since NumPy's own message does not help."""
    with raises(ValueError, "batch", "user", "keys", "different lengths", "Bags(np.concatenate(lists), lengths="):
        collection.batch({"user": lists})
    bags = jaxsok.Bags(np.concatenate([np.array(keys, np.int64) for keys in lists]), lengths=[len(k) for k in lists])
    assert collection.batch({"user": bags}).features.offsets("user").shape == (3,)


def test_empty_lists(collection):
    """A list of no samples is refused; keys of empty bags may be an empty list, which NumPy reads as floats."""
    with raises(ValueError, "batch", "user", "keys", "empty list", "Bags([], lengths="):
        collection.batch({"user": []})
    with raises(ValueError, "batch", "user", "keys", "[2, 0]", "Bags(keys, lengths="):
        collection.batch({"user": [[], []]})
    features = collection.batch({"user": jaxsok.Bags([], lengths=[0, 0])}).features
    assert np.asarray(features.offsets("user")).tolist() == [0, 0, 0]
    with raises(TypeError, "batch", "user", "float64"):
        collection.batch({"user": np.array([])})


class Frame:
    """A table of columns that is no mapping, like those of pandas and Polars."""

    columns = ("user",)

    def __getitem__(self, name):
        return np.array([7, 9])


def test_a_data_frame(collection):
    """A data frame is not a mapping; the message states how to convert it."""
    raw = Frame()
    with raises(TypeError, "batch", "raw", "got Frame", "{name: raw[name] for name in raw.columns}"):
        collection.batch(raw)
    collection.batch({name: raw[name] for name in raw.columns})


def test_data_frames_of_libraries(collection):
    """The message uses `columns` of Polars and `column_names` of pyarrow."""
    polars, pyarrow = pytest.importorskip("polars"), pytest.importorskip("pyarrow")
    frame, table = polars.DataFrame({"user": [7, 9]}), pyarrow.table({"user": [7, 9]})
    with raises(TypeError, "got DataFrame", "for name in raw.columns}"):
        collection.batch(frame)
    with raises(TypeError, "got Table", "for name in raw.column_names}"):
        collection.batch(table)
    for raw, names in ((frame, frame.columns), (table, table.column_names)):
        assert collection.batch({name: raw[name] for name in names}).features.keys("user").tolist() == [[7, 0], [9, 0]]


@pytest.mark.parametrize("is_on_mesh", [False, True])
@pytest.mark.parametrize("shape", [(3,), (5,), (1,), (0,), (3, 1)])
def test_labels_of_another_number_of_samples(collection, is_on_mesh, shape):
    """A column has a row for each sample; other labels may have any size."""
    declared = over_two() if is_on_mesh else collection
    keys = np.arange(4)
    for make in (np.zeros, jnp.zeros):
        with raises(ValueError, "batch", 'entry "label"', f"got shape {list(shape)}", "wanted [4]", "tuple"):
            declared.batch({"user": keys, "label": make(shape)})
    with raises(ValueError, "batch", 'entry "label"', "wanted [4]"):
        declared.batch({"user": jaxsok.Bags(np.arange(6), lengths=[1, 2, 3, 0]), "label": np.zeros(shape)})
    kept = {"scale": np.float32(2.0), "table": np.ones((5, 2)), "weights": (np.zeros(shape),), "note": "text"}
    batch = declared.batch({"user": keys, "label": np.zeros(4), **kept})
    assert all(batch[name] is value for name, value in kept.items())


@pytest.mark.parametrize("is_on_mesh", [False, True])
@pytest.mark.parametrize(
    "friend",
    [
        np.arange(2),
        np.arange(6).reshape(6, 1),
        jaxsok.Bags(np.arange(4), lengths=[2, 2]),
        jaxsok.Bags(np.arange(4), offsets=[0, 1, 4]),
        jaxsok.Bags(np.arange(4), inverse=np.array([0, 1])),
        np.stack([np.arange(2), np.zeros(2, int)], -1).astype(np.uint32),
    ],
    ids=["column", "rectangle", "lengths", "offsets", "inverse", "on the device"],
)
def test_features_of_different_numbers_of_samples(is_on_mesh, friend):
    """A batch whose features have different numbers of samples is refused."""
    tables = [jaxsok.TableSpec("user", DIM, SGD, capacity=16)]
    features = [jaxsok.FeatureSpec("user", "user"), jaxsok.FeatureSpec("friend", "user")]
    is_words = isinstance(friend, np.ndarray) and friend.dtype == np.uint32
    friend = jnp.asarray(friend) if is_words else friend
    mesh = {"mesh": over_two().shards.mesh, "axis": "data"} if is_on_mesh else {}
    num_samples = 6 if isinstance(friend, np.ndarray) and friend.ndim == 2 else 2
    with raises(ValueError, "batch: raw", f"{{'user': 4, 'friend': {num_samples}}} samples", "one number of samples"):
        jaxsok.Collection(tables, features, **mesh).batch({"user": np.arange(4), "friend": friend})


@pytest.mark.parametrize(
    ("kind", "make", "got"),
    [
        (TypeError, lambda: jnp.arange(4, dtype=jnp.int32), "int32"),
        (TypeError, lambda: jnp.arange(4, dtype=jnp.int16), "int16"),
        (TypeError, lambda: jnp.arange(4, dtype=jnp.float32), "float32"),
        (ValueError, lambda: jnp.arange(4, dtype=jnp.uint32), "uint32"),
        (ValueError, lambda: jnp.zeros((4, 3), jnp.uint32), "4, 3"),
    ],
    ids=["int32", "int16", "float32", "uint32", "three words"],
)
def test_keys_on_the_device(collection, kind, make, got):
    """An int32 array may be a narrowed int64 array, so only uint32[..., 2] words are 64-bit keys."""
    with raises(kind, "batch", "user", got):
        collection.batch({"user": make()})


def test_a_narrowed_int64_is_refused_with_the_remedy(collection):
    """With x64 off jnp.asarray narrows int64 keys; the message states how to declare real int32 keys."""
    with jax.numpy_dtype_promotion("standard"):
        narrowed = jax.device_put(np.array([2**40 + 5, 7]))
    assert narrowed.dtype == np.int32
    with raises(TypeError, "batch", "user", "int32", "key_dtype"):
        collection.batch({"user": narrowed})
    with raises(TypeError, "batch", "user", "int32", "key_dtype"):
        collection.batch({"user": jaxsok.Bags(narrowed, lengths=np.array([1, 1]))})


def test_int32_words_are_not_words():
    """key_dtype="int32" allows int32 keys and no other narrow type."""
    collection = programs.one_table(key_dtype="int32")
    for narrow in (jnp.zeros(4, jnp.int16), jnp.zeros(4, jnp.uint32), jnp.zeros(4, jnp.float32)):
        with raises((TypeError, ValueError), "batch", "user", narrow.dtype):
            collection.batch({"user": narrow})


KEYS = np.arange(6)


@pytest.mark.parametrize(
    ("kind", "layout", "parts"),
    [
        (ValueError, {"lengths": np.array([3, 4])}, ("lengths", "7")),
        (ValueError, {"lengths": np.array([3, 2])}, ("lengths", "5")),
        (ValueError, {"lengths": np.array([7, -1])}, ("lengths", "-1")),
        (ValueError, {"lengths": np.array([[3], [3]])}, ("lengths", "2, 1")),
        (TypeError, {"lengths": np.array([3.0, 3.0])}, ("lengths", "float64")),
        (ValueError, {"offsets": np.array([0, 4, 2, 6])}, ("offsets",)),
        (ValueError, {"offsets": np.array([-1, 3, 6])}, ("offsets", "-1")),
        (ValueError, {"offsets": np.array([0, 3, 7])}, ("offsets", "7")),
        (ValueError, {"offsets": np.array([0, 3, 5])}, ("offsets", "5")),
        (ValueError, {"offsets": np.array([1, 3, 6])}, ("offsets", "1")),
        (ValueError, {"offsets": np.array([], np.int64)}, ("offsets",)),
        (ValueError, {"offsets": np.array([[0, 6]])}, ("offsets", "1, 2")),
        (TypeError, {"offsets": np.array([0.0, 6.0])}, ("offsets", "float64")),
        (ValueError, {"lengths": np.array([6]), "offsets": np.array([0, 6])}, ("lengths", "offsets")),
        (ValueError, {"lengths": np.array([2**32 + 6])}, ("lengths",)),
        (ValueError, {"offsets": np.array([0, 2**32 + 6])}, ("offsets",)),
    ],
)
def test_lengths_and_offsets(collection, kind, layout, parts):
    """Unsorted, negative, too large, too small, doubly given and narrowing values are refused."""
    with raises(kind, *parts):
        collection.batch({"user": jaxsok.Bags(KEYS, **layout)})


@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        ({"lengths": [3, 4]}, ("lengths", "7")),
        ({"lengths": [3, 2]}, ("lengths", "5")),
        ({"lengths": [7, -1]}, ("lengths",)),
        ({"offsets": [0, 4, 2, 6]}, ("offsets",)),
        ({"offsets": [-1, 3, 6]}, ("offsets",)),
        ({"offsets": [0, 3, 7]}, ("offsets", "7")),
        ({"offsets": [0, 3, 5]}, ("offsets", "5")),
        ({"offsets": [1, 3, 6]}, ("offsets",)),
    ],
)
@pytest.mark.parametrize("keys", [KEYS, jnp.asarray(programs.words(KEYS))], ids=["NumPy keys", "device keys"])
def test_lengths_and_offsets_on_the_device(collection, keys, layout, parts):
    """Batches are packed on the host, so numbers on the device are checked as well."""
    layout = {name: jnp.array(value, jnp.int32) for name, value in layout.items()}
    with raises(ValueError, "batch", "user", *parts):
        collection.batch({"user": jaxsok.Bags(keys, **layout)})


def test_weights_without_combiner():
    """Rows that are not combined have no weights: the declaration is refused, not ignored."""
    with raises(ValueError, "FeatureSpec", "weight"):
        jaxsok.FeatureSpec("user", "user", combiner=None, weighted=True)


@pytest.mark.parametrize(
    ("kind", "keys", "options", "parts"),
    [
        (ValueError, KEYS, {"lengths": np.array([6]), "weights": np.ones(5, np.float32)}, ("weights", "5")),
        (ValueError, KEYS, {"lengths": np.array([6]), "weights": np.ones((6, 1), np.float32)}, ("weights", "6, 1")),
        (ValueError, np.zeros((2, 3), int), {"weights": np.ones((3, 2), np.float32)}, ("weights", "3, 2")),
        (ValueError, np.zeros(4, int), {"weights": np.ones(3, np.float32)}, ("weights", "3")),
        (TypeError, KEYS, {"lengths": np.array([6]), "weights": np.ones(6, bool)}, ("weights", "bool")),
        (TypeError, KEYS, {"lengths": np.array([6]), "weights": np.array(["a"] * 6)}, ("weights",)),
        (TypeError, KEYS, {"lengths": np.array([6]), "weights": np.ones(6, complex)}, ("weights", "complex")),
    ],
)
def test_weights(weighted, kind, keys, options, parts):
    """Weights of a wrong shape or a wrong dtype are refused."""
    with raises(kind, *parts):
        weighted.batch({"user": jaxsok.Bags(keys, **options)})


def test_weights_where_none_are_declared(collection):
    """Otherwise the weights would be ignored silently."""
    with raises(ValueError, "batch", "user", "weight"):
        collection.batch({"user": jaxsok.Bags(KEYS, lengths=np.array([6]), weights=np.ones(6, np.float32))})


@pytest.mark.parametrize("value", [KEYS, jaxsok.Bags(KEYS, lengths=np.array([6])), jaxsok.Bags(KEYS)])
def test_weights_missing_where_declared(weighted, value):
    """Otherwise the weights would silently be ones."""
    with raises(ValueError, "batch", "user", "weight"):
        weighted.batch({"user": value})


def test_more_keys_than_declared(collection):
    """More keys are refused, never cut off."""
    with raises(ValueError, "batch", "user", "max_keys", "8", "9"):
        collection.batch({"user": jaxsok.Bags(np.arange(9), lengths=np.array([4, 5]))})


@pytest.mark.parametrize("on_device", [False, True])
def test_longer_bags_than_declared(on_device):
    """Bags longer than max_hotness are refused as well."""
    collection = programs.one_table(combiner=None, max_keys=8, max_hotness=2)
    keys = jnp.asarray(programs.words(KEYS)) if on_device else KEYS
    lengths = jnp.array([3, 2, 1], jnp.int32) if on_device else np.array([3, 2, 1])
    with raises(ValueError, "batch", "user", "max_hotness", "2", "3"):
        collection.batch({"user": jaxsok.Bags(keys, lengths=lengths)})


@pytest.fixture(scope="module")
def two_features():
    """Returns a collection of two features of one table."""
    return jaxsok.Collection(
        [jaxsok.TableSpec("user", DIM, SGD, capacity=16)],
        [jaxsok.FeatureSpec("user", "user"), jaxsok.FeatureSpec("friend", "user")],
    )


def test_missing_feature(two_features):
    """Every declared feature must be in every batch."""
    with raises(ValueError, "batch", "friend"):
        two_features.batch({"user": KEYS, "freind": KEYS})


def test_a_batch_that_is_no_mapping(two_features):
    """A batch that is a list, without names, is refused."""
    with raises(TypeError, "batch", "list"):
        two_features.batch([KEYS, KEYS])


# --------------------------------------------------------------------------------------------------------------
# Steps fail when they are traced


@pytest.fixture(scope="module")
def step(two_features):
    """Returns a state and a plan for bad calls."""
    features = programs.batch(two_features, user=np.array([1, 2]), friend=np.array([2, 3]))
    _, state, plan = two_features.lookup(two_features.init(seed=0), features)
    return state, plan


ONES = np.ones((2, DIM), np.float32)


@pytest.mark.parametrize(
    ("kind", "gradients", "parts"),
    [
        (ValueError, {"user": ONES}, ("friend",)),
        (ValueError, {"user": ONES, "friend": ONES, "enemy": ONES}, ("enemy",)),
        (ValueError, {"user": ONES, "friend": ONES[:1]}, ("friend", "1,4")),
        (ValueError, {"user": ONES, "friend": ONES[:, :3]}, ("friend", "2,3")),
        (ValueError, {"user": ONES, "friend": ONES[None]}, ("friend", "1,2,4")),
        (TypeError, {"user": ONES, "friend": ONES.astype(np.int32)}, ("friend", "int32")),
        (TypeError, [ONES, ONES, ONES], ()),
        (TypeError, ONES, ("wantedadictofarraysbyfeature",)),
    ],
)
def test_gradients(two_features, step, kind, gradients, parts):
    """Gradients that are missing, unknown, of another shape or of another dtype are refused."""
    state, plan = step
    before = jax.tree.map(np.array, state)
    with pytest.raises((kind, ValueError) if isinstance(gradients, list) else kind) as error:
        two_features.update(state, plan, jax.tree.map(jnp.asarray, gradients))
    message = str(error.value).replace(" ", "")
    for part in ("update", "gradients", *parts):
        assert part in message, f"{part!r} is not in: {error.value}"
    programs.assert_same_state(before, state)


def test_plans_without_their_gradients(two_features, step):
    """There must be as many gradients as plans, and at least one."""
    state, plan = step
    gradients = {"user": jnp.asarray(ONES), "friend": jnp.asarray(ONES)}
    with raises(ValueError, "update", "2", "1"):
        two_features.update(state, [plan, plan], [gradients])
    with raises(ValueError, "update", "plan"):
        two_features.update(state, [], [])


def test_update_needs_a_plan_of_a_lookup(two_features, step):
    """A plan made ahead is refused, since it has no rows yet."""
    state, _ = step
    ahead = two_features.plan(programs.batch(two_features, user=np.array([1, 2]), friend=np.array([2, 3])))
    gradients = {"user": jnp.asarray(ONES), "friend": jnp.asarray(ONES)}
    with raises(TypeError, "update", "plan", "lookup"):
        two_features.update(state, ahead, gradients)
    with raises(TypeError, "update", "plan: got dict"):  # embeddings in its place
        two_features.update(state, gradients, ahead)


@pytest.mark.parametrize(
    "rate",
    ["fast", np.ones(3), np.nan, np.float32("inf"), np.array(np.nan), jnp.array(jnp.nan), np.array(1j), 1e300],
)
def test_learning_rate_of_update(two_features, step, rate):
    """The learning rate must be a finite number or a 0-d array."""
    state, plan = step
    gradients = {"user": jnp.asarray(ONES), "friend": jnp.asarray(ONES)}
    with raises((TypeError, ValueError), "update", "learning_rate"):
        two_features.update(state, plan, gradients, learning_rate=rate)


OTHERS = {
    "dim": [jaxsok.TableSpec("user", 8, SGD, capacity=16)],
    "optimizer": [jaxsok.TableSpec("user", DIM, jaxsok.optim.adam(0.1), capacity=16)],
    "name": [jaxsok.TableSpec("usr", DIM, SGD, capacity=16)],
    "initializer": [jaxsok.TableSpec("user", DIM, SGD, capacity=16, initializer=jaxsok.initializers.zeros())],
    "tables": [jaxsok.TableSpec("user", DIM, SGD, capacity=16), jaxsok.TableSpec("item", DIM, SGD, capacity=16)],
}


@pytest.mark.parametrize("difference", OTHERS)
def test_a_state_of_other_specs(two_features, step, difference):
    """The fingerprint detects other specs in every op; the state does not change."""
    state, plan = step
    before = jax.tree.map(np.array, state)
    tables = OTHERS[difference]
    other = jaxsok.Collection(tables, [jaxsok.FeatureSpec(name, tables[0].name) for name in ("user", "friend")])
    features = programs.batch(other, user=np.array([1, 2]), friend=np.array([2, 3]))
    dim = tables[0].dim
    gradients = {name: jnp.ones((2, dim)) for name in ("user", "friend")}
    for op, call in {
        "lookup": lambda: other.lookup(state, features),
        "find": lambda: other.find(state, features),
        "update": lambda: other.update(state, plan, gradients),
        "grow": lambda: other.grow(state),
        "erase": lambda: other.erase(state, tables[0].name, np.array([1])),
        "export_table": lambda: other.export_table(state, tables[0].name),
        "num_rows": lambda: other.num_rows(state),
    }.items():
        with raises(ValueError, op, "state"):
            call()
    programs.assert_same_state(before, state)


def test_features_of_another_collection(two_features):
    """Features are valid only for the collection that packed them."""
    other = programs.one_table(dim=8)
    features = programs.batch(other, user=np.array([1, 2]))
    with raises(ValueError, "lookup", "features"):
        two_features.lookup(two_features.init(seed=0), features)


@pytest.mark.parametrize("op", ["lookup", "find"])
def test_raw_input_instead_of_features(two_features, op):
    """Raw batches are refused."""
    with raises(TypeError, op, "dict"):
        getattr(two_features, op)(two_features.init(seed=0), {"user": KEYS, "friend": KEYS})


@pytest.mark.parametrize("op", ["lookup", "find", "num_rows", "grow"])
def test_something_else_than_a_state(two_features, op):
    """Swapped embeddings and states are detected."""
    features = programs.batch(two_features, user=np.array([1, 2]), friend=np.array([2, 3]))
    arguments = (features,) if op in ("lookup", "find") else ()
    with raises(TypeError, op, "state", "dict"):
        getattr(two_features, op)({"user": ONES}, *arguments)


def test_a_state_of_another_dim(two_features):
    """The message names the dims, since the fingerprint alone does not help."""
    state = programs.one_table(dim=8).init(seed=0)
    for op in ("grow", "num_rows"):
        with raises(ValueError, op, "state", "dims [8]", f"wanted [{DIM}]", "use the collection that made it"):
            getattr(two_features, op)(state)


HOST_OPS = {
    "grow": lambda collection, state: collection.grow(state),
    "num_rows": lambda collection, state: collection.num_rows(state),
    "export_table": lambda collection, state: collection.export_table(state, "user"),
    "export_chunks": lambda collection, state: list(collection.export_chunks(state, "user")),
}


@pytest.mark.parametrize("op", HOST_OPS)
def test_a_traced_state_in_an_operation_of_the_host(two_features, op):
    """The operation runs between steps, so a traced state is refused."""
    state = two_features.init(seed=0)
    programs.batch(two_features, user=np.array([1]), friend=np.array([2]))  # without one `grow` warns
    with raises(TypeError, f"{op}: state", "traced", "jax.jit", "runs on the host"):
        jax.jit(lambda state: HOST_OPS[op](two_features, state))(state)
    HOST_OPS[op](two_features, state)


@pytest.mark.parametrize("op", [*HOST_OPS, "find", "erase"])
def test_a_state_that_was_donated(two_features, op):
    """An error is raised, although jaxlib ends the process if `is_ready` is called; the new state still works."""
    features = programs.batch(two_features, user=np.array([1, 2]), friend=np.array([2, 3]))
    call = HOST_OPS | {
        "find": lambda collection, state: collection.find(state, features),
        "erase": lambda collection, state: collection.erase(state, "user", np.array([1])),
    }
    old = two_features.init(seed=0)
    state, *_ = programs.donated_step(two_features)(old, features)
    with raises(ValueError, f"{op}: state", "deleted", "donated"):
        call[op](two_features, old)
    call[op](two_features, state)


@pytest.mark.parametrize("op", ["erase", "export_table"])
def test_unknown_table_of_an_op(two_features, step, op):
    """The message names the declared tables."""
    state, _ = step
    arguments = (np.array([1]),) if op == "erase" else ()
    with raises(ValueError, op, "usr", "user"):
        getattr(two_features, op)(state, "usr", *arguments)


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        (TypeError, np.array([1.0])),
        (TypeError, jnp.arange(3, dtype=jnp.int32)),
        (TypeError, np.array([True])),
        (ValueError, np.int64(3)),
    ],
)
def test_keys_of_erase(two_features, step, kind, keys):
    """Keys of erase follow the rules of batches."""
    state, _ = step
    before = jax.tree.map(np.array, state)
    with raises(kind, "erase", "keys"):
        two_features.erase(state, "user", keys)
    programs.assert_same_state(before, state)


@pytest.mark.parametrize(("kind", "steps"), [(ValueError, 0), (ValueError, -1), (BAD_KIND, 1.5)])
def test_steps_of_grow(two_features, step, kind, steps):
    """`steps` must be at least one."""
    with raises(kind, "grow", "steps", steps):
        two_features.grow(step[0], steps=steps)


@pytest.mark.parametrize(("kind", "seed"), [(BAD_KIND, 1.5), (BAD_KIND, "0"), (ValueError, -1), (ValueError, 2**64)])
def test_seed_of_init(two_features, kind, seed):
    """A seed must be an unsigned integer; none is truncated."""
    with raises(kind, "init", "seed", seed):
        two_features.init(seed=seed)


def test_unknown_feature_of_offsets_and_mask(two_features):
    """Unknown names of features are refused."""
    features = programs.batch(two_features, user=np.array([1, 2]), friend=np.array([2, 3]))
    with raises((KeyError, ValueError), "features", "usr"):
        features.mask("usr")
    with raises((KeyError, ValueError), "features", "usr"):
        features.offsets("usr")


# --------------------------------------------------------------------------------------------------------------
# Memory


def test_memory_that_will_not_fit():
    """Four tebibytes are refused before any allocation, with the requested bytes and the bytes of a row."""
    num_rows, dim = 2**30, 1024
    collection = programs.one_table(dim=dim, capacity=num_rows)
    with pytest.raises((MemoryError, ValueError)) as error:
        collection.init(seed=0)
    message = str(error.value).replace(",", "").replace("_", "")
    numbers = [int(word) for word in "".join(c if c.isdigit() else " " for c in message).split()]
    assert "init" in message and "user" in message
    # The message states the total, in bytes or in a larger unit; a row costs 4,096 bytes, its key and its index share.
    assert any(n >= num_rows * dim * 4 for n in numbers) or "TiB" in message or "GiB" in message, message
    assert any(4096 < n < 4096 + 256 for n in numbers), message


def test_growth_that_will_not_fit():
    """A reserve beyond all memory is refused, and the state still works."""
    collection = programs.one_table(dim=1024, capacity=16, combiner="sum")
    state = programs.insert(collection, collection.init(seed=0), np.arange(16))
    with pytest.raises((MemoryError, ValueError, OverflowError), match="grow"):
        collection.grow(state, steps=2**40)
    state = programs.insert(collection, collection.grow(state), np.arange(20))
    assert collection.num_rows(state) == {"user": 20}


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


def over_two(axes=("data",), axis="data", tables=None, exchange=None, **feature):
    """Returns a collection over a mesh whose first axis has two devices and whose other axes have one."""
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    shape = (2, *[1] * (len(axes) - 1))
    types = (jax.sharding.AxisType.Auto,) * len(axes)
    mesh = jax.make_mesh(shape, axes, axis_types=types, devices=jax.devices()[:2])
    tables = [jaxsok.TableSpec("user", DIM, SGD, capacity=16)] if tables is None else tables
    return jaxsok.Collection(
        tables, [jaxsok.FeatureSpec("user", "user", **feature)], mesh=mesh, axis=axis, exchange=exchange
    )


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
    with raises(ValueError, "Collection", "user", "placement", "on(2)", "0 to 1", "data=2"):
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


@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize("kind", ["column", "rectangle", "ragged", "on the device"])
def test_a_batch_that_does_not_divide_the_axis(kind, num_samples):
    """The message states a number that divides; nothing is cut off or repeated."""
    keys = np.arange(num_samples)
    value = {
        "column": keys,
        "rectangle": keys.reshape(num_samples, 1),
        "ragged": jaxsok.Bags(keys, lengths=np.ones(num_samples, int)),
        "on the device": jnp.asarray(programs.words(keys)),
    }[kind]
    with raises(ValueError, "batch", "user", "keys", num_samples, "multiple of 2", "data=2", "pad"):
        over_two().batch({"user": value})


def test_samples_split_over_another_axis():
    """Such samples are refused, since moving them would be a collective that the user did not request."""
    declared = over_two(("data", "model"))
    sharding = jax.sharding.NamedSharding(declared.shards.mesh, jax.sharding.PartitionSpec("model"))
    keys = jax.device_put(programs.words(np.arange(4)), sharding)
    with raises(ValueError, "batch", "user", "keys", "model", "data", "jax.device_put"):
        declared.batch({"user": keys})


def test_more_keys_than_a_shard_has_room_for():
    """max_keys is divided evenly among shards, so the longest part counts."""
    bags = jaxsok.Bags(np.arange(6), lengths=np.array([5, 1]))
    with raises(ValueError, "batch", "user", "5 keys for one shard", "at most 4", "max_keys = 8"):
        over_two(max_keys=8).batch({"user": bags})


def test_ragged_keys_beside_device_arrays():
    """Only the host can assign ragged keys to shards, so device arrays are refused."""
    keys = jnp.asarray(programs.words(np.arange(4)))
    with raises(ValueError, "batch", "user", "ragged", "NumPy"):
        over_two().batch({"user": jaxsok.Bags(keys, lengths=np.array([2, 2]))})


@pytest.mark.parametrize("is_on_mesh", [False, True])
@pytest.mark.parametrize(
    ("kind", "keys", "pad_to", "parts"),
    [
        (ValueError, np.arange(3), 0, ("pad_to", "0")),
        (ValueError, np.arange(3), 4.0, ("pad_to", "4.0")),
        (ValueError, np.arange(3), 2, ("user", "3 samples", "pad_to = 2")),
        (TypeError, np.zeros((3, 2), np.uint32), 4, ("user", "jax.Array", "NumPy")),
    ],
)
def test_pad_to(collection, is_on_mesh, kind, keys, pad_to, parts):
    """`pad_to` must not be below the number of samples, and works only with NumPy arrays."""
    keys = jnp.asarray(keys) if keys.ndim == 2 else keys
    with raises(kind, "batch", *parts):
        (over_two() if is_on_mesh else collection).batch({"user": keys}, pad_to=pad_to)


def test_pad_to_of_features_of_unlike_numbers(two_features):
    """Features of different numbers of samples are refused, since the real samples must be the same for all."""
    with raises(ValueError, "batch", "'user': 3", "'friend': 2"):
        two_features.batch({"user": np.arange(3), "friend": np.arange(2)}, pad_to=4)


def test_states_and_features_of_another_mesh():
    """States and features of one device, of two devices, and of two devices of another axis are never confused."""
    one_device = programs.one_table(capacity=16)
    collections = {
        "one device": one_device,
        "data=2": over_two(),
        "rank=2": over_two(("rank",), "rank"),
    }
    made = {
        name: (collection.init(seed=0), programs.batch(collection, user=np.array([1, 2])))
        for name, collection in collections.items()
    }
    for name, declared in collections.items():
        for other, (state, features) in made.items():
            if name == other:
                continue
            own_state, own_features = made[name]
            for op, call in {
                "lookup": lambda declared=declared, own=own_features, state=state: declared.lookup(state, own),
                "find": lambda declared=declared, own=own_features, state=state: declared.find(state, own),
                "grow": lambda declared=declared, state=state: declared.grow(state),
                "erase": lambda declared=declared, state=state: declared.erase(state, "user", np.array([1])),
                "export_table": lambda declared=declared, state=state: declared.export_table(state, "user"),
                "num_rows": lambda declared=declared, state=state: declared.num_rows(state),
            }.items():
                with raises(ValueError, op, "state", other, name, "use the collection that made it"):
                    call()
            if "one device" in (name, other):
                with raises(ValueError, "find", "features", "batch"):
                    declared.find(own_state, features)


@pytest.mark.parametrize(
    ("send_capacity", "parts"),
    [(4, ("4", "1 stores")), ((4, 4), ("(4, 4)", "1 stores")), ((0,), ("0", "at least 1")), ((2.0,), ("2.0",))],
)
def test_send_capacity_of_plan(collection, send_capacity, parts):
    """The send capacity is one number for each store, on a mesh only."""
    declared = over_two()
    with raises(ValueError, "plan", "send_capacity", *parts):
        declared.plan(programs.batch(declared, user=np.arange(2)), send_capacity=send_capacity)
    with raises(ValueError, "plan", "send_capacity", "without a mesh"):
        collection.plan(programs.batch(collection, user=np.arange(2)), send_capacity=(4,))


def test_unlike_plans_in_one_update():
    """A plan with one round and a plan with several rounds cannot share an update."""
    declared = over_two()
    features = programs.batch(declared, user=np.arange(2))
    _, state, first = declared.lookup(declared.init(seed=0), features)
    embeddings, state, second = declared.lookup(state, declared.plan(features, send_capacity=(4,)))
    with raises(ValueError, "update", "plan", "send capacity", "all of one kind"):
        declared.update(state, [first, second], [embeddings, embeddings])


@pytest.mark.parametrize("op", ["stack", "unstack"])
def test_stack_on_one_device(collection, op):
    """On one device `stack` is refused, since pmap needs a mesh."""
    with raises(ValueError, op, "tree", "mesh"):
        getattr(collection, op)(collection.init(seed=0))


@pytest.mark.parametrize("op", ["grow", "num_rows", "find"])
def test_a_stacked_state_outside_of_pmap(op):
    """The message names `unstack`; `grow` changes nothing."""
    declared = over_two()
    features = programs.batch(declared, user=np.arange(2))
    _, state, _ = declared.lookup(declared.init(seed=0), features)
    state = declared.stack(state)
    arguments = (features,) if op == "find" else ()
    with raises(ValueError, f"{op}: state", "one more axis", "collection.unstack(state)"):
        getattr(declared, op)(state, *arguments)
    assert declared.num_rows(declared.unstack(state)) == {"user": 2}


def test_pmap_over_an_axis_of_another_name():
    """The axis of pmap must be the collection's axis."""
    declared = over_two()
    state, features = declared.stack(declared.init(seed=0)), declared.stack(programs.batch(declared, user=np.arange(2)))
    for name in ({"axis_name": "batch"}, {}):
        step = jax.pmap(lambda state, features: declared.find(state, features)[0], devices=jax.devices()[:2], **name)
        with raises(ValueError, "Collection: axis", "pmap over other axes alone", "axis_name='data'"):
            step(state, features)
