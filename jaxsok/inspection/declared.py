"""Declarations of tables and features from a file: Python that makes them, or TOML or JSON that names their fields.

Fields are those of `TableSpec`, `FeatureSpec` and `ExchangeSpec`. An optimizer, an initializer or a policy is its name,
or a table of its name and arguments:

    [[tables]]
    name = "user"
    dim = 64
    optimizer = {name = "adam", learning_rate = 0.001}
    eviction = "LeastRecentlyUsed"
    memory = {device_rows = 0.1}
"""

import dataclasses
import inspect
import json
import os
import pathlib
import runpy
import tomllib
import traceback
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxsok import initializers, optimizers as optim, policies
from jaxsok.collection import Collection
from jaxsok.specs import REPLICATED, SHARDED, ExchangeSpec, FeatureSpec, HostMemory, Placement, TableSpec, on

_PARSERS = {".toml": tomllib.loads, ".json": json.loads}
LEARNING_RATE = 0.01  # the rate of an optimizer whose file gives none: bytes do not depend on it


@dataclasses.dataclass(frozen=True)
class Declared:
    """The declarations of a file: the arguments of `memory_estimate`, and of `Collection`."""

    tables: tuple[TableSpec, ...]
    features: tuple[FeatureSpec, ...] = ()
    exchange: ExchangeSpec | None = None
    num_shards: int | None = None
    """The shards of the `collection` over a mesh in a Python file; None: the file does not say."""


