"""Tests bad batches: each is refused on the host, and the message names the feature and the actual value."""

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from bad_input_cases import BAD_KIND, DIM, SGD, over_one_table, over_two, raises

import jaxsok

KEYS = np.arange(6)


@pytest.fixture(scope="module")
def collection():
    """Returns a collection of one plain feature, ragged or not, of at most eight keys."""
    return programs.one_table(max_keys=8)


@pytest.fixture(scope="module")
def weighted():
    """Returns a collection of one weighted feature."""
    return programs.one_table(max_keys=8, weighted=True)


@pytest.fixture(scope="module")
def two_features():
    return over_one_table()


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


def test_masked_arrays(collection, weighted):
    """Their hidden elements are never used: everything that takes arrays refuses them."""
    masked, keys = np.ma.array([1, 2], mask=[0, 1]), np.array([1, 2])
    ones, state = np.array([1, 1]), collection.init(seed=0)
    dim = collection.tables[0].dim
    rows = np.ones((2, dim), np.float32)
    hidden = np.ma.array(rows, mask=rows > 0)
    coo = lambda **given: {"user": jaxsok.Coo(**{"indices": keys - 1, "keys": keys, "shape": (2,)} | given)}  # noqa: E731
    records = lambda **given: [jaxsok.Records(**{"keys": keys.astype(np.uint64), "rows": rows} | given)]  # noqa: E731
    bags = {"keys": keys, "lengths": ones}
    # What is known of earlier batches of the same types and shapes lets no later one through.
    collection.batch({"user": keys})
    collection.batch({"user": jaxsok.Bags(**bags)})
    collection.batch({"user": jaxsok.Bags(keys, offsets=np.array([0, 2]))})
    weighted.batch({"user": jaxsok.Bags(**bags, weights=rows[:, 0])})
    for name, call in {
        "keys     ": lambda: collection.batch({"user": masked}),
        "keys      ": lambda: collection.batch({"user": jaxsok.Bags(**bags | {"keys": masked})}),
        "lengths  ": lambda: collection.batch({"user": jaxsok.Bags(**bags | {"lengths": masked})}),
        "offsets": lambda: collection.batch({"user": jaxsok.Bags(keys, offsets=np.ma.array([0, 2], mask=[1, 0]))}),
        "weights ": lambda: weighted.batch({"user": jaxsok.Bags(**bags, weights=hidden[:, 0])}),
        "values": lambda: jaxsok.from_kjt(masked, ones, ["user"]),
        "lengths": lambda: jaxsok.from_kjt(keys, masked, ["user"]),
        "weights": lambda: jaxsok.from_kjt(keys, ones, ["user"], weights=masked),
        "keys": lambda: collection.batch(coo(keys=masked)),
        "indices": lambda: collection.batch(coo(indices=masked)),
        "label": lambda: collection.batch({"user": keys, "label": masked}, pad_to=4),
        "what": lambda: next(iter(collection.pipeline([{"user": keys, "what": masked}], pad_to=4))),
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


def test_missing_feature(two_features):
    """Every declared feature must be in every batch."""
    with raises(ValueError, "batch", "friend"):
        two_features.batch({"user": KEYS, "freind": KEYS})


def test_a_batch_that_is_no_mapping(two_features):
    """A batch that is a list, without names, is refused."""
    with raises(TypeError, "batch", "list"):
        two_features.batch([KEYS, KEYS])


# --------------------------------------------------------------------------------------------------------------
# On a mesh


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


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.zeros((4, 0), np.int64),
        lambda: np.zeros((4, 2, 2), np.int64),
        lambda: jnp.arange(4, dtype=jnp.uint32),
        lambda: jnp.zeros((4, 3), jnp.uint32),
        lambda: jnp.zeros((4, 2, 2, 2), jnp.uint32),
        lambda: jnp.zeros(4, jnp.float32),
        lambda: jnp.arange(4),
    ],
)
def test_keys_are_named_as_on_one_device(collection, make):
    """And not by the part of a shard."""
    messages = []
    for declared in (collection, over_two()):
        with pytest.raises((TypeError, ValueError)) as info:
            declared.batch({"user": make()})
        messages.append(f"{info.type.__name__}: {info.value}")
    assert messages[0] == messages[1]


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
