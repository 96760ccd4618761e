"""The host's knowledge of the rows in use, by which `grow` decides (grow.py): bounds that cost no wait.

Counters are read when they are at rest, or requested and read when they have arrived. Between that, the rows in use are
at most those last seen and those that the steps since could insert.
"""

import collections
import dataclasses
import functools
import math
import warnings
import weakref
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jaxtyping import Array

from jaxsok.checks import not_none
from jaxsok.coming import Coming
from jaxsok.features import Features
from jaxsok.shards import Shards
from jaxsok.specs import StoreSpec, TableSpec, sum_pinned_and_spread
from jaxsok.store import State, capacities_of
from jaxsok.types import COUNTERS


@dataclasses.dataclass(frozen=True)
class Look:
    """The rows in use of one store before some batch, for late decisions."""

    usable_from: int
    """The first batch whose decision may use it: not when it arrives decides, so all runs decide alike."""
    rows: "int | Summary"
    """Those of the fullest shard; or the counters of all stores, on their way to the host."""
    taken: int
    """Positions of all batches before."""


@dataclasses.dataclass
class GrowthTracker:
    """The host's knowledge of the rows in use, of one state that passes through `grow`; lists go by store."""

    specs: Sequence[StoreSpec]
    tables: Sequence[TableSpec]
    """Tables in the order of the collection."""
    shards: Shards
    keys_per_step: list[int]
    """Positions that one step can insert: learned from batches and traces; saved with checkpoints."""
    allowed: list[int]
    """Insertions that all steps so far could have made since the tracker began."""
    assigned_per_step: list[int]
    """Keys that one step sets the rows of: learned from traces; saved with checkpoints."""
    known: list[tuple[int, int] | None]
    """Rows last seen in the fullest shard, and `allowed` at that time."""
    sightings: list[tuple[int, int]]
    """Entries of `sightings` last seen in the fullest shard, and `allowed` at that time; counts if `known` does."""
    coming: list[int]
    """Insertions that the steps since the last call can make."""
    num_counts: list[int]
    """Counts in succession of the keys of a store that could grow, for which there was room."""
    under_way: collections.deque[tuple["Summary", list[int]]]
    """Summaries on their way to the host, oldest first, with `allowed` when they were requested."""
    looks: list[list[Look]]
    """For late decisions, oldest first: of those that may be used, only the last is kept."""
    taken: list[int]
    """Positions of the batches for which there is room: their rows are in the state, or in that of the next step."""
    most: list[int]
    """Positions of the largest batch so far for which there was to be room; saved with checkpoints."""
    num_taken: int = 0
    """Batches for which there is room: those of one call count as one."""
    signature: tuple[int, ...] | None = None
    """Capacities of the state last seen; others mean another state, of which nothing is known."""
    steps: int | None = None
    """Steps until the next call of `grow`, if the last call got no batch."""
    num_calls: int = 0
    num_waits: int = 0
    """Waits of the host for the device."""
    num_grown: int = 0
    """Stores that grew; after each growth the step is compiled again."""
    num_evictions: int = 0
    """Stores that lost rows to make room."""
    following: list[tuple[weakref.ref, tuple[Features, ...]]] = dataclasses.field(default_factory=list)
    """The batches that pipelines handed out and callers hold, and those of which their steps look some up ahead."""
    loops: set[object] = dataclasses.field(default_factory=set)
    """The loops over such pipelines that go on."""
    warned: set[str] = dataclasses.field(default_factory=set)
    """Subjects of warnings so far: each comes once."""

    @classmethod
    def of(cls, specs: Sequence[StoreSpec], tables: Sequence[TableSpec], shards: Shards) -> "GrowthTracker":
        """Makes a tracker that knows nothing."""
        counts = ("keys_per_step", "allowed", "assigned_per_step", "coming", "num_counts", "taken", "most")
        by_store = {"known": [None] * len(specs), "sightings": [(0, 0)] * len(specs), "looks": [[] for _ in specs]}
        by_store |= {name: [0] * len(specs) for name in counts}
        return cls(specs, tables, shards, under_way=collections.deque(), **by_store)

    def warn_once(self, about: str, message: str, stacklevel: int) -> None:
        """Warns if there was no warning about this before; `stacklevel` counts from the caller."""
        if about not in self.warned:
            self.warned.add(about)
            warnings.warn(message, RuntimeWarning, stacklevel=stacklevel + 1)

    def num_in_use(self, store: int) -> int:
        """Returns the rows in use, just read."""
        return not_none(self.known[store])[0]

    def forget(self) -> None:
        """Forgets everything except the size of batches."""
        self.known = [None] * len(self.known)
        self.looks = [[] for _ in self.looks]
        self.under_way.clear()
        self.signature, self.num_calls = None, 0

    def record_batch(self, store: int, num_keys: int) -> None:
        """Notes how many keys one step asks of a store."""
        self.keys_per_step[store] = max(self.keys_per_step[store], num_keys)

    def record_features(self, features: Sequence[Features]) -> None:
        """Notes how many keys one step may insert that looks all of these up."""
        for s, spec in enumerate(self.specs):
            layouts = [layout for part in features for layout in part.stores[s].layouts]
            self.record_batch(s, keys_at_most(spec, [(layout.table, layout.num_keys) for layout in layouts]))

    def record_assign(self, store: int, num_keys: int) -> None:
        """Notes how many rows one call sets, in a step."""
        self.assigned_per_step[store] = max(self.assigned_per_step[store], num_keys)

    def per_step(self) -> list[int]:
        """Returns the rows that one step may insert, by store."""
        return [keys + assigned for keys, assigned in zip(self.keys_per_step, self.assigned_per_step, strict=True)]

    def extrapolate(self, steps: int) -> Coming:
        """Returns what `steps` steps may insert, if they are as those so far."""
        positions = [keys * steps for keys in self.per_step()]
        return Coming(positions, uncounted=positions, is_given=False)

    def begin(self, coming: Coming, steps: int) -> None:
        """Begins a call: the steps since the last one may have inserted what was coming then."""
        if self.num_calls:
            # A caller that passed no batch may have packed the first one, or a larger one, only after the call.
            asked = self.coming if self.steps is None else self.extrapolate(self.steps).positions
            for s, (first, later) in enumerate(zip(self.coming, asked, strict=True)):
                self.allowed[s] += max(first, later)
                self.taken[s] += max(0, later - first)
        self.num_calls += 1
        self.coming, self.steps = list(coming.positions), None if coming.is_given else steps

    def bound(self, store: int) -> int | None:
        """Returns an upper bound of the rows in use; None: not known."""
        known = self.known[store]
        return None if known is None else known[0] + self.allowed[store] - known[1]

    def sightings_bound(self, store: int) -> int | None:
        """Returns an upper bound of the entries of `sightings`; None: not known. Each key asked may take one."""
        num_seen, allowed = self.sightings[store]
        return None if self.known[store] is None else num_seen + self.allowed[store] - allowed

    def late_bound(self, store: int) -> int | None:
        """Returns an upper bound of the rows in use by the last look that may be used; None: there is none."""
        looks = self.looks[store]
        while len(looks) > 1 and looks[1].usable_from <= self.num_taken:
            del looks[0]
        if not looks or looks[0].usable_from > self.num_taken:
            return None
        return self.rows_of(store, looks[0]) + self.taken[store] - looks[0].taken

    def rows_of(self, store: int, look: Look) -> int:
        """Returns the rows of a look; waits if its counters have not arrived."""
        return look.rows if isinstance(look.rows, int) else look.rows().num_rows[store]

    def set_look(self, store: int, rows: int) -> None:
        """Notes the rows in use now; earlier looks count no more."""
        self.looks[store] = [Look(self.num_taken, rows, self.taken[store])]

    def looks_to_save(self, store: int) -> list[tuple[int, int, int]]:
        """Returns for each look the batches until it may be used, the rows, and the positions since; may wait."""
        return [
            (max(0, look.usable_from - self.num_taken), self.rows_of(store, look), self.taken[store] - look.taken)
            for look in self.looks[store]
        ]

    def restore_looks(
        self, store: int, saved: Sequence[tuple[int, int, int]], num_rows: int, most: int, state: State
    ) -> None:
        """Restores what `looks_to_save` returned, and `most`; `state` is the one that comes next.

        Looks that do not bound `num_rows`, the rows in use of the fullest shard, are of other rows.
        """
        self.signature, self.most[store] = capacities_of(state), max(self.most[store], most)
        if any(rows + since < num_rows for _, rows, since in saved):
            return
        self.looks[store] = [
            Look(self.num_taken + batches, rows, self.taken[store] - since) for batches, rows, since in saved
        ]

    def learn(self, seen: "Seen", allowed: Sequence[int] | None = None) -> None:
        """Records a summary and the value of `allowed` that belongs to it; None: what it is now, nothing is newer."""
        if allowed is None:
            self.under_way.clear()
            allowed = self.allowed
        for s, num_rows in enumerate(seen.num_rows):
            self.known[s] = (num_rows, allowed[s])
            self.sightings[s] = seen.num_sightings[s], allowed[s]


