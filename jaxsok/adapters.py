"""Features as other libraries hold them, read as `Bags`: coordinates, jagged tensors, Arrow columns, sparse matrices.

Arrow, and libraries that implement its C interface (Polars), are read without a copy, unless a column has nulls or
several chunks. The result is NumPy; only a sparse matrix inside a program stays on the device. A library is imported
only when one of its objects is passed.
"""

import dataclasses
import importlib.util
import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsok import checks, keys as keys_lib, raw_features
from jaxsok.checks import not_none
from jaxsok.features import Bags, bags_of
from jaxsok.specs import FeatureSpec
from jaxsok.types import COMBINERS, PADDING_KEY, Combiner

_NULL_VALUES = {"f": np.nan, "i": -1, "u": PADDING_KEY}  # by kind of dtype: no weight, or no key


@dataclasses.dataclass(frozen=True)
class Coo:
    """One feature of one batch by coordinates: each key with its bag. What `tf.SparseTensor` holds.

    Keys may come in any order. They are sorted by bag, then by column if there are columns; the sort is stable. Columns
    have no other meaning. Read on the host; a `tf.SparseTensor` may stand in its place, or `Bags(ids, weights=weights)`
    of two of them.

    Example:
      >>> coo = Coo(np.array([[1, 0], [0, 1], [0, 0]]), np.array([9, 8, 7]), shape=(3, 2))  # bags [7, 8], [9] and []
      >>> bags = convert_features({"a": coo}, [FeatureSpec("a", table="a")])["a"]
      >>> bags.keys.tolist(), bags.lengths.tolist()
      ([7, 8, 9], [2, 1, 0])
    """

    indices: Any
    """`[num_keys, 2]`: bag and column of each key; or `[num_keys]`: its bag."""
    keys: Any
    """`[num_keys]`"""
    _: dataclasses.KW_ONLY
    weights: Any = None
    """One float per key."""
    shape: Any
    """`(num_bags, num_columns)`, or `(num_bags,)` where there are no columns."""


def from_kjt(
    values: Any, lengths: Any, features: Sequence[str | FeatureSpec], *, weights: Any = None
) -> dict[str, Bags]:
    """Reads one array of keys for all features, as TorchRec's KeyedJaggedTensor holds them, as entries of a raw batch.

    The keys of the first feature come first, bag after bag, then those of the second. No key is copied: each feature
    gets its part of `values`. Keys behind the last bag are left to the last feature, where `batch` takes padding alone.

    Args:
      values: integers `[num_keys]`, NumPy or what becomes NumPy (a torch tensor on the host).
      lengths: integers `[num_features * num_samples]`, or `[num_features, num_samples]`: keys of each bag.
      features: the features or their names, in the order of `lengths`.
      weights: one float per key, `[num_keys]`.

    Raises:
      TypeError, ValueError: lengths that are no integers, do not fit the features, or ask for more keys than there are.
        What `batch` checks, it checks later.

    Cost:
      One pass over the lengths, none over the keys.

    Example:
      >>> bags = from_kjt(np.array([7, 9, 8]), np.array([1, 0, 1, 1]), ["user", "item"])
      >>> bags["user"].keys.tolist(), bags["item"].keys.tolist(), bags["item"].lengths.tolist()
      ([7], [9, 8], [1, 1])
    """
    names = [feature if isinstance(feature, str) else feature.name for feature in features]
    keys_lib.require_unmasked("from_kjt", {"values": values, "lengths": lengths, "weights": weights})
    values, lengths = keys_lib.as_array(values, "from_kjt"), np.asarray(lengths)
    weights = None if weights is None else np.asarray(weights)
    if not np.issubdtype(lengths.dtype, np.integer):
        raise TypeError(f"from_kjt: lengths: got {lengths.dtype}{list(lengths.shape)}, wanted integers.")
    if len(set(names)) < len(names):
        raise ValueError(f"from_kjt: features: got {names}, wanted each feature once.")
    is_table = lengths.ndim == 2 and lengths.shape[0] == len(names)
    if not names or not (is_table or (lengths.ndim == 1 and lengths.shape[0] % len(names) == 0)):
        raise ValueError(
            f"from_kjt: lengths: got shape {list(lengths.shape)} for {len(names)} features, wanted "
            "[num_features * num_samples]: as many bags of each feature."
        )
    if values.ndim != 1 or (weights is not None and weights.shape != values.shape):
        name, got = ("values", values) if values.ndim != 1 else ("weights", not_none(weights))
        raise ValueError(f"from_kjt: {name}: got shape {list(got.shape)}, wanted [num_keys].")
    lengths = lengths.reshape(len(names), -1)
    raw_features.bag_offsets(lengths.reshape(-1), "lengths", values.shape[0], "from_kjt")
    bounds = np.append(0, np.cumsum(lengths.sum(axis=1, dtype=np.int64))).tolist()
    parts = [slice(*part) for part in itertools.pairwise([*bounds[:-1], None])]
    return {
        name: Bags(values[part], lengths=of_feature, weights=None if weights is None else weights[part])
        for name, part, of_feature in zip(names, parts, lengths, strict=True)
    }


