"""Lineage: whether what a state holds came after an export, so that a delta on it can be trusted.

A state lives from `init`, or from the folder it was made of, until it is lost. Each life has a word of its own. It lies
in the state (`State.lineage`) and in what is exported from it; of states from `init` the word in the state is that of
their seed, and the process knows which life it stands for. What a life came from is known to the process that
made the state, and written with every export: words of lives before, and the last export of each that led on.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxsok import processes
from jaxsok.collection import Collection
from jaxsok.operations import lineage_of, no_tickets
from jaxsok.store import State

LOG = logging.getLogger("jaxsok.checkpoint")
Ancestors = tuple[tuple[str, int], ...]
"""Of a life: the word of each life before it, and the number of the export at which the next one began."""

_ANCESTORS: dict[str, Ancestors] = {}
"""Of the lives that began in this process, by word; what is not here came from `init`, or from elsewhere."""
_LOCK = threading.Lock()
_last_order = 0


def word_of(state: State) -> str:
    """The word of a state's life, as manifests have it (waits for the device).

    Example:
      "00000000deadbeef"
    """
    return processes.life_of(np.asarray(state.lineage.addressable_data(0)))


def entry_of(state: State) -> dict[str, Any]:
    """What the manifest of an export of a state says; exports of one life have rising numbers."""
    word = word_of(state)
    return {"word": word, "order": _next_order(), "ancestors": [list(one) for one in _ANCESTORS.get(word, ())]}


def begun(collection: Collection, state: State, manifest: Mapping[str, Any], *, is_exact: bool) -> State:
    """A state that begins a life of its own.

    Args:
      collection: of the state.
      state: holds what was exported.
      manifest: of what it was made of.
      is_exact: whether the state has all of that, so that a delta on it is what changes from here on.
    """
    words = processes.drawn(is_shared=collection.shards.num_processes > 1)
    state = dataclasses.replace(
        state, lineage=lineage_of(collection.shards, words), tickets=no_tickets(collection.shards)
    )
    saved = manifest.get("lineage")
    if is_exact and saved is not None:
        before = ((one, order) for one, order in saved["ancestors"])
        _ANCESTORS[word_of(state)] = (*before, (saved["word"], saved["order"]))
    return state


def check(op: str, collection: Collection, state: State, folder: Any, manifest: Mapping[str, Any]) -> None:
    """Refuses a base that a state did not come after.

    Raises:
      ValueError: the base was exported by another life, or by one before after the export that this one began with.
    """
    saved = manifest.get("lineage")
    if saved is None:
        LOG.warning(
            '%s: base: "%s" does not say of which state it is: it was written before jaxsok kept account. If this '
            "state was restored from before it, the delta lacks rows; write a full export then.",
            op,
            folder,
        )
        return
    if not collection.shards.is_mesh and jax.process_index() > 0:
        return  # each process has a state of its own then, and the first one's is saved
    word = word_of(state)
    ancestors = _ANCESTORS.get(word, ())
    if saved["word"] == word or any(one == saved["word"] and saved["order"] <= order for one, order in ancestors):
        return
    raise ValueError(
        f'{op}: base: got "{folder}", exported by a state (lineage {saved["word"]}) that this one ({word}) did not '
        "come from: it was restored from before it, or made anew, and rows would be missing in a delta. Wanted a base "
        "that this state was restored from, or an export of before that or since; write a full export."
    )


def _next_order() -> int:
    """Rises within a process, and as a rule from one to the next."""
    global _last_order
    with _LOCK:
        _last_order = max(_last_order + 1, time.time_ns())
        return _last_order