@dataclasses.dataclass(frozen=True)
class Seen:
    """The contents of a summary: lists by store, and the refused keys by table in the order of the collection."""

    num_rows: list[int]
    """Rows in use, of the fullest shard."""
    num_unplaced: list[int]
    """Keys that found no index entry."""
    num_sightings: list[int]
    """Entries taken, of the fullest shard."""
    num_refused: list[int]

    @classmethod
    def of(cls, words: np.ndarray, num_stores: int, num_shards: int) -> "Seen":
        """Reads the counters of all stores, shard by shard, and the refused keys behind them."""
        counters, refused = np.split(words.astype(np.int64), [num_stores * num_shards * len(COUNTERS)])
        by_name = dict(zip(COUNTERS, counters.reshape(num_stores, num_shards, -1).transpose(2, 0, 1), strict=True))
        num_rows = by_name["num_allocated"] - by_name["free_end"] + by_name["free_begin"]
        unplaced, sightings = by_name["num_unplaced"].sum(axis=1), by_name["num_sightings"].max(axis=1)
        return cls(num_rows.max(axis=1).tolist(), unplaced.tolist(), sightings.tolist(), refused.tolist())


Summary = Callable[[], Seen]
"""Counters on their way to the host; the call waits until they have arrived."""


def keys_at_most(spec: StoreSpec, num_keys: Sequence[tuple[int, int]]) -> int:
    """Bounds the keys that one step may insert into one shard, given the table and the keys of each feature."""
    # A shard's share of hashed keys varies by its root: six of them on top are exceeded once in 10**9 times.
    if spec.num_shards == 1:
        return sum(keys for _, keys in num_keys)
    if spec.is_replicated:
        return spec.num_shards * sum(keys for _, keys in num_keys)
    pinned, spread = sum_pinned_and_spread(((spec.tables[number], keys) for number, keys in num_keys), spec.num_shards)
    return min(spec.num_shards * spread, math.ceil(spread + 6 * math.sqrt(spread))) + spec.num_shards * pinned


