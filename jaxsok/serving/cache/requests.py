"""The host side of a lookup in a device cache: the keys of a request, cached rows, and fetched rows."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxsok import keys as keys_lib
from jaxsok.serving import quantize
from jaxsok.serving.backing import Lines
from jaxsok.serving.cache.compiled import LEAST_KEYS
from jaxsok.serving.cache.programs import Queried
from jaxsok.serving.cache.stores import Snapshot
from jaxsok.serving.errors import RequestError, UnknownTableError, refusals
from jaxsok.serving.frozen import FrozenSpec
from jaxsok.serving.padding import padded_size
from jaxsok.types import NO_ROW, PADDING_KEY


@dataclasses.dataclass(frozen=True)
class Part:
    """The keys of one table among those of its store."""

    name: str
    store: int
    lines: slice
    shape: tuple[int, ...]


class Request:
    """Checked keys, packed into one array for each store; `choose` gives its size, from the least power of two."""

    def __init__(
        self, spec: FrozenSpec, keys: Mapping[str, Any], choose: Callable[[tuple[int, ...]], tuple[int, ...]]
    ) -> None:
        if not isinstance(keys, Mapping):
            raise RequestError(f"lookup: keys: got {type(keys).__name__}, wanted a mapping from tables to keys.")
        words: list[list[np.ndarray]] = [[] for _ in spec.stores]
        ids: list[list[np.ndarray]] = [[] for _ in spec.stores]
        sizes = [0] * len(spec.stores)
        self.parts: list[Part] = []
        self.num_keys = 0
        for name, given in keys.items():
            if name not in spec.places:
                raise UnknownTableError.of("lookup", name, spec.places)
            with refusals():
                given, what = keys_lib.as_array(given, "lookup"), f'lookup: table "{name}"'
                of_table = keys_lib.to_words(np.atleast_1d(given), what).reshape(-1, 2)
            store, number = spec.places[name]
            words[store].append(of_table)
            ids[store].append(np.full(len(of_table), number, np.uint32))
            end = sizes[store] + len(of_table)
            self.parts.append(Part(name, store, slice(sizes[store], end), given.shape))
            sizes[store] = end
            self.num_keys += int((keys_lib.from_words(of_table) != np.uint64(PADDING_KEY)).sum())
        self.batches = []
        most = choose(tuple(padded_size(size, LEAST_KEYS) for size in sizes))
        for s, size in enumerate(sizes):
            padding = keys_lib.padding_words((most[s] - size,)), np.zeros(most[s] - size, np.uint32)
            self.batches.append((np.concatenate([*words[s], padding[0]]), np.concatenate([*ids[s], padding[1]])))


@dataclasses.dataclass(frozen=True)
class Found:
    """The result of a query on the host."""

    out: Queried
    hit_rates: dict[str, float]
    missed: dict[str, tuple[np.ndarray, np.ndarray]]  # by table: places among the store's distinct keys, and the keys
    num_distinct: dict[str, int]  # by table
    snapshot: Snapshot  # whose rows these are

    @classmethod
    def of(cls, spec: FrozenSpec, request: Request, out: Queried, counts: np.ndarray, snapshot: Snapshot) -> "Found":
        """Reads hit rates, and the keys of misses if there are any."""
        starts = np.cumsum([0, *(len(tables) for tables in spec.stores)])
        distinct, rates, missed = {}, {}, {}
        records: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        for part in request.parts:
            s, number = spec.places[part.name]
            num_distinct, num_missed = counts[starts[s] + number, :2].tolist()
            distinct[part.name] = num_distinct
            # Not 1 - misses ÷ distinct, which may miss a threshold of 0.1 by rounding.
            rates[part.name] = (num_distinct - num_missed) / num_distinct if num_distinct else 1.0
            if not num_missed:
                continue
            if s not in records:
                lines, row_ids = np.asarray(out.records[s]), np.asarray(out.row_ids[s])
                keys = keys_lib.from_words(lines[:, :2])
                places = np.flatnonzero((row_ids == NO_ROW) & (keys != np.uint64(PADDING_KEY)))
                records[s] = places, keys[places], lines[places, 2]
            places, keys, ids = records[s]
            missed[part.name] = places[ids == number], keys[ids == number]
        return cls(out, rates, missed, distinct, snapshot)


@dataclasses.dataclass(frozen=True)
class Fetched:
    """Rows of one table that a lookup waited for."""

    places: np.ndarray  # among the distinct keys of the store
    keys: np.ndarray
    rows: Lines

    def put_into(self, lines: np.ndarray, inverse: np.ndarray) -> np.ndarray:
        """Puts these rows, as float32, among the rows of positions."""
        if not len(self.places):
            return lines
        last = inverse.max(initial=0, where=inverse != NO_ROW)
        slots = np.full(int(max(self.places.max(), last)) + 2, -1, np.int64)
        slots[self.places] = np.arange(len(self.places))
        slot = slots[np.minimum(inverse, np.uint32(len(slots) - 1)).astype(np.int64)]
        rows = self.rows[0] if len(self.rows) == 1 else quantize.dequantize_rows(*self.rows)
        lines = np.array(lines)
        lines[slot >= 0] = rows[slot[slot >= 0]]
        return lines