def read_spec(path: str | os.PathLike[str]) -> Declared:
    r"""Reads declarations from a `.py` file, which is run, or a `.toml` or `.json` file.

    A Python file defines `tables` (and perhaps `features` and `exchange`) or a `collection`; the others have `tables`,
    and perhaps `features` and `exchange`.

    Raises:
      FileNotFoundError: there is no file.
      ValueError: not such a file, an unknown field, or one that the spec refuses; names the file and the field.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     file = pathlib.Path(folder, "tables.toml")
      ...     _ = file.write_text('[[tables]]\nname = "user"\ndim = 64\noptimizer = "adam"')
      ...     read_spec(file).tables[0].dim
      64
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"estimate: {path}: got no such file, wanted a .py, .toml or .json file of tables.")
    if path.suffix == ".py":
        return _read_python(path)
    if path.suffix not in _PARSERS:
        raise ValueError(f"estimate: {path}: got a file named *{path.suffix}, wanted .py, .toml or .json.")
    try:
        data = _PARSERS[path.suffix](path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # of both parsers, and of text that is none
        raise ValueError(f"estimate: {path}: got no {path.suffix[1:].upper()}: {error}.") from error
    return _read_data(_Place(str(path)), data)


def read_batches(
    path: str | os.PathLike[str], features: Sequence[FeatureSpec], num_samples: int
) -> Iterator[dict[str, np.ndarray]]:
    """Cuts a `.npz` file with an array for each feature, a row for each sample, into raw batches.

    Samples at the end that do not fill a batch are left out.

    Raises:
      FileNotFoundError, ValueError: no such file, a feature without an array, fewer samples than a batch has.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     np.savez(pathlib.Path(folder, "log.npz"), user=np.arange(5))
      ...     [batch["user"] for batch in read_batches(f"{folder}/log.npz", [FeatureSpec("user", "user")], 2)]
      [array([0, 1]), array([2, 3])]
    """
    try:
        is_empty = not pathlib.Path(path).stat().st_size
        if not pathlib.Path(path).is_file() or not (is_empty or zipfile.is_zipfile(path)):
            raise ValueError("what is no archive")
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
            arrays = {feature.name: stored[feature.name] for feature in features}
    except (KeyError, TypeError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        wanted = [feature.name for feature in features]
        raise ValueError(f"estimate: {path}: got {error}, wanted a .npz file with the arrays {wanted}.") from error
    sizes = {len(array) if array.ndim else 0 for array in arrays.values()}
    if len(sizes) != 1 or min(sizes) < num_samples:
        raise ValueError(
            f"estimate: {path}: got arrays of {sorted(sizes)} samples, wanted at least {num_samples}, the same of all."
        )
    for begin in range(0, min(sizes) - num_samples + 1, num_samples):
        yield {name: array[begin : begin + num_samples] for name, array in arrays.items()}


def _read_python(path: pathlib.Path) -> Declared:
    try:
        names = runpy.run_path(str(path), run_name="jaxsok_spec")
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = frames[-1].lineno if frames else getattr(error, "lineno", None)
        raise ValueError(f"estimate: {path}, line {line}: {type(error).__name__}: {error}") from error
    collection = names.get("collection")
    if isinstance(collection, Collection):
        num_shards = collection.shards.num_shards if collection.shards.is_mesh else None
        return Declared(collection.tables, collection.features, collection.exchange, num_shards)
    if "tables" not in names:
        raise ValueError(
            f"estimate: {path}: got a program that defines neither, wanted `tables`, a list of TableSpecs, or "
            "`collection`, a Collection."
        )
    found = {}
    for name, kind in (("tables", TableSpec), ("features", FeatureSpec)):
        value = names.get(name, ())
        if not isinstance(value, Sequence) or not all(isinstance(spec, kind) for spec in value):
            raise ValueError(f"estimate: {path}: {name}: got {value!r}, wanted a list of {kind.__name__}s.")
        found[name] = tuple(value)
    exchange = names.get("exchange")
    if exchange is not None and not isinstance(exchange, ExchangeSpec):
        raise ValueError(f"estimate: {path}: exchange: got {exchange!r}, wanted an ExchangeSpec.")
    return Declared(found["tables"], found["features"], exchange)


@dataclasses.dataclass(frozen=True)
class _Place:
    file: str
    field: str = ""

    def __truediv__(self, name: str | int) -> "_Place":
        at = f"{self.field}[{name}]" if isinstance(name, int) else f"{self.field}.{name}" if self.field else name
        return _Place(self.file, at)

    def error(self, what: str) -> ValueError:
        at = f"{self.field}: " if self.field else ""
        return ValueError(f"estimate: {self.file}: {at}{what}")

    def fields(self, value: Any, known: Iterable[str] | None = None) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise self.error(f"got {value!r}, wanted fields with values.")
        wanted = list(value if known is None else known)
        for name in value:
            if name not in wanted:
                raise (self / name).error(f"got an unknown field, wanted some of {wanted}.")
        return dict(value)

    def items(self, value: Any) -> list[tuple["_Place", Any]]:
        if not isinstance(value, list):
            raise self.error(f"got {value!r}, wanted a list.")
        return [(self / number, item) for number, item in enumerate(value)]

    def make(self, function: Callable[..., Any], arguments: Any) -> Any:
        parameters = inspect.signature(function).parameters
        arguments = self.fields(arguments, parameters)
        for name, parameter in parameters.items():
            if parameter.default is parameter.empty and name not in arguments:
                raise (self / name).error("got none, wanted a value.")
        try:
            return function(**arguments)
        except (TypeError, ValueError) as error:
            raise self.error(str(error)) from error

    def call(self, value: Any, known: Mapping[str, Callable[..., Any]], what: str, **defaults: Any) -> Any:
        """Calls a function by name: "adam", or {name = "adam", eps = 1e-8}."""
        arguments = dict(value) if isinstance(value, Mapping) else {"name": value}
        name = arguments.pop("name", None)
        if not isinstance(name, str) or name not in known:
            wanted = f"the name of {what}, or {{name = ..., arguments}}: {sorted(known)}"
            raise self.error(f"got {value!r}, wanted {wanted}.")
        return self.make(known[name], defaults | arguments)


def _read_data(place: _Place, data: Any) -> Declared:
    fields = place.fields(data, ("tables", "features", "exchange"))
    tables = [_table(at, table) for at, table in (place / "tables").items(fields.get("tables"))]
    if not tables:
        raise (place / "tables").error("got none, wanted at least one table.")
    features = [at.make(FeatureSpec, feature) for at, feature in (place / "features").items(fields.get("features", []))]
    exchange = fields.get("exchange")
    exchange = None if exchange is None else (place / "exchange").make(ExchangeSpec, exchange)
    return Declared(tuple(tables), tuple(features), exchange)


def _table(place: _Place, data: Any) -> TableSpec:
    fields = place.fields(data)
    # A function of the user's own is Python.
    fillers = {name: make for name, make in _functions(initializers).items() if name != "function"}
    makers: dict[str, Callable[[_Place, Any], Any]] = {
        "optimizer": _optimizer,
        "initializer": lambda at, value: at.call(value, fillers, "an initializer"),
        "admission": lambda at, value: at.call(value, _policies(policies.Admission), "a policy of admission"),
        "eviction": lambda at, value: at.call(value, _policies(policies.Eviction), "a policy of eviction"),
        "placement": _placement,
        "memory": lambda at, value: at.make(HostMemory, value),
    }
    for name, make in makers.items():
        if name in fields:
            fields[name] = make(place / name, fields[name])
    return place.make(TableSpec, fields)


def _optimizer(place: _Place, value: Any) -> Any:
    known = {name: make for name, make in _functions(optim).items() if name != "lift"}
    if isinstance(value, Mapping) and "limits" in value:
        at = place / "limits"
        limits = at.fields(value["limits"])
        if "adaptive_clip" in limits:
            limits["adaptive_clip"] = (at / "adaptive_clip").make(optim.AdaptiveClip, limits["adaptive_clip"])
        value = {**value, "limits": at.make(optim.Limits, limits)}
    return place.call(value, known, "an optimizer", learning_rate=LEARNING_RATE)


def _placement(place: _Place, value: Any) -> Placement:
    by_name = {"sharded": SHARDED, "replicated": REPLICATED}
    if isinstance(value, str) and value in by_name:
        return by_name[value]
    if isinstance(value, Mapping) and set(value) == {"on"}:
        return place.make(on, {"device": value["on"]})
    raise place.error(f'got {value!r}, wanted "sharded", "replicated" or {{on = device}}.')


def _functions(module: Any) -> dict[str, Callable[..., Any]]:
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    values = {name: getattr(module, name) for name in names}
    is_own = lambda value: inspect.isfunction(value) and value.__module__.startswith(module.__name__)  # noqa: E731
    return {name: value for name, value in values.items() if is_own(value)}


def _policies(kind: type) -> dict[str, Callable[..., Any]]:
    classes = {name: value for name, value in vars(policies).items() if inspect.isclass(value) and name[0] != "_"}
    return {name: value for name, value in classes.items() if issubclass(value, kind) and value is not kind}
