"""Checks requests against a model, joins several into one call of the session, and splits its answers.

All that a client can get wrong is refused here, before a request joins others.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxsok.features import Bags
from jaxsok.serving.artifact import BagsInput, KeysInput
from jaxsok.serving.errors import RequestError, RequestTooLargeError, UnknownTableError
from jaxsok.serving.http import wire
from jaxsok.types import PADDING_KEY

Arrays = dict[str, np.ndarray]
_PARTS = ("values", "lengths", "weights")  # of ragged bags


@dataclasses.dataclass(frozen=True)
class ParsedRequest:
    """A checked request: its arrays, and what they add to the limits of a call."""

    arrays: Mapping[str, Any]  # keys by table, or inputs by name: arrays and Bags with lengths
    num_keys: Mapping[str, int]  # by table
    num_samples: int = 0  # of a prediction, at least 1

    @property
    def costs(self) -> dict[str, int]:
        """What it adds to the limits of a call, which are those of `limits_of`."""
        return {"": self.num_samples, **self.num_keys}

    @property
    def size(self) -> int:
        """Its number of samples, or of keys if it is a lookup."""
        return self.num_samples or sum(self.num_keys.values())


def limits_of(model: Any) -> dict[str, int]:
    """Gives the limits of one call: samples, under a name that no table has, and keys by table."""
    return {"": model.max_batch_size, **model.max_keys}


class _Calls:
    """Calls of a session, and the most keys that one request may have."""

    def __init__(self, session: Any, max_keys: int) -> None:
        self._session, self._max_keys = session, max_keys

    def _max_keys_of(self, model: Any, table: str) -> int:
        return model.max_keys.get(table, self._max_keys)


class Lookups(_Calls):
    """The endpoint that gives the rows of keys."""

    op, request_field, field = "lookup", "keys", "rows"  # field: of the response

    def most_values(self, model: Any) -> tuple[int, Sequence[str]]:
        """The most numbers that a request can have, and the names of its arrays."""
        num_keys = sum(self._max_keys_of(model, name) for name in model.tables)
        return min(self._max_keys, num_keys), list(model.tables)

    def read(self, body: bytes, given: str, model: Any) -> ParsedRequest:
        """Reads keys by table, uint64 of any shape; raises a ServingError for what the model cannot answer."""
        op, found = self.op, _parse(self, body, given, model)
        if not found:
            raise RequestError(f"{op}: got no tensor, wanted the keys of at least one table.")
        for name in found:
            if name not in model.tables:
                raise UnknownTableError.of(op, name[:80], model.tables, f'model "{model.name}"')
        keys = {name: wire.read_keys(value, f'{op}: keys of table "{name}"') for name, value in found.items()}
        for name, array in keys.items():
            _check_most(wire.extent(array.shape), self._max_keys_of(model, name), f'{op}: table "{name}"')
            _check_bits(array, model, f'{op}: keys of table "{name}"')
        _check_most(sum(wire.extent(array.shape) for array in keys.values()), self._max_keys, op)
        return ParsedRequest(keys, {name: array.size for name, array in keys.items()})

    def run(self, model: str, requests: Sequence[ParsedRequest]) -> list[tuple[Arrays, int]]:
        """Runs all requests in one call; gives each its rows, `[*shape of the keys, dim]`, and the version."""
        keys_of = [request.arrays for request in requests]
        names = list(dict.fromkeys(name for keys in keys_of for name in keys))
        joined = {name: np.concatenate([keys[name].reshape(-1) for keys in keys_of if name in keys]) for name in names}
        answer = self._session.lookup(joined, model=model)
        rows = {name: np.asarray(answer[name], np.float32) for name in names}
        places, results = dict.fromkeys(names, 0), []
        for request in requests:
            parts = {}
            for name, keys in request.arrays.items():
                begin, places[name] = places[name], places[name] + keys.size
                parts[name] = rows[name][begin : places[name]].reshape(*keys.shape, rows[name].shape[-1])
            results.append((parts, int(answer.version)))
        return results


class Predictions(_Calls):
    """The endpoint that runs the model of `dense_file`."""

    op, request_field, field = "predict", "inputs", "outputs"

    def most_values(self, model: Any) -> tuple[int, Sequence[str]]:
        """The most numbers that a request can have, and the names of its arrays."""
        keys, rest, names = dict[str, int](), 0, list[str]()
        weighted = set[str]()
        for name, spec in model.inputs.items():
            names += [name, *(f"{name}.{part}" for part in _PARTS)]
            if not isinstance(spec, BagsInput | KeysInput):
                rest += model.max_batch_size * wire.extent(spec.shape)
                continue
            limit = self._max_keys_of(model, spec.table)
            if isinstance(spec, KeysInput):
                most = min(limit, model.max_batch_size * wire.extent(spec.shape))
            else:
                most = limit
                rest += model.max_batch_size  # lengths
                if spec.is_weighted:
                    weighted.add(spec.table)
            keys[spec.table] = min(limit, keys.get(spec.table, 0) + most)
        rest += min(self._max_keys, sum(keys[table] for table in weighted))
        return rest + min(self._max_keys, sum(keys.values())), names

    def read(self, body: bytes, given: str, model: Any) -> ParsedRequest:
        """Reads inputs of one batch size; raises a ServingError for what the model cannot answer."""
        op, specs, found = self.op, model.inputs, _parse(self, body, given, model)
        if given == "tensors":
            found = _with_bags(found, specs, op)
        for name in found:
            if name not in specs:
                raise RequestError(f"{op}: input: got {wire.brief(name)}, wanted {sorted(specs)}.")
        missing = sorted(set(specs) - set(found))
        if missing:
            raise RequestError(f"{op}: inputs: got none for {missing}, wanted {sorted(specs)}.")
        inputs, sizes, num_keys = {}, {}, dict[str, int]()
        for name, value in found.items():
            spec, what = specs[name], f'{op}: input "{name}"'
            inputs[name] = array = _read_input(value, spec, model.max_batch_size, what)
            sizes[name] = len(array.lengths if isinstance(array, Bags) else array)
            if isinstance(spec, BagsInput | KeysInput):
                keys = array.keys if isinstance(array, Bags) else array
                _check_bits(keys, model, what)
                num_keys[spec.table] = num_keys.get(spec.table, 0) + keys.size
        if len(set(sizes.values())) > 1:
            raise RequestError(f"{op}: inputs must have one number of samples, got {sizes}.")
        num_samples = next(iter(sizes.values()))
        _check_most(num_samples, model.max_batch_size, op, "samples")
        if num_samples == 0:
            raise RequestError(f"{op}: got 0 samples, wanted at least 1.")
        _check_most(sum(num_keys.values()), self._max_keys, op)
        for table, number in num_keys.items():
            _check_most(number, self._max_keys_of(model, table), f'{op}: table "{table}"')
        return ParsedRequest(inputs, num_keys, num_samples)

    def run(self, model: str, requests: Sequence[ParsedRequest]) -> list[tuple[Arrays, int]]:
        """Gives each request its outputs, and the version.

        Requests share a call if their samples have one shape and each output has a row for each sample. Otherwise each
        has its own call: a mean over the batch, for example, must not mix clients.
        """
        known = self._session.models[model]
        groups: dict[Any, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(_shapes(request) if _can_join(known) else number, []).append(number)
        results: list[Any] = [None] * len(requests)
        for numbers in groups.values():
            found = self._run_joined(known, [requests[number] for number in numbers])
            for number, result in zip(numbers, found, strict=True):
                results[number] = result
        return results

    def _run_joined(self, known: Any, requests: Sequence[ParsedRequest]) -> list[tuple[Arrays, int]]:
        joined = {name: _join([request.arrays[name] for request in requests]) for name in requests[0].arrays}
        answer = self._session.predict(joined, model=known.name)
        outputs = {name: _sendable(np.asarray(value)) for name, value in answer.items()}
        if len(requests) == 1:
            return [(outputs, int(answer.version))]
        if answer.version != known.version:  # the dense model may be one whose results cannot be cut
            return [result for request in requests for result in self._run_joined(known, [request])]
        results, begin = [], 0
        for request in requests:
            end = begin + request.num_samples
            results.append(({name: value[begin:end] for name, value in outputs.items()}, int(answer.version)))
            begin = end
        return results


def _parse(kind: Lookups | Predictions, body: bytes, given: str, model: Any) -> dict[str, Any]:
    """Reads the arrays of a request by name: tensors, or what JSON has."""
    if given == "tensors":
        return wire.read_tensors(body, kind.op)
    wire.check_json(body, *kind.most_values(model), kind.op)
    return wire.read_json(body, kind.op, kind.request_field)


def _can_join(model: Any) -> bool:
    """Whether all results of a model can be cut between requests."""
    return model.outputs is not None and all(output.is_batched for output in model.outputs.values())


def _check_bits(keys: np.ndarray, model: Any, what: str) -> None:
    if model.key_bits == 64:
        return
    wrong = (keys >> np.uint64(32) != 0) & (keys != np.uint64(PADDING_KEY))
    if wrong.any():
        raise RequestError(f"{what}: keys: got {keys[wrong].view(np.int64)[0]}, wanted 0 to 4294967295, or -1.")


def _check_most(number: int, limit: int, what: str, noun: str = "keys") -> None:
    if number > limit:
        raise RequestTooLargeError(f"{what}: got {number} {noun}, at most {limit} are taken.")


def _read_input(value: Any, spec: Any, max_samples: int, what: str) -> np.ndarray | Bags:
    if isinstance(spec, BagsInput):
        return _read_bags(value, spec, max_samples, what)
    array = wire.read_keys(value, what) if isinstance(spec, KeysInput) else wire.read_numbers(value, spec.dtype, what)
    if array.shape[1:] != tuple(spec.shape):
        wanted = ", ".join(["samples", *map(str, spec.shape)])
        raise RequestError(f"{what}: got shape {list(array.shape)}, wanted [{wanted}].")
    return array


def _read_bags(value: Any, spec: BagsInput, max_samples: int, what: str) -> Bags:
    """Reads ragged bags, or bags of one hotness: keys `[samples, hotness]`."""
    if isinstance(value, dict):
        return wire.read_bags(value, spec.is_weighted, what)
    if spec.is_weighted:
        raise RequestError(f"{what}: got no weights, wanted values, lengths and weights.")
    keys = wire.read_keys(value, what)
    if keys.ndim != 2:
        raise RequestError(f"{what}: got shape {list(keys.shape)}, wanted [samples, keys]; or values and lengths.")
    # Bags without keys take no bytes, so a small body may have any number of them.
    _check_most(len(keys), max_samples, Predictions.op, "samples")
    return Bags(keys.reshape(-1), lengths=np.full(len(keys), keys.shape[1], np.int32))


def _with_bags(found: dict[str, Any], specs: Mapping[str, Any], op: str) -> dict[str, Any]:
    """Gathers tensors "x.values", "x.lengths" (and "x.weights") as the parts of the input "x", as JSON has them."""
    for name, spec in specs.items():
        values, lengths, weights = (f"{name}.{part}" for part in _PARTS)
        if not isinstance(spec, BagsInput) or name in found or values not in found or lengths not in found:
            continue
        if spec.is_weighted and weights not in found:
            raise RequestError(f'{op}: input "{name}": got no tensor "{weights[:80]}", wanted one.')
        parts = _PARTS if spec.is_weighted else _PARTS[:2]
        found[name] = {part: found.pop(f"{name}.{part}") for part in parts}
    return found


def _shapes(request: ParsedRequest) -> Any:
    arrays = sorted(request.arrays.items())
    return tuple((name, "ragged" if isinstance(value, Bags) else value.shape[1:]) for name, value in arrays)


def _join(values: Sequence[Any]) -> Any:
    """Joins the values of one input as the session takes it."""
    if not isinstance(values[0], Bags):
        return np.concatenate(values)
    lengths = np.concatenate([value.lengths for value in values])
    return Bags(
        np.concatenate([value.keys for value in values]),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        weights=None if values[0].weights is None else np.concatenate([value.weights for value in values]),
    )


def _sendable(value: np.ndarray) -> np.ndarray:
    """Converts what is neither an integer nor a wide float to float32, so that both formats have its dtype."""
    return value if value.dtype.kind in "iu" or value.dtype in (np.float32, np.float64) else value.astype(np.float32)