def safe_bags(ids: Any, *, combiner: Combiner = "mean", default_key: int | None = None) -> Bags:
    """Keeps the keys of a feature that `tf.nn.safe_embedding_lookup_sparse` would look up.

    Negative keys (as int64) go, and unless `combiner` is "sum" also keys whose weights are not above 0. A bag that is
    then empty gets `default_key`, with weight 1. For `max_norm` see `combine_clipped`.

    Args:
      ids: a feature in any form that `batch` takes, such as `Bags(sp_ids, weights=sp_weights)` of two SparseTensors.
      combiner: that of the feature.
      default_key: any 64-bit integer; None: empty bags stay empty and read zeros.

    Raises:
      TypeError, ValueError: what `batch` raises for the feature.

    Cost:
      A few NumPy passes over the keys.

    Example:
      >>> bags = safe_bags(Bags(np.array([7, -5, -5]), lengths=np.array([2, 1])), default_key=6)
      >>> bags.keys.tolist(), bags.lengths.tolist()
      ([7, 6], [1, 1])
    """
    what = "safe_bags"
    checks.one_of(f"{what}: combiner", combiner, tuple(COMBINERS))
    matrix = bags_of(ids).keys
    is_weighted = _is_bcoo(matrix) and not np.isin(np.asarray(matrix.data), (0, 1)).all()
    if is_weighted and not jnp.issubdtype(matrix.data.dtype, jnp.floating):
        ids = type(matrix)((matrix.data.astype(jnp.float32), matrix.indices), shape=matrix.shape)
    bags = bags_of(_convert_feature(FeatureSpec("ids", table="ids", weighted=is_weighted), ids, what))
    words = keys_lib.words_of(bags.keys, "int64", what)
    keys = keys_lib.from_words(words)
    offsets = np.arange(keys.shape[0] + 1) * (keys.size // max(1, keys.shape[0]))
    if bags.lengths is not None or bags.offsets is not None:
        offsets = raw_features.read_offsets(bags, words, what)
    keys = keys.reshape(-1)[: offsets[-1]]
    places, is_kept = np.repeat(np.arange(offsets.size - 1), np.diff(offsets)), keys.view(np.int64) >= 0
    weights = raw_features.weights_on_host(bags.weights, words.shape[:-1], what)
    if weights is not None:
        weights = weights.reshape(-1)[: keys.size]
        is_kept &= (combiner == "sum") | (weights > 0)
        weights = weights[is_kept]
    places, keys = places[is_kept], keys[is_kept]
    if default_key is not None:
        default = keys_lib.from_words(keys_lib.to_words(np.asarray([default_key]), f"{what}: default_key"))
        empty = np.setdiff1d(np.arange(offsets.size - 1), places)
        places, keys = np.append(places, empty), np.append(keys, np.repeat(default, empty.size))
        weights = None if weights is None else np.append(weights, np.ones(empty.size, weights.dtype))
    return dataclasses.replace(_sort_by_bag(keys, places[None], weights, offsets.size - 1), inverse=bags.inverse)


def convert_features(raw: Mapping[str, Any], features: Sequence[FeatureSpec], op: str = "batch") -> Mapping[str, Any]:
    """Converts the features of a raw batch to arrays or `Bags` of arrays; other entries stay as they are.

    Features that the batch lacks are not refused here. Errors (TypeError, ValueError) name `op`, feature, argument, got
    and wanted; ImportError: an Arrow column needs pyarrow.
    """
    if not isinstance(raw, Mapping):
        return raw
    found = {
        spec.name: _convert_feature(spec, raw[spec.name], f'{op}: feature "{spec.name}"')
        for spec in features
        if spec.name in raw
    }
    return {**raw, **found}


def _convert_feature(spec: FeatureSpec, value: Any, what: str) -> Any:
    if isinstance(value, (list, tuple)) and not value:
        raise ValueError(
            f"{what}: keys: got an empty list, wanted a key for each sample; samples without keys are "
            "jaxsok.Bags([], lengths=[0, 0, ...])."
        )
    if isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray):
        return value  # most are, and every batch comes through here
    bags = bags_of(value)
    keys_lib.require_unmasked(what, vars(bags))
    if all(array is None or isinstance(array, np.ndarray) for array in vars(bags).values()):
        return value
    if _is_ragged_tensor(bags.keys) or _is_ragged_tensor(bags.weights) or _is_sparse_tensor(bags.weights):
        value = bags = _unpack_tensors(bags, what)
    if isinstance(bags.keys, Coo) or _is_bcoo(bags.keys) or _is_sparse_tensor(bags.keys):
        given = [name for name in ("lengths", "offsets", "weights") if getattr(bags, name) is not None]
        if given:
            raise ValueError(
                f"{what}: got a {type(bags.keys).__name__} with {given}, wanted it alone: it says which keys are in "
                "which bag, and their weights."
            )
        if isinstance(bags.keys, Coo):
            keys_lib.require_unmasked(what, vars(bags.keys))
        inverse = _arrow_to_numpy(bags.inverse, what, "inverse")
        return dataclasses.replace(_coo_to_bags(spec, bags.keys, what), inverse=inverse)
    if not any(map(_is_arrow, vars(bags).values())):
        return value
    if importlib.util.find_spec("pyarrow") is None:
        bags = Bags(**{name: _convert_without_pyarrow(column) for name, column in vars(bags).items()})
    found = {name: _arrow_to_numpy(getattr(bags, name), what, name) for name in ("lengths", "offsets", "inverse")}
    keys, weights, lengths = bags.keys, bags.weights, None
    if _is_arrow(keys):
        keys, lengths = unpack_arrow(_to_pyarrow(keys, what, "keys"), what, "keys")
        if lengths is not None and (found["lengths"] is not None or found["offsets"] is not None):
            raise ValueError(f"{what}: got a column of lists with lengths or offsets, wanted one of them.")
    if _is_arrow(weights):
        weights, of_weights = unpack_arrow(_to_pyarrow(weights, what, "weights"), what, "weights")
        if (of_weights is None) != (lengths is None) or (
            lengths is not None and (of_weights is not None and not np.array_equal(of_weights, lengths))
        ):
            raise ValueError(f"{what}: weights: got lists of other lengths than the keys', wanted one weight per key.")
        if weights.shape == np.shape(keys):
            # Lists of one size that are null in both columns.
            is_padding = np.asarray(keys).astype(np.uint64) == np.uint64(PADDING_KEY)
            weights = np.where(np.isnan(weights) & is_padding, weights.dtype.type(0), weights)
    if lengths is not None:
        found["lengths"] = lengths
    if lengths is None and weights is None and not any(column is not None for column in found.values()):
        return keys
    return Bags(keys, weights=weights, **found)