def keys_of_total(spec: StoreSpec, total: int) -> int:
    """Bounds the keys that one shard may insert of `total` keys of a whole batch, in any of its tables."""
    share = -(-total // spec.num_shards)
    return max(keys_at_most(spec, [(number, share)]) for number in range(len(spec.tables)))


@functools.partial(jax.jit, static_argnums=1)
def _summary(state_words: tuple[tuple[Array, ...], Array], shards: Shards) -> Array:
    """Copies counters of all stores and refused keys to an array that lives on when the state is donated."""
    counters, refused = state_words
    if shards.is_mesh:
        is_explicit = AxisType.Explicit in shards.mesh.axis_types
        gather = jax.sharding.reshard if is_explicit else jax.lax.with_sharding_constraint
        counters = [gather(words, shards.same) for words in counters]
    return jnp.concatenate([*counters, refused])


def _words_of(state: State) -> tuple[tuple[Array, ...], Array]:
    return tuple(store.counters for store in state.stores), state.num_refused


def read_counters(state: State, shards: Shards) -> Seen:
    """Reads the counters; waits for the steps under way."""
    if shards.num_processes > 1:
        return request_counters(state, shards)()
    counters, refused = _words_of(state)
    words = np.concatenate([np.asarray(array) for array in (*counters, refused)])
    return Seen.of(words, len(counters), shards.num_shards)


def is_at_rest(state: State, shards: Shards) -> bool:
    """Returns whether the counters are there already; several processes could see this at different calls."""
    return shards.num_processes == 1 and all(store.counters.is_ready() for store in state.stores)


def request_counters(state: State, shards: Shards) -> Summary:
    """Asks for the counters of all stores as they are after the steps under way."""
    arriving, num_stores = _summary(_words_of(state), shards), len(state.stores)
    arriving.copy_to_host_async()
    return functools.cache(lambda: Seen.of(np.asarray(arriving), num_stores, shards.num_shards))
