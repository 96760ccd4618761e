"""Tiers below the device, which have the rows that its cache lacks: `HostRows`, databases, or another `RowSource`."""

import abc
import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float32, UInt64

from jaxsok.kernels import table as table_kernels
from jaxsok.records import Records, round_to
from jaxsok.serving import quantize
from jaxsok.serving.devices import host_device
from jaxsok.serving.frozen import FrozenStore, FrozenTable, FrozenTables, RecordSource, freeze_records, require_tables
from jaxsok.serving.fused import find_rows
from jaxsok.serving.padding import key_words, padded_size, slices
from jaxsok.serving.ready import Form
from jaxsok.serving.row_map import KEYS_AT_A_TIME, RowMap
from jaxsok.types import NO_ROW

_LEAST_KEYS = 256  # keys are padded to a power of two, so that programs are few
_WARN_S = 60.0  # between two warnings of rows of one source and table that cannot be quantized
_log = logging.getLogger(__name__)

Keys: TypeAlias = UInt64[np.ndarray, " num_keys"]
Rows: TypeAlias = Float32[np.ndarray, "num_keys dim"]
IsFound: TypeAlias = Bool[np.ndarray, " num_keys"]
Lines: TypeAlias = tuple[np.ndarray, ...]  # rows as a cache stores them: float32, or numbers and scales


class RowSource(abc.ABC):
    """The rows of some tables, by key, read by many threads: a tier below the device, as host memory or a database.

    A source has one version: other rows come as another source. Where the rows of a version never change, a reader that
    holds the source holds the version (`HostRows`). A database whose rows change beneath its readers keeps
    its version: a device cache then has new rows after `DeviceCache.refresh`.
    """

    tables: Mapping[str, FrozenTable]  # by name; never changed
    version: int = 0  # of the rows; part of each answer
    served: Any = None  # the dense model of the version (`artifact.ServedModel`)

    @abc.abstractmethod
    def num_rows(self, table: str) -> int:
        """Counts the rows of a table, or somewhat more: caches are sized by it."""

    @abc.abstractmethod
    def fetch(self, table: str, keys: Keys) -> tuple[Rows, IsFound]:
        """Reads the rows of uint64 keys, and which of them are there. Keys may repeat; PADDING_KEY is never there.

        Rows have the precision of the table's dtype: a row of an int8 table is its numbers times its scale. Rows of
        missing keys may hold anything. Arrays are read only, or the caller's own.
        """

    def fetch_quantized(self, table: str, keys: Keys) -> tuple[np.ndarray, np.ndarray, IsFound]:
        """Fetches from a table that `is_quantized`: its numbers, their float32 scales, and which are there.

        A device cache stores these. Unless a source overrides it, this quantizes what `fetch` gives; a row that is not
        finite counts as not found, and is logged.
        """
        rows, is_found = _fetch_arrays(self, "fetch", table, keys)
        is_broken = is_found & ~np.isfinite(rows).all(axis=1)
        if is_broken.any():
            is_found, now = is_found & ~is_broken, time.monotonic()
            if now - self._warned_at.get(table, -_WARN_S) >= _WARN_S:
                self._warned_at[table], first = now, np.asarray(keys)[is_broken][0]
                text = '%s.fetch: table "%s": got %d rows that are not finite, the first of key %d, wanted numbers to '
                text += "be quantized; they count as not found. Not logged again for %g s."
                _log.warning(text, type(self).__name__, table, np.count_nonzero(is_broken), first, _WARN_S)
        numbers, scales = quantize.quantize_rows(np.where(is_found[:, None], rows, 0), self.tables[table].dtype)
        return numbers, scales, is_found

    @functools.cached_property
    def _warned_at(self) -> dict[str, float]:
        """Times of the last warnings of rows that cannot be quantized, by table."""
        return {}

    @abc.abstractmethod
    def scan(self, table: str, chunk_rows: int) -> Iterator[Records]:
        """Yields all rows of a table, at most `chunk_rows` at a time, to fill a cache; with known frequencies."""

    def ready_as(self, older: Any) -> None:  # noqa: B027 - most compile nothing
        """Compiles what an older version was asked for."""

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Releases what it holds."""


class HostRows(RowSource):
    """Rows in host memory: frozen tables on JAX's CPU device, read by threaded kernels. `maps` serve `scan`."""

    def __init__(self, tables: FrozenTables, maps: Sequence[RowMap], *, version: int = 0, served: Any = None) -> None:
        require_tables("HostRows", tables, on_device=True)
        if len(maps) != len(tables.stores):
            raise ValueError(f"HostRows: maps: got {len(maps)}, wanted one for each of {len(tables.stores)} stores.")
        self.tables, self.version, self.served = tables.tables, version, served
        self._tables, self._maps = tables, tuple(maps)
        # Sizes of which a fetch is compiled: of a table, or of a store for its numbers and scales.
        self._asked: dict[tuple[str | int, int], None] = {}

    @classmethod
    def of(cls, sources: Sequence[tuple[FrozenTable, RecordSource]], *, version: int = 0) -> "HostRows":
        """Reads streams of records; keeps the frequencies of tables all of whose records have them."""
        tables, maps = freeze_records(sources, device=host_device())
        return cls(tables, maps, version=version)

    @property
    def num_bytes(self) -> int:
        return self._tables.num_bytes + sum(row_map.num_bytes for row_map in self._maps)

    def num_rows(self, table: str) -> int:
        store, number = self._tables.spec.place_of("num_rows", table, "this source")
        return int(self._maps[store].table_rows[number])

    def fetch(self, table: str, keys: Keys) -> tuple[Rows, IsFound]:
        """Reads a bucket (64 bytes) and a row for each key, on all cores; missing keys have the table's default."""
        self._tables.spec.place_of("fetch", table, "this source")
        return self._in_parts(table, keys, lambda words: _fetch(self._tables, table, words))

    def fetch_quantized(self, table: str, keys: Keys) -> tuple[np.ndarray, np.ndarray, IsFound]:
        """Reads the stored bits."""
        s, number = self._tables.spec.place_of("fetch_quantized", table, "this source")
        store, number = self._tables.stores[s], jax.device_put(np.uint32(number), host_device())
        return self._in_parts(s, keys, lambda words: _fetch_quantized(store, words, number))

    def _in_parts(self, what: str | int, keys: Keys, fetch: Callable[[Any], tuple[Any, ...]]) -> Any:
        keys, parts = np.asarray(keys, np.uint64), []
        for some in slices(max(1, len(keys)), KEYS_AT_A_TIME):
            part = keys[some]
            padded = key_words(part, padded_size(len(part), _LEAST_KEYS))
            self._asked[what, len(padded)] = None
            found = fetch(jax.device_put(padded, host_device()))
            parts.append([np.asarray(array)[: len(part)] for array in found])
        return parts[0] if len(parts) == 1 else [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]

    def ready_as(self, older: Any) -> None:
        """Compiles the fetches that an older version was asked for: by table and power of two of keys."""
        form, place = Form(self._tables).tree, jax.sharding.SingleDeviceSharding(host_device())
        shape = functools.partial(jax.ShapeDtypeStruct, dtype=np.uint32, sharding=place)
        for what, size in list(older._asked):
            if isinstance(what, str):
                _fetch.lower(form, what, shape((size, 2))).compile()
            else:
                _fetch_quantized.lower(form.stores[what], shape((size, 2)), shape(())).compile()
            self._asked[what, size] = None

    def scan(self, table: str, chunk_rows: int) -> Iterator[Records]:
        """Yields rows in the order in which the keys came."""
        store, number = self._tables.spec.place_of("scan", table, "this source")
        keys, row_ids = self._maps[store].keys_of(number)
        of_store = self._maps[store].frequencies
        frequency = None if of_store is None or not of_store[row_ids].any() else of_store[row_ids]
        for some in slices(len(keys), chunk_rows):
            rows, _ = self.fetch(table, keys[some])
            yield Records(keys[some], rows, frequency=None if frequency is None else frequency[some])


