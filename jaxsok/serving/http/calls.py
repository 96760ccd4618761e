"""Checks requests against a model, joins several into one call of the session, and splits its answers."""

import abc
import collections
import dataclasses
import itertools
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from jaxsok.features import Bags
from jaxsok.serving.artifact import BagsInput, KeysInput
from jaxsok.serving.errors import RequestError, RequestTooLargeError, require_table
from jaxsok.serving.http import wire
from jaxsok.serving.model.served import check_bits

Arrays = dict[str, np.ndarray]
Results = list[tuple[Arrays, int]]  # the arrays of each request, and their version
_PARTS = ("values", "lengths", "weights")  # of ragged bags


@dataclasses.dataclass(frozen=True)
class ParsedRequest:
    """A checked request: its arrays, and what they add to the limits of a call."""

    arrays: Mapping[str, Any]  # keys by table, or inputs by name: arrays and Bags with lengths
    num_keys: Mapping[str, int]  # by table
    num_samples: int = 0  # of a prediction, at least 1
    num_requests: int = 1  # that a front end has joined to this one

    @property
    def costs(self) -> dict[str, int]:
        """The samples, under a name that no table has, and the keys by table."""
        return {"": self.num_samples, **self.num_keys}

    @property
    def size(self) -> int:
        """The number of samples, or of keys if it is a lookup."""
        return self.num_samples or sum(self.num_keys.values())


@dataclasses.dataclass(frozen=True)
class _Calls(abc.ABC):
    session: Any
    max_keys: int  # of one request
    is_remote: bool = False  # whether the session is that of a front end
    op: ClassVar[str]

    @abc.abstractmethod
    async def run(self, model: str, requests: Sequence[ParsedRequest]) -> Results:
        """Runs requests in as few calls of the session as they allow; waits for nothing but a remote session."""

    async def ask(self, model: str, request: ParsedRequest) -> Any:
        """Calls the session for requests that are joined to one."""
        if self.is_remote:
            return await self.session.ask(self.op, model, request)
        return getattr(self.session, self.op)(request.arrays, model=model)


class Lookups(_Calls):
    """The endpoint that gives the rows of keys."""

    op, request_field, field = "lookup", "keys", "rows"  # field: of the response

    def most_values(self, model: Any) -> tuple[int, Sequence[str]]:
        """Bounds the numbers that a request can have; also returns the names of its arrays."""
        return min(self.max_keys, sum(model.max_keys.values())), list(model.tables)

    def read(self, body: bytes, given: str, model: Any) -> ParsedRequest:
        """Reads keys by table, uint64 of any shape; raises a ServingError for what the model cannot answer."""
        op, found = self.op, _parse(self, body, given, model)
        if not found:
            raise RequestError(f"{op}: got no tensor, wanted the keys of at least one table.")
        keys, total = {}, 0
        for name, value in found.items():
            require_table(op, name, model.tables, f'model "{model.name}"')
            keys[name] = array = wire.read_keys(value, f'{op}: keys of table "{name}"')
            number = wire.extent(array.shape)
            _check_most(number, model.max_keys[name], f'{op}: table "{name}"')
            check_bits(f'{op}: table "{name}"', array, model.key_bits)
            total += number
        _check_most(total, self.max_keys, op)
        return ParsedRequest(keys, {name: array.size for name, array in keys.items()})

    async def run(self, model: str, requests: Sequence[ParsedRequest]) -> Results:
        """Runs all requests in one call; gives each its rows, `[*shape of the keys, dim]`, and the version."""
        keys_of = [request.arrays for request in requests]
        names = list(dict.fromkeys(name for keys in keys_of for name in keys))
        joined = {name: np.concatenate([keys[name].reshape(-1) for keys in keys_of if name in keys]) for name in names}
        num_keys = {name: keys.size for name, keys in joined.items()}
        answer = await self.ask(model, ParsedRequest(joined, num_keys, num_requests=len(requests)))
        rows = {name: np.asarray(answer[name], np.float32) for name in names}
        results, ends = [], dict.fromkeys(names, 0)
        for request in requests:
            parts = {}
            for name, keys in request.arrays.items():
                begin, ends[name] = ends[name], ends[name] + keys.size
                part = rows[name][begin : ends[name]]
                parts[name] = part if keys.ndim == 1 else part.reshape(*keys.shape, part.shape[1])
            results.append((parts, int(answer.version)))
        return results


