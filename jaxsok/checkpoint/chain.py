"""Chains: a full export (or a checkpoint) and its deltas, in order, and which of their keys a table has.

Each link knows its base by name and by a number of its own, so that none can be left out or put in twice.
"""

import itertools
import os
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np

from jaxsok import processes
from jaxsok.checkpoint import manifest as manifest_lib
from jaxsok.checkpoint.files import key_batches
from jaxsok.checkpoint.lineage import is_same_life
from jaxsok.checkpoint.saved import Source
from jaxsok.collection import Collection
from jaxsok.operations import locate
from jaxsok.shards import read_on_host
from jaxsok.store import State
from jaxsok.types import COUNTERS, PADDING_KEY

KEYS_AT_A_TIME = 1 << 18  # 2 MiB of keys: enough for a device to be busy, few enough for a host
LEAST_KEYS = 1 << 10  # a search for this many takes less than the start of a program
MOST_LINKS = 10_000  # a week of deltas, one a minute
Path = str | os.PathLike[str]


def chain_of(op: str, path: Path | Sequence[Path], argument: str = "path") -> list[Source]:
    """Returns the links of a chain, the full one first; a ValueError says which link is missing or does not follow."""
    if isinstance(path, (str, os.PathLike)):
        links = [Source.of(op, pathlib.Path(path), argument)]
        known = {links[0].manifest["uuid"]}
        while links[-1].manifest["kind"] == "delta":
            links.append(_base_of(op, links[-1], argument))
            uuid = links[-1].manifest["uuid"]
            # A base is known by its number, so the links of a circle would have numbers that no export writes.
            if len(links) > MOST_LINKS or uuid in known:
                raise ValueError(
                    f'{op}: {argument}: got "{path}", whose bases lead in a circle or through more than {MOST_LINKS} '
                    f'deltas, the last of them to "{links[-1].folder}", wanted a full export at the end; write one.'
                )
            known.add(uuid)
        links.reverse()
    elif not isinstance(path, Sequence):
        raise TypeError(
            f"{op}: {argument}: got {type(path).__name__}, wanted a path, or those of a chain in order; of a future, "
            "its result()."
        )
    else:
        links = [Source.of(op, pathlib.Path(link), argument) for link in path]
        if not links:
            raise ValueError(f"{op}: {argument}: got no folders, wanted a full export and its deltas, in order.")
    if links[0].manifest["kind"] == "delta":
        raise ValueError(
            f'{op}: {argument}: got the delta "{links[0].folder}" first, wanted the full export it rests on.'
        )
    for before, link in itertools.pairwise(links):
        check_link(op, link, before.manifest["uuid"], f'"{before.folder}"', argument)
    return links


def _base_of(op: str, delta: Source, argument: str) -> Source:
    """Opens the export that a delta rests on, as near to it, or to a link to it, as when the delta was written."""
    parents = delta.folder.absolute().parent, delta.folder.resolve().parent
    folders = [(parent / delta.manifest["base_path"]).resolve() for parent in parents]
    folder = next((folder for folder in folders if (folder / manifest_lib.NAME).exists()), folders[0])
    if not (folder / manifest_lib.NAME).exists():
        raise ValueError(
            f'{op}: {argument}: got the delta "{delta.folder}" alone, whose base "{folder}" is not there; give all '
            "links in order, the full export first."
        )
    base = Source.of(op, folder)
    if base.manifest["uuid"] != delta.manifest["base"]:
        raise ValueError(
            f'{op}: {argument}: got the delta "{delta.folder}", which rests on {delta.manifest["base"]}, wanted that '
            f'in "{folder}", where it was, and which is {base.manifest["uuid"]}: a folder was renamed or written '
            "again; give all links in order, the full export first."
        )
    return base


def check_link(op: str, link: Source, uuid: str, before: str, argument: str = "path") -> None:
    """Refuses what is not a delta on the export `uuid`, which messages call `before`."""
    manifest = link.manifest
    if manifest["kind"] != "delta":
        raise ValueError(
            f'{op}: {argument}: got "{link.folder}", a {manifest["kind"]} export, wanted a delta after {before}.'
        )
    if manifest["base"] != uuid:
        raise ValueError(
            f'{op}: {argument}: got the delta "{link.folder}", which rests on {manifest["base"]} '
            f'("{manifest["base_path"]}"), after {before}, which is {uuid}; apply deltas in '
            "order, and none of them twice."
        )


def find_gone_keys(op: str, collection: Collection, state: State, chain: Sequence[Source], table: str) -> np.ndarray:
    """Finds the keys that a chain has and a table no longer has: uint64, ascending."""
    gone = np.zeros(0, np.uint64)
    if chain and _keeps_all(collection, state, chain[-1], table):
        return gone
    for source in chain:
        with processes.fail_together(op):
            tombstones = list(key_batches(source.files(table, manifest_lib.TOMBSTONES)))
        gone = np.setdiff1d(gone, np.concatenate([gone[:0], *tombstones]))
        pairs = find_keys(op, collection, state, table, key_batches(source.files(table)))
        gone = np.unique(np.concatenate([gone, *(keys[~found] for keys, found in pairs)]))
    return gone


def _keeps_all(collection: Collection, state: State, base: Source, table: str) -> bool:
    """Returns whether no row of a table's store left since an export: its generation and the state's life are the same.

    Processes with a state each would disagree, and wait for each other; they search.
    """
    if collection.shards.is_of_each_process or not is_same_life(state, base.manifest):
        return False
    counters = state.stores[locate("export_delta", collection, table).store].counters  # all shards have one generation
    return int(read_on_host(counters)[COUNTERS.index("generation")]) == base.store_of(table)[1]["generation"]


def find_keys(
    op: str, collection: Collection, state: State, table: str, batches: Iterator[np.ndarray]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields batches of keys, and which of them have a row."""
    for padded, size in padded_batches(op, batches):
        yield padded[:size], np.asarray(collection.contains(state, table, padded))[:size]


def padded_batches(op: str, batches: Iterator[np.ndarray]) -> Iterator[tuple[np.ndarray, int]]:
    """Pads batches of keys to few sizes, for few programs; yields their number, too. All processes read the same."""
    for batch in processes.iterate_together(op, batches):
        for start in range(0, batch.size, KEYS_AT_A_TIME):
            keys = batch[start : start + KEYS_AT_A_TIME]
            padded = np.full(max(LEAST_KEYS, 1 << (keys.size - 1).bit_length()), np.uint64(PADDING_KEY))
            padded[: keys.size] = keys
            yield padded, keys.size