def fetch_lines(source: RowSource, name: str, keys: np.ndarray) -> tuple[Lines, np.ndarray]:
    """Fetches the rows of those keys that a table has, as a cache stores them, and which keys these are."""
    table = source.tables[name]
    *lines, is_found = _fetch_arrays(source, "fetch_quantized" if table.is_quantized else "fetch", name, keys)
    rows = tuple(lines) if is_found.all() else tuple(array[is_found] for array in lines)
    return rows if table.is_quantized else round_rows(table, rows[0]), is_found


def _fetch_arrays(source: RowSource, op: Literal["fetch", "fetch_quantized"], name: str, keys: np.ndarray) -> list[Any]:
    """Calls a source, and refuses a result of another form."""
    table, num_keys, found = source.tables[name], len(keys), getattr(source, op)(name, keys)
    stored, scales = (table.dtype, [f"float32[{num_keys}]"]) if op == "fetch_quantized" else ("float32", [])
    arrays = [*found[:-1], np.asarray(found[-1], bool)] if isinstance(found, tuple | list) and found else [found]
    got = [f"{array.dtype}{list(array.shape)}" if hasattr(array, "dtype") else type(array).__name__ for array in arrays]
    wanted = [f"{stored}[{num_keys}, {table.dim}]", *scales, f"bool[{num_keys}]"]
    if got != wanted:
        raise RuntimeError(
            f'DeviceCache: table "{name}": got {", ".join(got)} of {type(source).__name__}.{op}, wanted '
            f"{', '.join(wanted)}."
        )
    return arrays


def round_rows(table: FrozenTable, rows: np.ndarray) -> Lines:
    """Rounds rows to what a store holds: an answer is the same whether its row was cached or fetched."""
    return (round_to(rows, jnp.dtype(table.dtype)).astype(np.float32, copy=False),)


def join_lines(parts: Iterable[Lines]) -> Lines:
    """Joins lines; those of a single part are not copied."""
    return tuple(arrays[0] if len(arrays) == 1 else np.concatenate(arrays) for arrays in zip(*parts, strict=True))


_fetch = jax.jit(find_rows, static_argnums=1)


@jax.jit
def _fetch_quantized(store: FrozenStore, words: Any, table: Any) -> tuple[Any, Any, Any]:
    row_ids = table_kernels.find(store.index, store.counters, words, jnp.full(words.shape[0], table))
    numbers = store.rows.at[row_ids].get(mode="fill", fill_value=0)
    return numbers, store.scales[0].at[row_ids].get(mode="fill", fill_value=0), row_ids != jnp.uint32(NO_ROW)
