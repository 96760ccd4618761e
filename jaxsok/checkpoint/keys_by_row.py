"""The keys of all rows at one time, in host memory: a later export finds the keys that left by comparing.

Without them it reads all keys of the chain of exports that it rests on, whose number grows with each delta.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from jaxsok.checkpoint.chain import find_keys
from jaxsok.checkpoint.snapshot import shard_parts
from jaxsok.collection import Collection
from jaxsok.keys import from_words
from jaxsok.store import State
from jaxsok.table_export import blocks_of
from jaxsok.types import PADDING_KEY


@dataclasses.dataclass(frozen=True, eq=False)
class KeysByRow:
    """The key and the table of each row of a state, by store and shard, row by row; free rows have PADDING_KEY."""

    names: tuple[tuple[str, ...], ...]
    """The tables of each store: another collection may arrange them in another way."""
    keys: tuple[dict[int, np.ndarray], ...]
    tables: tuple[dict[int, np.ndarray], ...]

    @classmethod
    def of(cls, collection: Collection, state: State) -> "KeysByRow":
        """Reads the records of all rows: 16 bytes each from the device, of which at least 9 stay."""
        keys, tables = [], []
        for spec, store in zip(collection.stores, state.stores, strict=True):
            small = np.min_scalar_type(len(spec.tables))
            found: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
            for slab in store.records:
                for shard, part in shard_parts(slab, spec, collection.shards).items():
                    blocks = (
                        (from_words(words[:, :2]), words[:, 2].astype(small)) for _, (words,) in blocks_of((part,))
                    )
                    found.setdefault(shard, []).extend(blocks)
            columns = {shard: tuple(map(np.concatenate, zip(*parts, strict=True))) for shard, parts in found.items()}
            keys.append({shard: of_shard[0] for shard, of_shard in columns.items()})
            tables.append({shard: of_shard[1] for shard, of_shard in columns.items()})
        names = tuple(tuple(table.name for table in spec.tables) for spec in collection.stores)
        return cls(names, tuple(keys), tuple(tables))

    def find_gone(self, op: str, collection: Collection, state: State, now: "KeysByRow") -> dict[str, np.ndarray]:
        """Finds the keys that a state, whose keys are `now`, no longer has: uint64 by table, ascending.

        Pre: both have the same tables in each store. A key that is gone is not in its row any more. Those that are
        elsewhere by now are looked for in the tables.
        """
        gone = {}
        for s, spec in enumerate(collection.stores):
            moved = list(self._moved(now, s))
            for number, table in enumerate(spec.tables):
                keys = np.concatenate([np.zeros(0, np.uint64), *(keys[of == number] for keys, of in moved)])
                pairs = find_keys(op, collection, state, table.name, iter([keys]))
                gone[table.name] = np.unique(np.concatenate([keys[:0], *(part[~found] for part, found in pairs)]))
        return gone

    def _moved(self, now: "KeysByRow", s: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields, by shard, the keys that are not in their rows any more, and their tables."""
        for shard, keys in self.keys[s].items():
            tables, later, later_tables = self.tables[s][shard], now.keys[s].get(shard), now.tables[s].get(shard)
            is_moved = keys != np.uint64(PADDING_KEY)
            if later is not None and later_tables is not None:
                same = slice(0, min(keys.size, later.size))
                is_moved[same] &= (keys[same] != later[same]) | (tables[same] != later_tables[same])
            yield keys[is_moved], tables[is_moved]