# Coordinates ---------------------------------------------------------------------------------------------------------


def _is_bcoo(value: Any) -> bool:
    # No BCOO exists if the module was never imported.
    sparse = sys.modules.get("jax.experimental.sparse")
    return sparse is not None and isinstance(value, sparse.BCOO)


def _is_sparse_tensor(value: Any) -> bool:
    """Recognizes a `tf.SparseTensor` or `tf.compat.v1.SparseTensorValue`."""
    return all(hasattr(value, name) for name in ("indices", "values", "dense_shape"))


def _is_ragged_tensor(value: Any) -> bool:
    """Recognizes a `tf.RaggedTensor` or `tf.compat.v1.ragged.RaggedTensorValue`."""
    return all(hasattr(value, name) for name in ("values", "row_splits"))


def _unpack_tensors(bags: Bags, what: str) -> Bags:
    """Reads keys and weights that are tensors of TensorFlow; weights of a SparseTensor go into a `Coo`."""
    keys, weights = bags.keys, bags.weights
    is_ragged = _is_ragged_tensor(keys)
    if is_ragged and (bags.lengths is not None or bags.offsets is not None):
        raise ValueError(f"{what}: got a RaggedTensor with lengths or offsets, wanted it alone: it has its own.")
    if is_ragged and len(keys.values.shape) != 1:
        raise ValueError(f"{what}: keys: got a RaggedTensor of {keys.shape}, wanted two axes: samples and their keys.")
    for kind, parts in ((_is_ragged_tensor, ["row_splits"]), (_is_sparse_tensor, ["indices", "dense_shape"])):
        if not kind(weights):
            continue
        if not kind(keys) or not all(np.array_equal(getattr(keys, part), getattr(weights, part)) for part in parts):
            raise ValueError(
                f"{what}: weights: got a {type(weights).__name__} with keys of other {' and '.join(parts)}, wanted "
                "one weight for each key, in the same places."
            )
        weights = np.asarray(weights.values)
    if is_ragged:
        offsets = np.asarray(keys.row_splits)
        return dataclasses.replace(bags, keys=np.asarray(keys.values), offsets=offsets, weights=weights)
    if _is_sparse_tensor(keys):
        keys = Coo(keys.indices, keys.values, weights=weights, shape=tuple(np.asarray(keys.dense_shape).tolist()))
        return dataclasses.replace(bags, keys=keys, weights=None)
    return bags


