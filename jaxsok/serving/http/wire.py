"""The two formats of a body: JSON, and tensors in the safetensors layout.

Nothing here trusts a size, a type or a nesting, and no format can name code or a file. A binary body is

    u64, little-endian     bytes of the header
    header, JSON           {"user": {"dtype": "U64", "shape": [2, 3], "data_offsets": [0, 48]}, "__metadata__": {...}}
    data                   the arrays, row-major and little-endian, without holes, in any order
"""

import contextlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from jaxsok.features import Bags
from jaxsok.serving import strict_json
from jaxsok.serving.errors import RequestError, RequestTooLargeError

TENSORS = "application/vnd.jaxsok.v1+safetensors"
MEDIA_TYPES = {"json": "application/json", "tensors": TENSORS}
_FORMATS = {media_type: given for given, media_type in MEDIA_TYPES.items()}

MAX_HEADER_BYTES = 1 << 20
VALUE_BYTES = {"json": 64, "tensors": 8}
"""Bytes of a body for each number: JSON has up to 20 digits in quotes, with brackets, spaces and line ends."""
_METADATA = "__metadata__"
REST_BYTES = 1 << 16  # of a body without its numbers and names
MAX_NDIM = 8
PIECE_VALUES = 1 << 14  # numbers of a JSON response that are written at a time: some 10 ms
_MAX_AXIS = 2**31 - 1
_DTYPES = {
    f"{kind.upper()}{8 * size}": np.dtype(f"<{kind}{size}")
    for kind, sizes in (("u", (1, 2, 4, 8)), ("i", (1, 2, 4, 8)), ("f", (2, 4, 8)))
    for size in sizes
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_KEY = re.compile(r"-?[0-9]{1,20}", re.ASCII)
_KINDS = {bool: "boolean", int: "number", float: "number", str: "string", list: "list", dict: "object"}  # of JSON
_NONFINITE = {math.inf: "Infinity", -math.inf: "-Infinity"}


def extent(shape: Iterable[int]) -> int:
    """Counts the numbers of an array as lists; an axis of size 0 counts as 1, since its outer lists remain."""
    return math.prod(size or 1 for size in shape)


def brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def read_json(body: bytes, what: str, field: str) -> dict[str, Any]:
    """Reads a body, an object whose only field is an object with at least one name; returns the inner object."""
    found = _parse_object(body, what, "the body", f"an object with {_list([field])}")
    _check_fields(found, [field], f"{what}: got the fields")
    value = found[field]
    if not isinstance(value, dict) or not value:
        got = "an empty object" if value == {} else f"a JSON {_kind(value)}"
        raise RequestError(f"{what}: {field}: got {got}, wanted an object of arrays by name.")
    return value


def _parse_object(text: bytes, what: str, part: str, wanted: str) -> dict[str, Any]:
    try:
        found = strict_json.parse(text.decode())
    except ValueError as error:
        raise RequestError(f"{what}: {part} is no JSON: {error}; wanted {wanted}.") from None
    if not isinstance(found, dict):
        raise RequestError(f"{what}: {part}: got a JSON {_kind(found)}, wanted {wanted}.")
    return found


def _check_fields(value: Mapping[str, Any], wanted: Sequence[str], got: str) -> None:
    if set(value) != set(wanted):
        names = _list(list(value)[:8]) if value else "none"
        raise RequestError(f"{got} {names}, wanted {_list(wanted)}.")


def body_bytes(given: str, num_values: int, names: Sequence[str]) -> int:
    """Bounds the bytes that a body of `num_values` numbers, in arrays of these names, can need."""
    return REST_BYTES + VALUE_BYTES[given] * num_values + sum(256 + 12 * len(name) for name in names)


def check_json(body: bytes, num_values: int, names: Sequence[str], what: str) -> None:
    """Refuses bodies that would become many more objects than a request can need, before they are parsed.

    Python makes up to 70 bytes of a byte of JSON. Commas, brackets and colons bound its objects; twice as many commas
    and colons as are needed pass, so that bodies only a little too large get a message of their own. Each number may
    have a bracket of its own on each level.
    """
    inside = "".join(names)
    for sign, most in ((",", 2 * num_values), ("[", MAX_NDIM * num_values), (":", 2 * len(names))):
        most += 1024 + inside.count(sign)
        got = body.count(sign.encode())
        if got > most:
            message = f'{what}: got JSON with "{sign}" {got} times, at most {most} are taken: a request has at most '
            raise RequestTooLargeError(f"{message}{num_values} numbers.")


@np.errstate(invalid="ignore")  # of NaN that signal
def json_body(name: str, arrays: Mapping[str, np.ndarray], rest: Mapping[str, Any]) -> bytes:
    """Writes a response: `rest`, and below `name` the arrays as nested lists; docs/server.md has their form."""
    if sum(extent(array.shape) for array in arrays.values()) <= PIECE_VALUES:  # many small arrays cost little at once
        text = _dumps({**rest, name: {key: _widen(array) for key, array in arrays.items()}})
        if b"null" not in text:
            return text
    parts = [_dumps(rest)[:-1] + (b"," if rest else b"") + _dumps(name) + b":{"]
    for number, (key, array) in enumerate(arrays.items()):
        parts.append((b"," if number else b"") + _dumps(key) + b":")
        _write(array, parts)
    return b"".join([*parts, b"}}"])


def _write(array: np.ndarray, parts: list[bytes]) -> None:
    """Adds an array's text in pieces: all other threads, also the event loop, wait while one is written."""
    if extent(array.shape) <= PIECE_VALUES:
        parts.append(_dumps_array(array))
        return
    step = max(1, PIECE_VALUES // extent(array.shape[1:]))
    for begin in range(0, len(array), step):
        parts.append(b"," if begin else b"[")
        if step == 1:
            _write(array[begin], parts)
        else:
            parts.append(_dumps_array(array[begin : begin + step])[1:-1])
    parts.append(b"]" if len(array) else b"[]")


def _dumps(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def _dumps_array(array: np.ndarray) -> bytes:
    text = _dumps(_widen(array))
    if b"null" not in text:
        return text
    flat = [item if math.isfinite(item) else _NONFINITE.get(item, "NaN") for item in array.reshape(-1).tolist()]
    return _dumps(np.array(flat, object).reshape(array.shape).tolist())


def _widen(array: np.ndarray) -> Any:
    """Makes of an array what is written: a float32 as the double of the same value; null is what is not finite."""
    if array.ndim == 0:
        return array.item()
    return array.astype(np.float64 if array.dtype.kind == "f" else array.dtype, order="C")


def _flatten(value: Any, what: str, kinds: set[type], wanted: str) -> tuple[list[Any], tuple[int, ...]]:
    """Gives the items of nested lists, of some types, and their shape; goes by level, which C does fast."""
    if type(value) is not list:
        raise RequestError(f"{what}: got {_with_kind(value)}, wanted a list, or lists of lists of one shape.")
    if not (found := set(map(type, value))) - kinds:  # one axis, as most requests have
        return value, (len(value),)
    shape, items = list[int](), [value]
    while list in (found := set(map(type, items))):
        if found != {list}:
            other = next(item for item in items if type(item) is not list)
            raise RequestError(f"{what}: lists must have one depth, got {_with_kind(other)} next to a list.")
        if len(lengths := set(map(len, items))) > 1:
            got = f"{min(lengths)} and {max(lengths)}"
            raise RequestError(f"{what}: lists of one level must have one length, got {got}.")
        if len(shape) == MAX_NDIM:
            raise RequestError(f"{what}: got more than {MAX_NDIM} levels of lists.")
        shape.append(lengths.pop())
        items = list(itertools.chain.from_iterable(items))
    if found - kinds:
        other = next(item for item in items if type(item) not in kinds)
        raise RequestError(f"{what}: {wanted} are wanted, got {_with_kind(other)}.")
    return items, tuple(shape)


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "null")


def _with_kind(value: Any) -> str:
    return "a list" if isinstance(value, list) else f"the {_kind(value)} {brief(value)}"


def _list(names: Iterable[str]) -> str:
    return ", ".join(json.dumps(name if len(name) <= 60 else f"{name[:60]}...") for name in names)


def read_tensors(body: bytes, what: str) -> dict[str, np.ndarray]:
    """Reads the arrays of a binary body, which share its memory. `__metadata__` is checked and left out."""
    if len(body) < 8:
        raise RequestError(f"{what}: got {len(body)} bytes, wanted at least the 8 that hold the size of the header.")
    size = int.from_bytes(body[:8], "little")
    if size > MAX_HEADER_BYTES:
        message = f"{what}: the header says that it has {size} bytes, at most {MAX_HEADER_BYTES} are taken."
        raise RequestTooLargeError(message)
    if size > len(body) - 8:
        raise RequestError(f"{what}: the header says that it has {size} bytes, {len(body) - 8} follow.")
    if size and body[8:9] != b"{":
        raise RequestError(f"{what}: the header: got {body[8:9]!r} first, wanted the brace of a JSON object.")
    header = _parse_object(body[8 : 8 + size], what, "the header", "a JSON object, in UTF-8, from the first byte")
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise RequestError(f"{what}: header: __metadata__ must be an object of strings.")
    num_bytes, arrays, parts = len(body) - 8 - size, {}, []
    for name, entry in header.items():
        dtype, shape, begin, end = _read_entry(entry, f"{what}: tensor {brief(name)}")
        if end > num_bytes:
            raise RequestError(f"{what}: tensor {brief(name)} ends at byte {end}, the data have {num_bytes}.")
        arrays[name] = np.frombuffer(body, dtype, math.prod(shape), 8 + size + begin).reshape(shape)
        parts.append((begin, end))
    place = 0
    for begin, end in sorted(parts):
        if begin != place:
            raise RequestError(f"{what}: data_offsets must follow each other, got {begin} behind {place}.")
        place = end
    if place != num_bytes:
        raise RequestError(f"{what}: the tensors have {place} bytes, the data {num_bytes}.")
    return arrays


def _read_entry(entry: Any, what: str) -> tuple[np.dtype, tuple[int, ...], int, int]:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise RequestError(f"{what}: wanted an object with dtype, shape, data_offsets.")
    name, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(name, str) or name not in _DTYPES:
        raise RequestError(f"{what}: got dtype {brief(name)}, wanted one of {', '.join(_DTYPES)}.")
    if not _sizes(shape) or len(shape) > MAX_NDIM:
        raise RequestError(f"{what}: got shape {brief(shape)}, wanted at most {MAX_NDIM} sizes, each below 2**31.")
    if not _sizes(offsets, 2**63) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise RequestError(f"{what}: got data_offsets {brief(offsets)}, wanted [begin, end].")
    if extent(shape) > _MAX_AXIS:
        raise RequestError(f"{what}: got shape {brief(shape)}, wanted fewer than 2**31 numbers.")
    num_bytes, (begin, end) = math.prod(shape) * _DTYPES[name].itemsize, offsets
    if num_bytes != end - begin:
        raise RequestError(f"{what}: {name}{shape} takes {num_bytes} bytes, data_offsets {end - begin}.")
    return _DTYPES[name], tuple(shape), begin, end


def _sizes(value: Any, limit: int = _MAX_AXIS) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size <= limit for size in value)


def tensors_body(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """Writes arrays as a binary body; the data begin at a multiple of 8 bytes."""
    if _METADATA in arrays:
        raise RequestError(f'response: got an array named "{_METADATA}", which this format needs; ask for JSON.')
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    data, place = [], 0
    # Wide ones first, so that each begins at a multiple of its item's size.
    for name, array in sorted(arrays.items(), key=lambda pair: -pair[1].dtype.itemsize):
        little = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(array.shape)
        end = place + little.nbytes
        header[name] = {"dtype": _NAMES[little.dtype], "shape": list(little.shape), "data_offsets": [place, end]}
        data.append(little.tobytes())
        place = end
    text = _dumps(header)
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *data])


