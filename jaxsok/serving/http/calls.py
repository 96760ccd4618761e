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


@dataclasses.dataclass(frozen=True)
class Samples:
    """The inputs of one predict request."""

    inputs: Mapping[str, np.ndarray | wire.Ragged]
    num_samples: int
    num_keys: Mapping[str, int]  # by table


class Lookups:
    """The endpoint that gives the rows of keys."""

    op = "lookup"
    field = "rows"  # of the response

    def __init__(self, session: Any, max_keys: int) -> None:
        self._session, self._max_keys = session, max_keys

    def most_values(self, model: Any) -> tuple[int, Sequence[str]]:
        """The most numbers that a request can have, and the names of its arrays."""
        num_keys = sum(model.max_keys.get(name, self._max_keys) for name in model.tables)
        return min(self._max_keys, num_keys), list(model.tables)

    def read(self, body: bytes, given: str, model: Any) -> Arrays:
        """Reads keys by table, uint64 of any shape; raises a ServingError for what the model cannot answer."""
        op = self.op
        if given == "json":
            wire.check_json(body, *self.most_values(model), op)
            found: Mapping[str, Any] = wire.object_of(wire.read_json(body, op, ["keys"])["keys"], f"{op}: keys")
            read = wire.keys_from_json
        else:
            found, read = wire.read_tensors(body, op), wire.keys_from_tensor
            if not found:
                raise RequestError(f"{op}: got no tensor, wanted the keys of at least one table.")
        for name in found:
            if name not in model.tables:
                raise UnknownTableError.of(op, name[:80], model.tables, f'model "{model.name}"')
        keys = {name: read(value, f'{op}: keys of table "{name}"') for name, value in found.items()}
        for name, array in keys.items():
            limit, num_keys = model.max_keys.get(name, self._max_keys), wire.extent(array.shape)
            if num_keys > limit:
                raise RequestTooLargeError(f'{op}: table "{name}": got {num_keys} keys, at most {limit} are taken.')
            _check_bits(array, model, f'{op}: keys of table "{name}"')
        _check_keys(sum(wire.extent(array.shape) for array in keys.values()), self._max_keys, op)
        return keys

    def limits(self, model: Any) -> dict[str, int]:
        """The limits of one call, by table."""
        return dict(model.max_keys)

    def costs(self, keys: Mapping[str, np.ndarray]) -> dict[str, int]:
        """What a request adds to the limits, by table."""
        return {name: array.size for name, array in keys.items()}

    def size(self, keys: Mapping[str, np.ndarray]) -> int:
        """The number of keys of a request."""
        return sum(array.size for array in keys.values())

    def run(self, model: str, requests: Sequence[Mapping[str, np.ndarray]]) -> list[tuple[Arrays, int]]:
        """Runs all requests in one call; gives each its rows, `[*shape of the keys, dim]`, and the version."""
        names = list(dict.fromkeys(name for request in requests for name in request))
        joined = {
            name: np.concatenate([request[name].reshape(-1) for request in requests if name in request])
            for name in names
        }
        answer = self._session.lookup(joined, model=model)
        rows = {name: np.asarray(answer[name], np.float32) for name in names}
        places = dict.fromkeys(names, 0)
        results = []
        for request in requests:
            parts = {}
            for name, keys in request.items():
                begin = places[name]
                places[name] = begin + keys.size
                parts[name] = rows[name][begin : places[name]].reshape(*keys.shape, rows[name].shape[-1])
            results.append((parts, int(answer.version)))
        return results


