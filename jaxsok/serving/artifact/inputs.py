"""The inputs and outputs of a model: declared, checked when it is called, and padded."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxsok import checks, keys as keys_lib
from jaxsok.features import Bags
from jaxsok.keys import PADDING_WORD
from jaxsok.raw_features import bag_offsets, read_places
from jaxsok.serving.errors import RequestError, refusals
from jaxsok.serving.padding import fill_up, padded_size

BATCH = "b"  # the batch size in shapes

LEAST_BATCH = 8  # samples, and keys of bags, of a padded call, at least


@dataclasses.dataclass(frozen=True)
class KeysInput:
    """Keys, equally many per sample: a caller gives integers `[b, *shape]`, the model gets `uint32[b, *shape, 2]`."""

    table: str
    """The table whose keys they are."""
    shape: tuple[int, ...] = ()
    """The shape of one sample."""

    def __post_init__(self) -> None:
        _check_table(self)
        _check_shape(self)


@dataclasses.dataclass(frozen=True)
class BagsInput:
    """A bag of keys for each sample: callers give `jaxsok.Bags`, and the model gets them with offsets.

    Example:
      >>> BagsInput("item", is_weighted=True).table
      'item'
    """

    table: str
    """The table whose keys they are."""
    is_weighted: bool = False
    """Whether each key has a weight."""

    def __post_init__(self) -> None:
        _check_table(self)


@dataclasses.dataclass(frozen=True)
class ArrayInput:
    """Numbers: `[b, *shape]`.

    Example:
      >>> ArrayInput((13,)).dtype
      'float32'
    """

    shape: tuple[int, ...] = ()
    """The shape of one sample."""
    dtype: str = "float32"

    def __post_init__(self) -> None:
        _check_shape(self)
        try:
            dtype = jnp.dtype(self.dtype)
        except TypeError as error:
            raise TypeError(f"ArrayInput: dtype: got {self.dtype!r}, wanted a dtype of numbers.") from error
        if dtype.itemsize > 4 or not (jnp.issubdtype(dtype, jnp.number) or dtype == np.bool_):
            raise ValueError(f"ArrayInput: dtype: got {self.dtype!r}, wanted numbers of at most 32 bits.")
        object.__setattr__(self, "dtype", dtype.name)


InputSpec: TypeAlias = KeysInput | BagsInput | ArrayInput

KINDS: dict[str, type] = {"keys": KeysInput, "bags": BagsInput, "array": ArrayInput}


def input_to_json(spec: InputSpec) -> dict[str, Any]:
    (kind,) = (kind for kind, cls in KINDS.items() if type(spec) is cls)
    return {"kind": kind, **dataclasses.asdict(spec)}


def input_from_json(entry: Mapping[str, Any]) -> InputSpec:
    kind = KINDS[entry["kind"]]
    return kind(**{field.name: entry[field.name] for field in dataclasses.fields(kind)})  # lists become tuples there


@dataclasses.dataclass(frozen=True)
class OutputSpec:
    """A result of a model."""

    shape: tuple[int | str, ...]
    """A number, or a formula of "b", the batch size."""
    dtype: str

    @property
    def is_batched(self) -> bool:
        """True if it has a row for each sample, and no size within a row depends on how many there are."""
        return bool(self.shape) and self.shape[0] == BATCH and all(isinstance(size, int) for size in self.shape[1:])


def _check_table(spec: Any) -> None:
    if not isinstance(spec.table, str) or not spec.table:
        raise TypeError(f"{type(spec).__name__}: table: got {spec.table!r}, wanted the name of a table.")


def _check_shape(spec: Any) -> None:
    try:
        shape = tuple(spec.shape)
    except TypeError as error:
        raise TypeError(f"{type(spec).__name__}: shape: got {spec.shape!r}, wanted that of one sample.") from error
    if not all(checks.is_integer(size, 1) for size in shape):
        raise ValueError(f"{type(spec).__name__}: shape: got {shape}, wanted that of one sample, sizes from 1.")
    object.__setattr__(spec, "shape", tuple(map(int, shape)))


def input_shapes(spec: InputSpec, num_samples: Any, num_keys: Any) -> Any:
    """Describes the arrays of an input of a program, whose sizes may be symbolic; `num_keys` are those of bags."""
    shape = jax.ShapeDtypeStruct
    if isinstance(spec, KeysInput):
        return shape((num_samples, *spec.shape, 2), jnp.uint32)
    if isinstance(spec, BagsInput):
        weights = (shape((num_keys,), jnp.float32),) if spec.is_weighted else ()
        return shape((num_keys, 2), jnp.uint32), shape((num_samples + 1,), jnp.int32), *weights
    return shape((num_samples, *spec.shape), jnp.dtype(spec.dtype))


@refusals()
def read_input(what: str, spec: InputSpec, given: Any) -> tuple[Any, int]:
    """Checks an input; returns it in the program's form, with its batch size."""
    if isinstance(spec, KeysInput):
        words = keys_lib.words_of(given, "int32", what)
        if words.ndim < 2 or words.shape[1:-1] != spec.shape:
            raise RequestError(f"{what}: got keys of shape {list(words.shape[:-1])}, wanted {_shape_of(spec)}.")
        return words, words.shape[0]
    if isinstance(spec, BagsInput):
        return _read_bags(what, spec, given)
    array = given if isinstance(given, jax.Array) else np.asarray(given)
    wanted = jnp.dtype(spec.dtype)
    if not _fits(array.dtype, wanted):
        raise RequestError(f"{what}: got {array.dtype}{list(array.shape)}, wanted {spec.dtype}.")
    if array.ndim == 0 or array.shape[1:] != spec.shape:
        raise RequestError(f"{what}: got shape {list(array.shape)}, wanted {_shape_of(spec)}.")
    made = array.astype(wanted)
    if jnp.issubdtype(wanted, jnp.integer) and not np.can_cast(array.dtype, wanted, "safe"):
        wrong = np.asarray((made != array) | ((made < 0) != (array < 0)))
        if wrong.any():
            first, limits = np.asarray(array)[wrong][0], jnp.iinfo(wanted)
            raise RequestError(f"{what}: got {first}, wanted {limits.min} to {limits.max}, as {spec.dtype} has.")
    return made, array.shape[0]