class Predictions(_Calls):
    """The endpoint that runs the model of `dense_file`."""

    op, request_field, field = "predict", "inputs", "outputs"

    def most_values(self, model: Any) -> tuple[int, Sequence[str]]:
        batch, keys, weights, rest = model.max_batch_size, collections.Counter(), collections.Counter(), 0
        for spec in model.inputs.values():
            if isinstance(spec, BagsInput):
                keys[spec.table] += model.max_keys[spec.table]
                weights[spec.table] += model.max_keys[spec.table] * spec.is_weighted
                rest += batch  # lengths
            elif isinstance(spec, KeysInput):
                keys[spec.table] += batch * wire.extent(spec.shape)
            else:
                rest += batch * wire.extent(spec.shape)
        for numbers in (keys, weights):
            most = sum(min(number, model.max_keys[table]) for table, number in numbers.items())
            rest += min(self.max_keys, most)
        return rest, [name for given in model.inputs for name in (given, *(f"{given}.{part}" for part in _PARTS))]

    def read(self, body: bytes, given: str, model: Any) -> ParsedRequest:
        """Reads inputs of one batch size; raises a ServingError for what the model cannot answer."""
        op, specs = self.op, model.inputs
        for name, output in model.outputs.items():
            if output.dtype.startswith("complex"):
                wanted = "real numbers, as the formats have; export its real and its imaginary part"
                raise RequestError(f'{op}: output "{name}": got {output.dtype}, wanted {wanted}.')
        found = _parse(self, body, given, model)
        if given == "tensors":
            found = _with_bags(found, specs)
        for name in found:
            if name not in specs:
                raise RequestError(f"{op}: input: got {wire.brief(name)}, wanted {sorted(specs)}.")
        if missing := sorted(set(specs) - set(found)):
            raise RequestError(f"{op}: inputs: got none for {missing}, wanted {sorted(specs)}.")
        inputs, sizes, num_keys = {}, {}, collections.Counter[str]()
        for name, value in found.items():
            spec, what = specs[name], f'{op}: input "{name}"'
            inputs[name] = array = _read_input(value, spec, model.max_batch_size, what)
            sizes[name] = len(array.lengths if isinstance(array, Bags) else array)
            if isinstance(spec, BagsInput | KeysInput):
                keys = array.keys if isinstance(array, Bags) else array
                check_bits(what, keys, model.key_bits)
                num_keys[spec.table] += keys.size
        if len(set(sizes.values())) > 1:
            raise RequestError(f"{op}: inputs must have one number of samples, got {sizes}.")
        num_samples = next(iter(sizes.values()))
        _check_most(num_samples, model.max_batch_size, op, "samples")
        if num_samples == 0:
            raise RequestError(f"{op}: got 0 samples, wanted at least 1.")
        _check_most(sum(num_keys.values()), self.max_keys, op)
        for table, number in num_keys.items():
            _check_most(number, model.max_keys[table], f'{op}: table "{table}"')
        return ParsedRequest(inputs, num_keys, num_samples)

    async def run(self, model: str, requests: Sequence[ParsedRequest]) -> Results:
        """Gives each request its outputs, and the version.

        Requests share a call if their samples have one shape and each output has a row for each sample: a mean over the
        batch, for example, must not mix clients.
        """
        known, groups = self.session.models[model], dict[Any, list[int]]()
        can_join = all(output.is_batched for output in known.outputs.values())
        for number, request in enumerate(requests):
            groups.setdefault(_shapes(request) if can_join else number, []).append(number)
        results: list[Any] = [None] * len(requests)
        for numbers in groups.values():
            found = await self._run_joined(known, [requests[number] for number in numbers])
            for number, result in zip(numbers, found, strict=True):
                results[number] = result
        return results

    async def _run_joined(self, known: Any, requests: Sequence[ParsedRequest]) -> Results:
        arrays = {name: _join([request.arrays[name] for request in requests]) for name in requests[0].arrays}
        num_keys = {table: sum(request.num_keys[table] for request in requests) for table in requests[0].num_keys}
        num_samples = sum(request.num_samples for request in requests)
        answer = await self.ask(known.name, ParsedRequest(arrays, num_keys, num_samples, len(requests)))
        outputs = {name: np.asarray(value) for name, value in answer.items()}
        for name, value in outputs.items():
            if value.dtype.kind not in "iu" and value.dtype not in (np.float32, np.float64):
                outputs[name] = value.astype(np.float32)  # both formats have this dtype
        if len(requests) == 1:
            return [(outputs, int(answer.version))]
        if answer.version != known.version:  # the dense model may be one whose results cannot be cut
            return [(await self._run_joined(known, [request]))[0] for request in requests]
        ends = np.cumsum([request.num_samples for request in requests])[:-1]
        parts = {name: np.split(value, ends) for name, value in outputs.items()}
        return [({name: parts[name][i] for name in parts}, int(answer.version)) for i in range(len(requests))]


