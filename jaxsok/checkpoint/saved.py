"""Saved tables: a folder's manifest and files, and checks that its tables fit those of a collection.

The manifest is checked before anything is read, and all data against its checksum before it is used.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import numpy as np

from jaxsok import checks
from jaxsok.checkpoint import manifest as manifest_lib
from jaxsok.checkpoint.files import LOG, CorruptFileError, SavedFile, TableForm, column_of, keys_schema
from jaxsok.collection import Collection
from jaxsok.operations import locate
from jaxsok.plan import partitions_of
from jaxsok.records import Records
from jaxsok.specs import StoreSpec, name_word

OptimizerState = Literal["require", "matching", "initial"]
OPTIMIZER_STATES: tuple[str, ...] = get_args(OptimizerState)


@dataclasses.dataclass(frozen=True)
class Source:
    """A folder of saved tables, and its manifest."""

    op: str
    folder: Any
    manifest: dict[str, Any]

    @classmethod
    def of(cls, op: str, folder: Any, argument: str = "path") -> "Source":
        return cls(op, folder, manifest_lib.read(op, folder, argument))

    def form(self, table: str) -> TableForm:
        return TableForm.from_json(self.manifest["tables"][table]["form"])

    def files(self, table: str, kind: str = manifest_lib.ROWS) -> list[SavedFile]:
        schema = self.form(table).schema if kind == manifest_lib.ROWS else keys_schema(kind == manifest_lib.WAITING)
        return [SavedFile(self.op, self.folder, file, schema) for file in self.manifest["tables"][table][kind]]

    def records(self, table: str, wanted: np.ndarray | None = None) -> Iterator[Records]:
        """Reads the rows of a table, batch by batch; `wanted` chooses partitions, bool[4096] (None: all)."""
        form, word = self.form(table), name_word(table)
        for file in self.files(table):
            for batch in file.batches(wanted):
                records = form.from_batch(batch)
                if wanted is not None:
                    is_wanted = wanted[partitions_of(records.keys, word).astype(np.int64)]
                    records = records if is_wanted.all() else records.take(is_wanted)
                yield records

    def waiting_keys(self, table: str) -> Iterator[Records]:
        """Reads the keys that wait for a row, and how often each was seen, as `frequency`."""
        for file in self.files(table, manifest_lib.WAITING):
            for batch in file.batches():
                keys = column_of(batch, "key")
                yield Records(keys, np.zeros((keys.size, 0), np.float32), frequency=column_of(batch, "count"))

    def check(self, tables: Sequence[str]) -> None:
        """Refuses, with a CorruptFileError, missing or mis-sized files, and counts that do not agree."""
        for file in (*self._all_files(tables), *self._bloom_files(tables)):
            file.check_size()
        for table in tables:
            entry = self.manifest["tables"][table]
            files = sum(sum(batch[3] for batch in file["batches"]) for file in entry[manifest_lib.ROWS])
            partitions = int(manifest_lib.unpack(entry["partition_rows"]).sum())
            if not files == partitions == entry["num_rows"]:
                raise CorruptFileError(
                    f'{self.op}: table "{table}": got {files} rows in the files and {partitions} in the partitions of '
                    f'"{self.folder}", wanted {entry["num_rows"]} of both; manifests of other saves were mixed.'
                )
            self._check_bloom(table)

    def _check_bloom(self, table: str) -> None:
        store, saved = self.store_of(table)
        pieces = [piece for file in self._bloom_files([table]) for piece in file.entry["pieces"]]
        wanted = max(map(sum, saved["bloom_segments"]))
        for shard in range(1 if saved["is_replicated"] else self.manifest["num_shards"]) if wanted else ():
            got = sum(size for _, size, _, number in pieces if number == shard)
            if got < wanted:
                raise CorruptFileError(
                    f'{self.op}: "{self.folder}": bloom: got {got} bytes of the Bloom filter of store {store}, shard '
                    f"{shard}, wanted {wanted}; manifests of other saves were mixed."
                )

    def verify(self, tables: Sequence[str]) -> None:
        self.check(tables)
        for file in self._all_files(tables):
            file.verify()
        for file in self._bloom_files(tables):
            for _ in file.words():
                pass  # nothing of it is kept

    def _all_files(self, tables: Sequence[str]) -> list[SavedFile]:
        return [file for table in tables for kind in manifest_lib.KINDS for file in self.files(table, kind)]

    def _bloom_files(self, tables: Sequence[str]) -> list[SavedFile]:
        stores = {self.store_of(table)[0] for table in tables}
        entries = [entry for entry in self.manifest[manifest_lib.BLOOM] if entry["store"] in stores]
        return [SavedFile(self.op, self.folder, entry, None) for entry in entries]

    def bloom(self, table: str, shard: int) -> np.ndarray:
        """Reads the Bloom filter of a table's store."""
        parts = [words for file in self._bloom_files([table]) for words in file.words(shard)]
        return np.concatenate([np.zeros(0, np.uint32), *parts])

    def store_of(self, table: str) -> tuple[int, dict[str, Any]]:
        """Returns number and entry of the store that a table was saved from."""
        return next((s, store) for s, store in enumerate(self.manifest["stores"]) if table in store["tables"])

    def store_with(self, spec: StoreSpec) -> dict[str, Any] | None:
        """Returns the entry of the store that was saved with the same tables, if there is one."""
        names = [table.name for table in spec.tables]
        return next((store for store in self.manifest["stores"] if store["tables"] == names), None)


