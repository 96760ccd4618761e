"""Declarations of tables and features from a Python file that makes them."""

import dataclasses
import os
import pathlib
import runpy
import traceback
import zipfile
import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from jaxsok.collection import Collection
from jaxsok.specs import ExchangeSpec, FeatureSpec, TableSpec


@dataclasses.dataclass(frozen=True)
class Declared:
    """The declarations of a file: the arguments of `memory_estimate`, and of `Collection`."""

    tables: tuple[TableSpec, ...]
    features: tuple[FeatureSpec, ...] = ()
    exchange: ExchangeSpec | None = None
    num_shards: int | None = None
    """The shards of the `collection` over a mesh; None: the file does not say."""


def read_spec(path: str | os.PathLike[str]) -> Declared:
    r"""Reads declarations from a `.py` file, which is run: it defines `tables` or a `collection`.

    With `tables`, a list of TableSpecs, it may define `features` and `exchange`.

    Raises:
      FileNotFoundError: there is no file.
      ValueError: not such a file, or one that fails; names the file and its line.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     file = pathlib.Path(folder, "tables.py")
      ...     _ = file.write_text("from jaxsok import *\ntables = [TableSpec('user', 64, optim.adam(0.001))]")
      ...     read_spec(file).tables[0].dim
      64
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"estimate: {path}: got no such file, wanted a .py file of tables.")
    if path.suffix != ".py":
        raise ValueError(
            f"estimate: {path}: got a file named *{path.suffix}, wanted *.py: a program that defines `tables`, a list "
            "of TableSpecs, or `collection`, a Collection."
        )
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