def read_keys(value: Any, what: str) -> np.ndarray:
    """Reads keys, uint64, of a tensor of integers, or of JSON lists of integers, or of strings of their digits."""
    if isinstance(value, np.ndarray):
        _check_tensor(value, np.dtype(np.uint64), what)
        return value.astype(np.uint64 if value.dtype.kind == "u" else np.int64).view(np.uint64)
    flat, shape = _flatten(value, what, {int, str}, "integers")
    if str in set(map(type, flat)):
        for item in flat:
            if type(item) is str and _KEY.fullmatch(item) is None:
                raise RequestError(f"{what}: got {brief(item)}, wanted an integer or a string of its digits.")
        flat = list(map(int, flat))
    with contextlib.suppress(OverflowError):
        return np.array(flat, np.int64).view(np.uint64).reshape(shape)
    for item in flat:
        if not -(2**63) <= item < 2**64:
            raise RequestError(f"{what}: got the key {brief(item)}, wanted 64 bits: -2**63 to 2**64 - 1.")
    return np.array([item % 2**64 for item in flat], np.uint64).reshape(shape)


def read_numbers(value: Any, dtype: Any, what: str) -> np.ndarray:
    """Reads numbers of a dtype, of a tensor or of JSON lists of one shape; NaN and infinities of tensors alone."""
    dtype = np.dtype(dtype)
    array = _check_tensor(value, dtype, what) if isinstance(value, np.ndarray) else _array_of(value, dtype, what)
    with np.errstate(over="ignore", invalid="ignore"):
        made = array.astype(dtype)
        is_lost = np.isfinite(array) & ~np.isfinite(made.astype(np.float64))
        if _kind_of(dtype) in "biu":
            given = made if dtype.kind in "biu" else made.astype(np.int64)
            is_lost = (given != array) | ((given < 0) != (array < 0))
    if is_lost.any():
        raise RequestError(f"{what}: got a number that does not fit {dtype.name}.")
    return made