def _coo_to_bags(spec: FeatureSpec, value: Any, what: str) -> Bags:
    if _is_bcoo(value):
        return _bcoo_to_bags(spec, value, what)
    if not isinstance(value, Coo):
        value = Coo(value.indices, value.values, shape=tuple(np.asarray(value.dense_shape).tolist()))
    if any(isinstance(array, jax.core.Tracer) for array in (value.indices, value.keys, value.weights)):
        raise TypeError(
            f"{what}: got a Coo of traced arrays, wanted NumPy: it is sorted on the host; inside a program pass "
            "Bags(keys, offsets=...), or a jax.experimental.sparse.BCOO."
        )
    indices = _integers(value.indices, what, "indices")
    if indices.ndim not in (1, 2) or (indices.ndim == 2 and indices.shape[1] != 2):
        raise ValueError(
            f"{what}: indices: got shape {list(indices.shape)}, wanted [num_keys, 2] of bags and columns, or "
            "[num_keys] of bags."
        )
    shape = _shape_of(value.shape, indices.ndim, what)
    keys = keys_lib.words_of(value.keys, spec.key_dtype, what)
    if keys.shape[:-1] != indices.shape[:1]:
        raise ValueError(
            f"{what}: keys: got shape {list(keys.shape[:-1])} for {indices.shape[0]} indices, wanted "
            f"[{indices.shape[0]}]."
        )
    keys = keys_lib.from_words(keys)
    weights = raw_features.weights_on_host(value.weights, keys.shape, what)
    columns = (indices if indices.ndim == 2 else indices[:, None]).T
    for axis, (name, line) in enumerate(zip(("bag", "column"), columns, strict=False)):
        outside = np.flatnonzero((line < 0) | (line >= shape[axis]))
        if outside.size:
            raise ValueError(
                f"{what}: indices: got {name} {int(line[outside[0]])} at {int(outside[0])}, wanted 0 to "
                f"{shape[axis] - 1}, within shape {shape}."
            )
    return _sort_by_bag(keys, columns, weights, shape[0])