class Predictions:
    """The endpoint that runs the model of `dense_file`."""

    op = "predict"
    field = "outputs"

    def __init__(self, session: Any, max_keys: int) -> None:
        self._session, self._max_keys = session, max_keys

    def most_values(self, model: Any) -> tuple[int, Sequence[str]]:
        """The most numbers that a request can have, and the names of its arrays."""
        keys, rest, names = dict[str, int](), 0, list[str]()
        weighted = set[str]()
        for name, spec in model.inputs.items():
            names += [name, *(f"{name}.{part}" for part in ("values", "lengths", "weights"))]
            if not isinstance(spec, BagsInput | KeysInput):
                rest += model.max_batch_size * wire.extent(spec.shape)
                continue
            most = model.max_keys.get(spec.table, self._max_keys)
            if isinstance(spec, BagsInput):
                rest += model.max_batch_size  # lengths
                if spec.is_weighted:
                    weighted.add(spec.table)
            else:
                most = min(most, model.max_batch_size * wire.extent(spec.shape))
            keys[spec.table] = min(model.max_keys.get(spec.table, self._max_keys), keys.get(spec.table, 0) + most)
        rest += min(self._max_keys, sum(keys[table] for table in weighted))
        return rest + min(self._max_keys, sum(keys.values())), names

    def read(self, body: bytes, given: str, model: Any) -> Samples:
        """Reads inputs of one batch size; raises a ServingError for what the model cannot answer."""
        op, specs = self.op, model.inputs
        if given == "json":
            wire.check_json(body, *self.most_values(model), op)
            found: Mapping[str, Any] = wire.object_of(wire.read_json(body, op, ["inputs"])["inputs"], f"{op}: inputs")
        else:
            found = _with_ragged(wire.read_tensors(body, op), specs, op)
        for name in found:
            if name not in specs:
                raise RequestError(f"{op}: input: got {wire.brief(name)}, wanted {sorted(specs)}.")
        missing = sorted(set(specs) - set(found))
        if missing:
            raise RequestError(f"{op}: inputs: got none for {missing}, wanted {sorted(specs)}.")
        inputs, sizes, num_keys = {}, {}, dict[str, int]()
        for name, value in found.items():
            inputs[name] = array = _read_input(value, specs[name], given, model.max_batch_size, name)
            sizes[name] = len(array.lengths if isinstance(array, wire.Ragged) else array)
            if isinstance(specs[name], BagsInput | KeysInput):
                table, keys = specs[name].table, array.values if isinstance(array, wire.Ragged) else array
                _check_bits(keys, model, f'{op}: input "{name}"')
                num_keys[table] = num_keys.get(table, 0) + keys.size
        if len(set(sizes.values())) > 1:
            raise RequestError(f"{op}: inputs must have one number of samples, got {sizes}.")
        num_samples = next(iter(sizes.values()))
        _check_samples(num_samples, model.max_batch_size, op)
        if num_samples == 0:
            raise RequestError(f"{op}: got 0 samples, wanted at least 1.")
        _check_keys(sum(num_keys.values()), self._max_keys, op)
        for table, number in num_keys.items():
            _check_keys(number, model.max_keys.get(table, self._max_keys), f'{op}: table "{table}"')
        return Samples(inputs, num_samples, num_keys)

    def limits(self, model: Any) -> dict[str, int]:
        """The limits of one call."""
        return {"samples": model.max_batch_size, **{_cost(name): limit for name, limit in model.max_keys.items()}}

    def costs(self, samples: Samples) -> dict[str, int]:
        """What a request adds to the limits."""
        return {"samples": samples.num_samples, **{_cost(name): number for name, number in samples.num_keys.items()}}

    def size(self, samples: Samples) -> int:
        """The number of samples of a request."""
        return samples.num_samples

    def run(self, model: str, requests: Sequence[Samples]) -> list[tuple[Arrays, int]]:
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

    def _run_joined(self, known: Any, requests: Sequence[Samples]) -> list[tuple[Arrays, int]]:
        joined = {name: _join([request.inputs[name] for request in requests]) for name in requests[0].inputs}
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


def _can_join(model: Any) -> bool:
    """Whether all results of a model can be cut between requests."""
    return model.outputs is not None and all(output.is_batched for output in model.outputs.values())


def _cost(table: str) -> str:
    return f'keys of "{table}"'  # differs from the name of the samples, whatever a table is called


def _check_bits(keys: np.ndarray, model: Any, what: str) -> None:
    if model.key_bits == 64:
        return
    wrong = (keys >> np.uint64(32) != 0) & (keys != np.uint64(PADDING_KEY))
    if wrong.any():
        raise RequestError(f"{what}: keys: got {keys[wrong].view(np.int64)[0]}, wanted 0 to 4294967295, or -1.")