def _kind_of(dtype: np.dtype) -> str:
    """Returns NumPy's letter for a kind of numbers, also for integers of 4 bits, to which NumPy gives that of bytes."""
    return dtype.kind if dtype.kind != "V" else {"int": "i", "uint": "u"}.get(dtype.name.rstrip("0123456789"), "f")


def _check_tensor(array: np.ndarray, dtype: np.dtype, what: str) -> np.ndarray:
    if array.ndim == 0:
        raise RequestError(f"{what}: got a single number, wanted at least one axis.")
    if dtype.kind == "b" and (array.dtype.kind != "u" or (array > 1).any()):
        raise RequestError(f"{what}: booleans are wanted, as U8 of 0 and 1, got {_NAMES[array.dtype]}.")
    if _kind_of(dtype) in "iu" and array.dtype.kind not in "iu":
        raise RequestError(f"{what}: wanted integers, got {_NAMES[array.dtype]}{list(array.shape)}.")
    return array


def _array_of(value: Any, dtype: np.dtype, what: str) -> np.ndarray:
    """Makes an array of nested lists, of 64 bits: doubles are what JSON means."""
    kinds, wide, wanted = {int, float}, np.float64, "numbers"
    if _kind_of(dtype) in "biu":
        kinds, wide, wanted = ({bool}, np.bool_, "booleans") if dtype.kind == "b" else ({int}, np.int64, "integers")
    flat, shape = _flatten(value, what, kinds, wanted)
    array = np.array(math.inf)
    with contextlib.suppress(OverflowError):
        array = np.array(flat, wide)
    if not np.isfinite(array).all():
        raise RequestError(f"{what}: got a number that does not fit {dtype.name}.")
    return array.reshape(shape)


