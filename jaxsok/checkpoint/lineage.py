"""Lineage: whether the contents of a state came after an export, so that a delta on the export can be trusted.

Every export records the life of its state, the lives before it, and the last export of each that led on (`lives.py`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jaxsok import lives, processes
from jaxsok.collection import Collection
from jaxsok.lives import Life
from jaxsok.operations import lineage_of
from jaxsok.shards import read_on_host
from jaxsok.store import State
from jaxsok.tickets import no_tickets


def entry_of(state: State) -> dict[str, Any]:
    """Makes the manifest's entry for an export of a state; waits for the device."""
    life, order = _life_of(state), lives.IN_THIS_PROCESS.next_order()
    return {"word": life.name, "order": order, "ancestors": [list(ancestor) for ancestor in life.ancestors]}


def begin_life(collection: Collection, state: State, manifest: Mapping[str, Any], *, is_exact: bool) -> State:
    """Begins a life for a state made of a folder; `is_exact`: a delta on it is what changes from here on."""
    shards = collection.shards
    words = processes.draw_words("load", is_shared=shards.num_processes > 1)
    saved, ancestors = manifest["lineage"], ()
    if is_exact:
        ancestors = (*((name, order) for name, order in saved["ancestors"]), (saved["word"], saved["order"]))
    lives.IN_THIS_PROCESS.begin(words, words, ancestors)
    tickets = shards.make(no_tickets, shards.num_shards)
    return dataclasses.replace(state, lineage=lineage_of(shards, words), tickets=tickets)


def check(op: str, collection: Collection, state: State, folder: Any, manifest: Mapping[str, Any]) -> None:
    """Refuses a base of another life, or of an earlier one after the export at which this life began."""
    if collection.shards.is_of_each_process and jax.process_index() > 0:
        return
    saved, life = manifest["lineage"], _life_of(state)
    is_earlier = any(name == saved["word"] and saved["order"] <= order for name, order in life.ancestors)
    if saved["word"] == life.name or is_earlier:
        return
    raise ValueError(
        f'{op}: base: got "{folder}", exported by a state (lineage {saved["word"]}) that this one ({life.name}) did '
        "not come from: it was restored from before it, initialized again, or restored with another "
        'optimizer_state than "require", and rows would be missing in a delta. '
        "Wanted a base that this state was restored from, or an export of before that or since; write a full export."
    )


def is_same_life(state: State, manifest: Mapping[str, Any]) -> bool:
    """Returns whether a folder was exported in this life of a state: nothing was restored since."""
    return manifest["lineage"]["word"] == _life_of(state).name


def _life_of(state: State) -> Life:
    return lives.IN_THIS_PROCESS.life_of(read_on_host(state.lineage))