def _parse(kind: Lookups | Predictions, body: bytes, given: str, model: Any) -> dict[str, Any]:
    if given == "tensors":
        return wire.read_tensors(body, kind.op)
    wire.check_json(body, *kind.most_values(model), kind.op)
    return wire.read_json(body, kind.op, kind.request_field)


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
    """Reads bags: values and lengths, lists of keys, or keys `[samples, hotness]`."""
    if isinstance(value, dict):
        return wire.read_bags(value, spec.is_weighted, what)
    if spec.is_weighted:
        raise RequestError(f"{what}: got no weights, wanted values, lengths and weights.")
    if isinstance(value, list) and value and all(isinstance(bag, list) for bag in value):
        _check_most(len(value), max_samples, Predictions.op, "samples")
        keys = list(itertools.chain.from_iterable(value))
        if list in set(map(type, keys)):
            raise RequestError(f"{what}: got lists in a bag, wanted a list of keys for each sample.")
        return Bags(wire.read_keys(keys, what), lengths=np.array(list(map(len, value)), np.int32))
    keys = wire.read_keys(value, what)
    if keys.ndim != 2:
        raise RequestError(f"{what}: got shape {list(keys.shape)}, wanted [samples, keys]; or values and lengths.")
    # Bags without keys take no bytes, so a small body may have any number of them.
    _check_most(len(keys), max_samples, Predictions.op, "samples")
    return Bags(keys.reshape(-1), lengths=np.full(len(keys), keys.shape[1], np.int32))


def _with_bags(found: dict[str, Any], specs: Mapping[str, Any]) -> dict[str, Any]:
    """Gathers tensors "x.values", "x.lengths" (and "x.weights") as the parts of the input "x", as JSON has them."""
    for name, spec in specs.items():
        parts = {part: f"{name}.{part}" for part in _PARTS if f"{name}.{part}" in found}
        if isinstance(spec, BagsInput) and name not in found and parts.keys() >= {"values", "lengths"}:
            found[name] = {part: found.pop(tensor) for part, tensor in parts.items()}
    return found


def _shapes(request: ParsedRequest) -> Any:
    arrays = sorted(request.arrays.items())
    return tuple((name, "ragged" if isinstance(value, Bags) else value.shape[1:]) for name, value in arrays)


def _join(values: Sequence[Any]) -> Any:
    if not isinstance(values[0], Bags):
        return np.concatenate(values)
    keys, lengths = (np.concatenate([getattr(bags, part) for bags in values]) for part in ("keys", "lengths"))
    weights = None if values[0].weights is None else np.concatenate([bags.weights for bags in values])
    return Bags(keys, lengths=lengths, weights=weights)


def finish(work: Coroutine[Any, Any, Results]) -> Results:
    """Runs a coroutine that waits for nothing, in this thread."""
    while True:
        try:
            work.send(None)
        except StopIteration as end:
            return end.value