def read_bags(parts: Mapping[str, Any], is_weighted: bool, what: str) -> Bags:
    """Reads bags of keys from `values`, `lengths` and, where they are wanted, `weights`, of either format."""
    names = ["values", "lengths", *(["weights"] if is_weighted else [])]
    _check_fields(parts, names, f"{what}: got an object with the fields")
    values, lengths = (read_keys(parts[name], f"{what}.{name}") for name in names[:2])
    weights = read_numbers(parts["weights"], np.float32, f"{what}.weights") if is_weighted else None
    if values.ndim != 1 or lengths.ndim != 1 or (weights is not None and weights.shape != values.shape):
        shapes = [list(array.shape) for array in (values, lengths, weights) if array is not None]
        if weights is not None and weights.ndim == values.ndim == lengths.ndim == 1:
            raise RequestError(f"{what}: weights: got {len(weights)}, wanted one for each of {len(values)} values.")
        raise RequestError(f"{what}: values, lengths (and weights) must be lists of numbers, got shapes {shapes}.")
    if weights is not None and not np.isfinite(weights).all():
        raise RequestError(f"{what}: weights must be finite, got infinite ones or NaN.")
    # A negative or huge length is above the number of values; the sum is of Python integers, so it cannot wrap.
    if (lengths > np.uint64(len(values))).any() or sum(lengths.tolist()) != len(values):
        raise RequestError(f"{what}: lengths must add up to the number of values, {len(values)}.")
    return Bags(values, lengths=lengths.astype(np.int32), weights=weights)


def media_type_of(content_type: str | None) -> str | None:
    """Finds the format that a Content-Type names, in UTF-8; None: neither."""
    kind, *parameters = (part.strip().lower() for part in (content_type or "").split(";"))
    pairs = (parameter.partition("=") for parameter in parameters)
    charsets = {value.strip(' "') for name, _, value in pairs if name.startswith("charset")}
    return _FORMATS.get(kind) if charsets <= {"utf-8", "utf8"} else None


def choose_format(accept: str | None, default: str) -> str | None:
    """Finds the format that an Accept header asks for; `default` where it leaves the choice; None: neither."""
    if accept is None or accept.strip() in ("", "*/*"):
        return default
    asked: dict[str, float] = {}
    for part in accept.lower().split(","):
        quality = re.search(r";\s*q\s*=\s*([01](?:\.[0-9]{0,3})?)\s*(?:;|$)", part)
        asked[part.partition(";")[0].strip()] = 1.0 if quality is None else float(quality[1])
    weights = {
        given: next((asked[name] for name in (media_type, "application/*", "*/*") if name in asked), 0.0)
        for given, media_type in MEDIA_TYPES.items()
    }
    best = max(weights, key=lambda given: (weights[given], given == default))
    return best if weights[best] else None