def _sort_by_bag(keys: np.ndarray, columns: np.ndarray, weights: np.ndarray | None, num_bags: int) -> Bags:
    order = np.lexsort(columns[::-1])
    if not np.array_equal(order, np.arange(order.size)):
        keys, weights = keys[order], None if weights is None else weights[order]
    return Bags(keys, lengths=np.bincount(columns[0], minlength=num_bags), weights=weights)


def _shape_of(given: Any, num_axes: int, what: str) -> tuple[int, ...]:
    shape = tuple(np.atleast_1d(np.asarray(given)).tolist())
    if not all(checks.is_integer(size, 0) for size in shape) or len(shape) < num_axes or len(shape) > 2:
        wanted = "(num_bags, num_columns)" if num_axes == 2 else "(num_bags,) or (num_bags, num_columns)"
        raise ValueError(f"{what}: shape: got {given!r}, wanted {wanted}.")
    return shape


def _bcoo_to_bags(spec: FeatureSpec, matrix: Any, what: str) -> Bags:
    """Reads a sparse `[num_bags, num_keys]` matrix: the column is the key, the datum its weight.

    Without weights an entry is a key where its datum is not zero.
    """
    if matrix.ndim != 2 or matrix.n_batch or matrix.n_dense:
        raise ValueError(
            f"{what}: got a BCOO of shape {list(matrix.shape)} with n_batch={matrix.n_batch} and "
            f"n_dense={matrix.n_dense}, wanted [num_bags, num_keys] with neither; "
            "jax.experimental.sparse.bcoo_update_layout changes it."
        )
    num_bags, num_keys = matrix.shape
    if any(isinstance(array, jax.core.Tracer) for array in (matrix.data, matrix.indices)):
        return _traced_bcoo_to_bags(spec, matrix)
    indices, data = np.asarray(matrix.indices).astype(np.int64), np.asarray(matrix.data)
    if indices.size and indices.min() < 0:
        raise ValueError(f"{what}: indices: got {int(indices.min())}, wanted no negative number.")
    inside = (indices[:, 0] < num_bags) & (indices[:, 1] < num_keys)  # what lies outside is padding
    if not spec.weighted:
        others = data[inside & (data != 0) & (data != 1)]
        if others.size:
            raise ValueError(
                f"{what}: weights: got a BCOO that holds {others[0]}, wanted 0 and 1 alone without declared weights; "
                "declare FeatureSpec(weighted=True)."
            )
        inside &= data != 0
    columns, data = indices[inside].T, data[inside]
    return _sort_by_bag(columns[1].astype(np.uint64), columns, data if spec.weighted else None, num_bags)


def _traced_bcoo_to_bags(spec: FeatureSpec, matrix: Any) -> Bags:
    """Reads a BCOO inside a program, where values cannot be checked: what lies outside is dropped, below 0 too."""
    num_bags, num_keys = matrix.shape
    bags, columns = matrix.indices[:, 0], matrix.indices[:, 1]
    inside = (bags >= 0) & (bags < num_bags) & (columns >= 0) & (columns < num_keys)
    if not spec.weighted:
        inside &= matrix.data != jnp.zeros((), matrix.data.dtype)
    bags = jnp.where(inside, bags.astype(jnp.int32), jnp.int32(num_bags))
    order = jnp.lexsort((columns, bags))
    ends = jnp.arange(num_bags + 1, dtype=jnp.int32)
    offsets = jnp.searchsorted(bags[order], ends).astype(jnp.int32)
    keys = columns[order]
    words = keys_lib.words_of(keys if keys.dtype.itemsize == 8 else keys.astype(jnp.int32), "int32", "batch")
    return Bags(words, offsets=offsets, weights=matrix.data[order] if spec.weighted else None)


def _integers(given: Any, what: str, name: str) -> np.ndarray:
    array = np.asarray(given)
    if array.size == 0 and array.dtype == np.float64:
        array = array.astype(np.int64)  # an empty list
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{what}: {name}: got {array.dtype}{list(array.shape)}, wanted integers.")
    return array.astype(np.int64)


# Arrow ---------------------------------------------------------------------------------------------------------------