def _check_keys(num_keys: int, limit: int, op: str) -> None:
    if num_keys > limit:
        raise RequestTooLargeError(f"{op}: got {num_keys} keys, at most {limit} are taken.")


def _check_samples(num_samples: int, limit: int, op: str) -> None:
    if num_samples > limit:
        raise RequestTooLargeError(f"{op}: got {num_samples} samples, at most {limit} are taken.")


def _read_input(value: Any, spec: Any, given: str, max_samples: int, name: str) -> np.ndarray | wire.Ragged:
    op = Predictions.op
    what = f'{op}: input "{name}"'
    if isinstance(spec, BagsInput):
        found = _read_bags(value, spec, given, what)
        if isinstance(found, wire.Ragged):
            return found
        # Bags without keys take no bytes, so a small body may have any number of them.
        _check_samples(len(found), max_samples, op)
        return wire.Ragged(found.reshape(-1), np.full(len(found), found.shape[1], np.int32))
    if isinstance(spec, KeysInput):
        array = wire.keys_from_json(value, what) if given == "json" else wire.keys_from_tensor(value, what)
    elif given == "json":
        array = wire.numbers_from_json(value, spec.dtype, what)
    else:
        array = wire.numbers_from_tensor(value, spec.dtype, what)
    if array.shape[1:] != tuple(spec.shape):
        wanted = ", ".join(["samples", *map(str, spec.shape)])
        raise RequestError(f"{what}: got shape {list(array.shape)}, wanted [{wanted}].")
    return array


def _read_bags(value: Any, spec: BagsInput, given: str, what: str) -> wire.Ragged | np.ndarray:
    """Reads ragged bags, or bags of one hotness: keys `[samples, hotness]`."""
    if isinstance(value, wire.Ragged):
        return value
    if isinstance(value, dict):
        return wire.ragged_from_json(value, spec.is_weighted, what)
    if spec.is_weighted:
        raise RequestError(f"{what}: got no weights, wanted values, lengths and weights.")
    keys = wire.keys_from_json(value, what) if given == "json" else wire.keys_from_tensor(value, what)
    if keys.ndim != 2:
        raise RequestError(f"{what}: got shape {list(keys.shape)}, wanted [samples, keys]; or values and lengths.")
    return keys


def _with_ragged(found: Mapping[str, np.ndarray], specs: Mapping[str, Any], op: str) -> dict[str, Any]:
    """Tensors "x.values", "x.lengths" (and "x.weights") become the ragged input "x"."""
    made: dict[str, Any] = dict(found)
    for name, spec in specs.items():
        parts = [f"{name}.{part}" for part in ("values", "lengths", "weights")]
        if not isinstance(spec, BagsInput) or name in made or parts[0] not in made or parts[1] not in made:
            continue
        what = f'{op}: input "{name}"'
        values, lengths = (wire.keys_from_tensor(made.pop(part), part) for part in parts[:2])
        weights = None
        if spec.is_weighted:
            if parts[2] not in made:
                raise RequestError(f'{what}: got no tensor "{parts[2][:80]}", wanted one.')
            weights = wire.numbers_from_tensor(made.pop(parts[2]), np.float32, parts[2])
        made[name] = wire.ragged(values, lengths, weights, what)
    return made


def _shapes(samples: Samples) -> Any:
    return tuple(
        (name, "ragged" if isinstance(value, wire.Ragged) else value.shape[1:])
        for name, value in sorted(samples.inputs.items())
    )


def _join(values: Sequence[Any]) -> Any:
    """Joins the values of one input as the session takes it."""
    if not isinstance(values[0], wire.Ragged):
        return np.concatenate(values)
    lengths = np.concatenate([value.lengths for value in values])
    return Bags(
        np.concatenate([value.values for value in values]),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        weights=None if values[0].weights is None else np.concatenate([value.weights for value in values]),
    )


def _sendable(value: np.ndarray) -> np.ndarray:
    """Converts what is neither an integer nor a wide float to float32, so that both formats have its dtype."""
    return value if value.dtype.kind in "iu" or value.dtype in (np.float32, np.float64) else value.astype(np.float32)