def _choose_tables(source: Source, collection: Collection, tables: Sequence[str] | None) -> list[str]:
    """Returns the tables to restore; a ValueError where none were chosen and names differ, or one is missing."""
    op, saved = source.op, list(source.manifest["tables"])
    declared = [table.name for table in collection.tables]
    if tables is None:
        if set(saved) != set(declared):
            raise ValueError(
                f'{op}: path: got "{source.folder}" with tables {sorted(saved)}, wanted those of the collection, '
                f"{sorted(declared)}; pass tables=[...] to restore some of them."
            )
        return declared
    if isinstance(tables, str):
        raise TypeError(f"{op}: tables: got {tables!r}, wanted a list of names.")
    for name in tables:
        if name not in declared:
            raise ValueError(f'{op}: tables: got "{name}", wanted some of {declared}, the tables of the collection.')
        if name not in saved:
            raise ValueError(f'{op}: tables: got "{name}", wanted some of {saved}, the tables in "{source.folder}".')
    return list(tables)


def check_forms(
    source: Source, collection: Collection, tables: Sequence[str] | None, optimizer_state: OptimizerState
) -> dict[str, tuple[str, ...]]:
    """Returns the pieces of optimizer state to restore, by table; refuses another dim, or a form that is required."""
    op, names = source.op, _choose_tables(source, collection, tables)
    checks.one_of(f"{op}: optimizer_state", optimizer_state, OPTIMIZER_STATES)
    taken: dict[str, tuple[str, ...]] = {}
    for name in names:
        table, form = locate(op, collection, name), source.form(name)
        spec, wanted = table.spec, TableForm.of(table.spec, table.declared)
        if form.dim != wanted.dim:
            raise ValueError(f'{op}: table "{name}": dim: got {form.dim} in "{source.folder}", wanted {wanted.dim}.')
        saved, declared = ({state: dim for state, dim, _ in states} for states in (form.states, wanted.states))
        if optimizer_state == "require" and (form.state_form, saved) != (wanted.state_form, declared):
            raise ValueError(
                f'{op}: table "{name}": optimizer: got state of optim.{form.optimizer} ({form.state_form}: {saved}) in '
                f'"{source.folder}", wanted that of optim.{wanted.optimizer} ({wanted.state_form}: {declared}); pass '
                'optimizer_state="initial" to restore the rows alone, or "matching" to restore the state of equal name '
                "and dim."
            )
        own = [(str(leaf.dtype), list(leaf.shape)) for leaf in map(np.asarray, spec.optimizer.init_globals(spec.dim))]
        of_store = [(leaf["dtype"], leaf["shape"]) for leaf in source.store_of(name)[1]["globals"]]
        if optimizer_state == "require" and of_store != own:  # tables of one store must have been saved with one
            raise ValueError(
                f'{op}: table "{name}": optimizer: got state of no row {of_store} in "{source.folder}", wanted {own}; '
                'pass optimizer_state="initial" to start from the initial state.'
            )
        matching = tuple(state for state, dim in declared.items() if saved.get(state) == dim)
        taken[name] = () if optimizer_state == "initial" else spec.optimizer.usable_states(spec.dim, matching)
        if form.dtype != wanted.dtype:
            LOG.warning('%s: table "%s": rows of %s become %s, rounded to nearest.', op, name, form.dtype, wanted.dtype)
    return taken