def _is_arrow(value: Any) -> bool:
    return hasattr(value, "__arrow_c_array__") or hasattr(value, "__arrow_c_stream__")


def _convert_without_pyarrow(value: Any) -> Any:
    """Converts a column of integers without nulls to NumPy by its own library; returns anything else as it is."""
    if not _is_arrow(value) or not hasattr(value, "__array__"):
        return value
    array = np.asarray(value)
    nulls = getattr(value, "null_count", 0)
    has_nulls = (nulls() if callable(nulls) else nulls) != 0
    # Where there are nulls Pandas and Polars make floats or objects.
    return array if array.dtype.kind in "iu" and array.ndim == 1 and not has_nulls else value


def _arrow_to_numpy(value: Any, what: str, name: str) -> Any:
    if not _is_arrow(value):
        return value
    column = _to_pyarrow(value, what, name)
    if column.null_count:
        raise ValueError(f"{what}: {name}: got {column.null_count} nulls, wanted an integer in every line.")
    return column.to_numpy(zero_copy_only=False)


def _to_pyarrow(value: Any, what: str, name: str) -> Any:
    """Converts any object with Arrow's C interface to a `pyarrow.Array`."""
    try:
        import pyarrow as pa
    except ImportError as error:
        raise ImportError(
            f"{what}: {name}: got {type(value).__name__}, which is read through Arrow; pip install pyarrow. Without it "
            "a column of integers without nulls is taken, or NumPy."
        ) from error
    if not isinstance(value, (pa.Array, pa.ChunkedArray)):
        try:
            value = pa.chunked_array(value) if hasattr(value, "__arrow_c_stream__") else pa.array(value)
        except pa.ArrowException as error:
            raise TypeError(f"{what}: {name}: got a column that Arrow does not read ({error}).") from error
    if isinstance(value, pa.Array):
        return value
    return value.chunk(0) if value.num_chunks == 1 else value.combine_chunks()


def unpack_arrow(column: Any, what: str, name: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the numbers of a column, and the lengths of its lists; null lists are empty, null keys padding.

    Lists of one fixed size are a rectangle `[num_bags, hotness]`, without lengths.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    if pa.types.is_fixed_size_list(kind):
        width = kind.list_size
        # `flatten` skips null lists: their rows stay padding.
        flat = _numbers(column.flatten(), what, name).reshape(len(column) - column.null_count, width)
        if not column.null_count:
            return flat, None
        square = np.full((len(column), width), _NULL_VALUES[flat.dtype.kind], flat.dtype)
        square[column.is_valid().to_numpy(zero_copy_only=False)] = flat
        return square, None
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = pc.list_value_length(column)
        if lengths.null_count:
            lengths = lengths.fill_null(0)
        return _numbers(column.flatten(), what, name), lengths.to_numpy(zero_copy_only=False)
    return _numbers(column, what, name), None


def _numbers(column: Any, what: str, name: str) -> np.ndarray:
    """Returns keys or weights of a column without lists."""
    import pyarrow as pa

    is_key, kind = name == "keys", column.type
    if not (pa.types.is_integer(kind) if is_key else pa.types.is_floating(kind)) and not pa.types.is_null(kind):
        wanted = "integers" if is_key else "floats"
        raise TypeError(
            f"{what}: {name}: got an Arrow column of {kind}, wanted {wanted}, or lists of them; hash strings, "
            "cast times to integers, or leave the column out."
        )
    if pa.types.is_null(kind):
        column = column.cast(pa.int64() if is_key else pa.float32())
    # A column has one dtype, with nulls or without: parts of a batch lie in several processes.
    wider = {pa.uint8(): pa.int16(), pa.uint16(): pa.int32(), pa.uint32(): pa.int64()}
    column = column.cast(wider.get(kind, column.type))
    if column.null_count:
        if not is_key:
            raise ValueError(
                f"{what}: {name}: got {column.null_count} nulls, wanted a number in every place; fill them."
            )
        column = column.fill_null(_NULL_VALUES["u" if kind == pa.uint64() else "i"])
    return column.to_numpy(zero_copy_only=False)