def _read_bags(what: str, spec: BagsInput, given: Any) -> tuple[Any, int]:
    if not isinstance(given, Bags):
        raise RequestError(f"{what}: got {type(given).__name__}, wanted jaxsok.Bags.")
    if given.inverse is not None:
        raise RequestError(f"{what}: inverse: got one, wanted none.")
    if (given.weights is not None) != spec.is_weighted:
        got, wanted = ("none", "one for each key") if spec.is_weighted else ("some", "none")
        raise RequestError(f"{what}: weights: got {got}, wanted {wanted}.")
    words = keys_lib.words_of(given.keys, "int32", what)
    shape = words.shape[:-1]
    if given.lengths is None and given.offsets is None:
        if len(shape) not in (1, 2):
            raise RequestError(f"{what}: got keys of shape {list(shape)}, wanted [{BATCH}] or [{BATCH}, hotness].")
        offsets = np.arange(shape[0] + 1) * (shape[1] if len(shape) == 2 else 1)
        words = words.reshape(-1, 2)
    else:
        name, places = read_places(given, words, what)
        offsets = bag_offsets(places, name, words.shape[0], what)
    inside = slice(int(offsets[0]), int(offsets[-1]))  # other keys are not read
    leaves = [words[inside], (offsets - offsets[0]).astype(np.int32)]
    if spec.is_weighted:
        weights = given.weights if isinstance(given.weights, jax.Array) else np.asarray(given.weights)
        if weights.shape != shape or not _fits(weights.dtype, jnp.dtype("float32")):
            raise RequestError(
                f"{what}: weights: got {weights.dtype}{list(weights.shape)}, wanted float32{list(shape)}, as the keys."
            )
        if isinstance(weights, np.ndarray) and not np.isfinite(weights).all():
            raise RequestError(f"{what}: weights: got infinite or NaN, wanted finite numbers.")
        leaves.append(weights.astype(jnp.float32).reshape(-1)[inside])
    if not len(leaves[0]):  # a size of a program is 1 at least; the key is beyond the last bag
        leaves = [fill_up(leaves[0], 1, PADDING_WORD), leaves[1], *(fill_up(leaf, 1, 0) for leaf in leaves[2:])]
    return tuple(leaves), len(offsets) - 1


def _fits(got: Any, wanted: Any) -> bool:
    """Allows numbers of the same kind, and integers for floats."""
    is_integer = jnp.issubdtype(got, jnp.integer)
    if got == wanted or jnp.issubdtype(wanted, jnp.bool_):
        return got == wanted
    if jnp.issubdtype(wanted, jnp.integer):
        return is_integer and (np.can_cast(got, wanted, "safe") or got == np.int64)
    return is_integer or jnp.issubdtype(got, jnp.floating)


def pad_input(leaves: Any, size: int) -> Any:
    """Fills an input up to `size` samples: with PADDING_KEY, empty bags, or 0."""
    if isinstance(leaves, tuple):
        words, offsets, *weights = leaves
        num_keys, last = padded_size(words.shape[0], LEAST_BATCH), offsets[-1] if len(offsets) else 0
        weights = (fill_up(array, num_keys, 0) for array in weights)
        return fill_up(words, num_keys, PADDING_WORD), fill_up(offsets, size + 1, last), *weights
    return fill_up(leaves, size, PADDING_WORD if leaves.dtype == jnp.uint32 else 0)


def _shape_of(spec: KeysInput | ArrayInput) -> str:
    return f"[{', '.join(map(str, [BATCH, *spec.shape]))}]"
