"""Scripts: calls on one store, each with its expected outputs and expected state. Imports nothing of jaxsok.

test_kernels.py runs them. `cases_<noun>.py` has the scripts of a noun; `case` and `cases` add them to `CASES`.
"""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from kernel_model import (
    BF16,
    F16,
    F32,
    MEAN,
    NO_ROW,
    NUM_PARTITIONS,
    PADDED,
    PADDING_KEY,
    REFUSED,
    SALT_HIGH,
    SALT_LOW,
    SQRTN,
    STOCHASTIC,
    SUM,
    SUM_OF_USES,
    U64,
    Batch,
    Store,
    as_keys,
    home_buckets,
    hyper_of,
    make_ragged,
    nearest,
    place_lines,
    plan_requests,
    plan_uses,
    single,
    sum_uses,
    use_factors,
    without_tables,
    words,
)
from strategies import CORNER_KEYS


@dataclasses.dataclass
class Step:
    """One call: its operands and attributes, its expected outputs, and the store's arrays after it."""

    op: str
    inputs: dict[str, Any]
    statics: dict[str, Any]
    want: dict[str, Any]
    state: dict[str, Any] | None
    meaning: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the oracle needs to judge the model."""


class Script:
    """A sequence of calls on one store; the model runs the same calls to give the expected results."""

    def __init__(self, seed: int = 0, **store):
        self.rng = np.random.default_rng(seed)
        self.store = Store(**store)
        self.initial: dict[str, Any] | None = None
        self.steps: list[Step] = []
        self.has_exact_probes = False
        """Whether the longest walk is the same in whatever order the keys of a call enter the index."""

    def _add(self, op, inputs, statics, want, **meaning) -> None:
        self.steps.append(Step(op, inputs, statics, want, self.store.arrays(), meaning))

    def _begin(self) -> None:
        if self.initial is None:
            self.initial = self.store.arrays()

    # The store before the first call ------------------------------------------------------------------------

    def fill(self, keys, tables=0) -> None:
        """Gives keys rows that no initializer makes, and optimizer state that no step starts with."""
        assert self.initial is None
        store, rng = self.store, self.rng
        keys = as_keys(keys)
        tables = np.broadcast_to(tables, keys.shape).astype(np.int64)
        row_ids, counts = store.find_or_insert(keys, tables, np.full(len(keys), True))
        assert counts[:, REFUSED].sum() == 0
        row_ids = np.unique(row_ids)
        store.rows[row_ids] = nearest(rng.normal(size=(len(row_ids), store.dim)), store.dtype)
        for state in store.states:
            state[row_ids] = rng.uniform(0.5, 2, (len(row_ids), state.shape[1])).astype(F32)

    # Calls --------------------------------------------------------------------------------------------------

    def find(self, keys, tables=0) -> None:
        self._begin()
        keys, tables = _pairs(keys, tables)
        want = {"row_ids": self.store.find(keys, tables)}
        self._add("find", {"keys": words(keys), "table_ids": tables.astype(np.uint32)}, {}, want)

    def find_or_insert(self, keys, tables=0, uses=None, step=None) -> np.ndarray:
        """`step`: with admission; `uses`: the uses of each key, for admission."""
        self._begin()
        store = self.store
        keys, tables = _pairs(keys, tables)
        is_known = tables < store.num_tables
        is_padding = keys == U64(PADDING_KEY)
        row_ids, counts = store.find_or_insert(keys, tables, is_known & ~is_padding, uses, step)
        counts[:, PADDED] = np.bincount(tables[is_known & is_padding], minlength=store.num_tables)
        inputs = {"keys": words(keys), "table_ids": tables.astype(np.uint32), "seed": store.seed}
        inputs |= {} if uses is None else {"uses": np.asarray(uses, np.uint32)}
        admission, statics = self._admission(step)
        self._add(
            "find_or_insert",
            {**inputs, **admission},
            {**self._tables(), **statics},
            {"row_ids": row_ids, "counts": counts},
        )
        return row_ids

    def forget(self, floors) -> None:
        """`floors`: by table the count from which a key no longer waits."""
        self._begin()
        self.store.forget(np.asarray(floors))
        self._add("forget", {"floors": np.asarray(floors, np.uint32)}, {}, {})

    def wait(self, num_buckets: int, floors, keys=(), counts=(), tables=0) -> None:
        """Adds waiting keys, and sets the number of buckets."""
        self._begin()
        keys, tables = _pairs(keys, tables)
        counts = np.asarray(counts, np.int64)
        entries = np.concatenate([words(keys), counts[:, None], tables[:, None]], axis=1).astype(np.uint32)
        pairs = zip(tables.tolist(), keys.tolist(), strict=True)
        more = {pair: num for pair, num in zip(pairs, counts.tolist(), strict=True) if pair[1] != PADDING_KEY}
        self.store.wait(num_buckets, np.asarray(floors), more)
        self._add("wait", {"entries": entries}, {"floors": tuple(floors), "num_buckets": num_buckets}, {})

    def _admission(self, step) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the additional operands and attributes, if a step is given."""
        if step is None:
            return {}, {}
        return {"step": np.array(step, np.uint32)}, {"refused": tuple(map(tuple, self.store.refused.tolist()))}

    def erase(self, keys, tables=0) -> None:
        """Releases the rows of keys; keys without a row are skipped."""
        keys, tables = _pairs(keys, tables)
        flags = np.zeros(self.store.capacity, np.uint8)
        row_ids = self.store.find(keys, tables)
        flags[row_ids[row_ids != NO_ROW]] = 1
        self.evict_release(flags, has_statistics=False, has_evicted=False)

    def scatter(self, row_ids, width: int, dtype) -> None:
        """Scatters any bits into an array of the store's slabs; equal row ids get equal values."""
        self._begin()
        row_ids, dtype = np.asarray(row_ids, np.uint32), np.dtype(dtype)
        size = (self.store.capacity + 1, width * dtype.itemsize)
        before, by_row = self.rng.integers(0, 120, (2, *size), np.uint8)  # no NaN in any dtype
        lines = by_row[np.minimum(row_ids, self.store.capacity)].view(dtype)
        before, by_row = (array[:-1].view(dtype) for array in (before, by_row))
        after = before.copy()
        rows = row_ids[row_ids < self.store.capacity]
        after[rows] = by_row[rows]
        ends = np.cumsum(self.store.slabs)[:-1]
        inputs = {"row_ids": row_ids, "lines": lines, "slabs": tuple(np.split(before, ends))}
        self._add("scatter", inputs, {}, {"slabs": tuple(np.split(after, ends))})

    def touch(self, row_ids, uses=None, clock=5) -> None:
        """`uses`: the uses of each position; None: one each. Statistics are inputs of the call, with any numbers."""
        self._begin()
        row_ids = np.asarray(row_ids, np.uint32)
        before = self._statistics()
        after = before.copy()
        is_row = row_ids < self.store.capacity
        rows = row_ids[is_row]
        after[rows, 0] = clock
        uses = None if uses is None else np.broadcast_to(np.asarray(uses, np.uint32), row_ids.shape)
        total = after[:, 1].astype(np.int64)
        np.add.at(total, rows, 1 if uses is None else uses[is_row].astype(np.int64))
        after[:, 1] = np.minimum(total, 2**32 - 1)
        ends = np.cumsum(self.store.slabs)[:-1]
        slabs = {name: tuple(np.split(array, ends)) for name, array in (("before", before), ("after", after))}
        inputs = {"row_ids": row_ids, "uses": np.zeros(0, np.uint32) if uses is None else uses}
        inputs |= {"clock": np.array(clock, np.uint32), "statistics": slabs["before"]}
        self._add("touch", inputs, {}, {"statistics": slabs["after"]})

    def _statistics(self) -> np.ndarray:
        """Returns any numbers, with some frequencies close to their maximum."""
        lines = self.rng.integers(0, 2**32, (self.store.capacity, 2), np.uint32)
        lines[:, 1] >>= 8
        lines[::7, 1] = 2**32 - 1 - np.arange(len(lines[::7])) % 3
        return lines

    def evict_select(self, scores: Sequence[np.ndarray], num_kept=0, table=-1, mask=None) -> np.ndarray:
        self._begin()
        store = self.store
        scores = tuple(np.asarray(word, np.uint32) for word in scores)
        flags = store.select(scores, num_kept, table, mask)
        owners = [pair[0] for pair, row_id in store.row_of.items() if flags[row_id]]
        num_selected = np.bincount(np.array(owners, np.int64), minlength=store.num_tables).astype(np.uint32)
        ends = np.cumsum(store.slabs)[:-1]
        inputs = {
            "num_kept": np.array(num_kept, np.uint32),
            "scores": tuple(tuple(np.split(word, ends)) for word in scores),
            "mask": () if mask is None else tuple(np.split(np.asarray(mask, np.uint8), ends)),
        }
        statics = {"num_tables": store.num_tables, "table": table}
        self._add("evict_select", inputs, statics, {"flags": flags, "num_selected": num_selected})
        return flags

    def evict_release(self, flags: np.ndarray, *, has_statistics=True, has_evicted=True) -> None:
        self._begin()
        store = self.store
        ends = np.cumsum(store.slabs)[:-1]
        statistics = self.rng.integers(0, 2**32, (store.capacity, 2), dtype=np.uint32)
        evicted = self.rng.integers(0, 2**32, store.num_tables, dtype=np.uint32)
        is_used = np.isin(np.arange(store.capacity), list(store.row_of.values()))
        inputs = {
            "flags": np.asarray(flags, np.uint8),
            "statistics": tuple(np.split(statistics, ends)) if has_statistics else (),
            "table_evicted": (evicted,) if has_evicted else (),
        }
        num_released = store.release(flags)
        statistics = np.where((is_used & (np.asarray(flags) != 0))[:, None], np.uint32(0), statistics)
        want = {
            "num_released": num_released,
            "statistics": tuple(np.split(statistics, ends)) if has_statistics else (),
            "table_evicted": (evicted + num_released,) if has_evicted else (),
        }
        self._add("evict_release", inputs, {"initial": store.initial}, want)

    def rebuild(self, num_buckets: int, salt: int | None = None) -> None:
        self._begin()
        self.store.rebuild(num_buckets, salt)
        inputs = {"salt": self.store.counters[[SALT_LOW, SALT_HIGH]]}
        self._add("rebuild", inputs, {"num_buckets": num_buckets}, {})

    def plan_requests(self, batch: Batch, num_shards: int, owners=None, on: dict[int, int] | None = None) -> None:
        """Plans in both orders, with room for all or half.

        `owners`: by partition, by default equal ranges; `on`: tables pinned to one shard.
        """
        self._begin()
        lines, owners = place_lines(self.store.tables, on), _owners(num_shards, owners)
        starts = plan_requests(batch, lines, owners, num_shards, by_hash=False, send_capacity=0)["starts"]
        most = max(1, int(np.diff(starts).max()))
        for by_hash, send_capacity in ((False, most), (False, max(1, most // 2)), (False, 0), (True, 0)):
            how = {"num_shards": num_shards, "by_hash": by_hash, "send_capacity": send_capacity}
            statics = {**self._tables(lines), **_features(batch), **how}
            want = plan_requests(batch, lines, owners, **how)
            self._add("plan_requests", {**batch.operands(), "owners": owners}, statics, want)

    def plan_uses(self, batch: Batch, num_shards: int, owners=None, on: dict[int, int] | None = None) -> None:
        """Takes the parameters of `plan_requests`; makes uses with their tables and weights, and keys alone."""
        self._begin()
        lines, owners = place_lines(self.store.tables, on), _owners(num_shards, owners)
        statics = {**self._tables(lines), **_features(batch), "num_shards": num_shards}
        statics |= {"num_bags": sum(f.num_bags for f in batch.features)}
        for num_words in (4, 2):
            want = plan_uses(batch, lines, owners, num_shards, num_words)
            of_words = statics | {"num_words": num_words}
            self._add("plan_uses", {**batch.operands(), "owners": owners}, of_words, want)

    def gather(self, keys, tables, row_ids, uses=1, unknown_zeros: Sequence[int] = ()) -> None:
        """Gathers for a lookup and for find; for a lookup also as numbers of other dtypes."""
        self._begin()
        store = self.store
        keys, tables = _pairs(keys, tables)
        row_ids = np.broadcast_to(np.asarray(row_ids, np.int64), keys.shape).astype(np.uint32)
        uses = np.broadcast_to(np.asarray(uses, np.int64), keys.shape)
        requests = np.concatenate([words(keys), tables[:, None], uses[:, None]], axis=1).astype(np.uint32)
        lines = place_lines(store.tables, None, unknown_zeros)
        is_real = (keys != U64(PADDING_KEY)) & (tables < store.num_tables)
        is_known = is_real & (row_ids < store.capacity)
        is_absent = is_real & ~is_known
        rows = np.zeros((len(keys), store.dim), store.dtype)
        rows[is_known] = store.rows[row_ids[is_known]]
        rows[is_absent] = store.initial_rows(keys[is_absent], tables[is_absent], lines)
        num_absent = np.zeros(store.num_tables, np.int32)
        np.add.at(num_absent, tables[is_absent], uses[is_absent])
        inputs = {"seed": store.seed, "requests": requests, "row_ids": row_ids}
        for is_find in (False, True):
            if is_find:
                rows = rows.copy()
                rows[is_absent & np.isin(tables, unknown_zeros)] = 0
            others = [] if is_find else [dtype for dtype in (np.dtype(F32), BF16) if dtype != store.dtype]
            for dtype in (store.dtype, *others):
                statics = {**self._tables(lines), "is_find": is_find, "dtype": dtype.name}
                converted = rows if dtype == store.dtype else nearest(rows, dtype)
                self._add("gather", inputs, statics, {"rows": converted, "num_absent": num_absent})

    def lookup(self, batch: Batch, step=None, clock=None) -> np.ndarray:
        """`step`: with admission; `clock`: with statistics, which are inputs of the call, with any numbers."""
        self._begin()
        embeddings, row_ids, counts = self.store.lookup(batch, step)
        admission, more = self._admission(step)
        inputs = {**batch.operands(), "seed": self.store.seed, **admission}
        statics = {**self._tables(), **_features(batch), **self._embeddings(batch), **more}
        want = {"row_ids": row_ids, "counts": counts, "digest": batch.digest(), "embeddings": embeddings}
        if clock is not None:
            ends = np.cumsum(self.store.slabs)[:-1]
            before = self._statistics()
            after = self.store.note_lookup(batch, before, clock)
            inputs |= {"clock": np.array(clock, np.uint32), "statistics": tuple(np.split(before, ends))}
            want["statistics"] = tuple(np.split(after, ends))
        self._add("lookup", inputs, statics, want, batch=batch, values=self.store.row_values(batch, row_ids))
        return row_ids

    def lookup_find(self, batch: Batch) -> None:
        self._begin()
        embeddings, counts = self.store.lookup_find(batch)
        inputs = {**batch.operands(), "seed": self.store.seed}
        statics = {**self._tables(), **_features(batch), **self._embeddings(batch)}
        self._add("lookup_find", inputs, statics, {"counts": counts, "embeddings": embeddings})

    def lookup_planned(
        self, batch: Batch, row_ids: np.ndarray, *, unknown_zeros: Sequence[int] | None = None, num_sharing=1
    ) -> None:
        """`unknown_zeros`: each key has an explicit table, and these tables give zeros for keys without a row.

        `num_sharing`: so many neighbouring features share one array, in equal parts.
        """
        self._begin()
        store = self.store
        lines = None if unknown_zeros is None else place_lines(store.refused, None, unknown_zeros)
        embeddings, counts = store.lookup_planned(batch, row_ids, lines)
        inputs = {**batch.operands(), "seed": store.seed, "row_ids": row_ids}
        passed = batch
        if lines is not None:
            inputs["table_ids"] = batch.tables.astype(np.uint32)
            passed = without_tables(batch)
        embeddings = _share(embeddings, num_sharing)
        statics = {**self._tables(store.refused if lines is None else lines), **_features(passed)}
        statics |= {**self._embeddings(batch), "shapes": tuple(rows.shape for rows in embeddings)}
        self._add("lookup_planned", inputs, statics, {"counts": counts, "embeddings": embeddings})

    def update(
        self,
        batch: Batch,
        row_ids,
        *,
        gradients=None,
        is_live=None,
        row_gradient=SUM_OF_USES,
        learning_rate=0.5,
        rounding=STOCHASTIC,
        num_steps=5,
        tables_apart=False,
        num_sharing=1,
    ) -> None:
        """`tables_apart`: each key has an explicit table, which the features do not give.

        `num_sharing`: as for lookup_planned, for the gradients.
        """
        self._begin()
        store = self.store
        if gradients is None:
            gradients = [self.normal(f.num_bags, store.dim).astype(store.embedding_dtype) for f in batch.features]
        if is_live is None:
            is_live = [True] * (1 + max(f.plan for f in batch.features))
        is_live = np.array(is_live)
        hyper = hyper_of(store.optimizer, learning_rate)
        before = (store.rows.copy(), [state.copy() for state in store.states])
        nonfinite, stale = store.update(batch, row_ids, gradients, is_live, hyper, row_gradient, rounding, num_steps)
        inputs = {**batch.operands(), "row_ids": row_ids, "hyper": hyper}
        inputs["gradients"] = _share(gradients, num_sharing)
        inputs |= {"seed": store.seed, "step": np.array(num_steps, np.uint32), "table_ids": np.zeros(0, np.uint32)}
        passed = batch
        if tables_apart:
            inputs["table_ids"] = batch.tables.astype(np.uint32)
            passed = without_tables(batch)
        statics = {
            **self._tables(),
            **_features(passed),
            "rounding": rounding,
            "optimizer": store.optimizer,
            "row_gradient": row_gradient,
        }
        want = {"num_nonfinite": nonfinite, "num_stale": stale}
        meaning = {"batch": batch, "before": before, "learning_rate": learning_rate}
        self._add("update", {**inputs, "is_live": is_live}, statics, want, **meaning)

    def transpose(self, batch: Batch, inverse: np.ndarray, num_unique: int, gradients=None, dtype=F32) -> None:
        """Runs combine_transpose of any features; their keys are not read."""
        self._begin()
        dim = self.store.dim
        if gradients is None:
            gradients = [self.normal(f.num_bags, dim) for f in batch.features]
        present = (inverse >= 0) & (inverse < num_unique)
        used_rows, terms = [np.zeros(0, np.int64)], [np.zeros((0, dim), F32)]
        for f, feature in enumerate(batch.features):
            part = batch.part(f)
            factors, left_out = use_factors(feature, present[part])
            uses = np.flatnonzero(~left_out)
            used_rows.append(inverse[part][uses].astype(np.int64))
            terms.append(factors[uses, None] * gradients[f][feature.bags()[uses]])
        used, sums, counts = sum_uses(np.concatenate(used_rows), np.concatenate(terms))
        row_gradients, num_uses = np.zeros((num_unique, dim), F32), np.zeros(num_unique, np.int32)
        row_gradients[used], num_uses[used] = sums, counts
        operands = {name: array for name, array in batch.operands().items() if name != "keys"}
        inputs = {**operands, "inverse": inverse.astype(np.int32), "gradients": gradients}
        statics = {**_features(batch), "num_unique": num_unique, "dtype": np.dtype(dtype).name}
        want = {"row_gradients": nearest(row_gradients, dtype), "num_uses": num_uses}
        self._add("combine_transpose", inputs, statics, want)

    def _embeddings(self, batch: Batch) -> dict[str, Any]:
        return {"shapes": batch.shapes(self.store.dim), "embedding_dtype": self.store.embedding_dtype.name}

    def _tables(self, lines: np.ndarray | None = None) -> dict[str, Any]:
        return {"tables": tuple(map(tuple, (self.store.tables if lines is None else lines).tolist()))}

    # Numbers ------------------------------------------------------------------------------------------------

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.normal(size=shape).astype(F32)

    def distinct(self, num: int, low: int = 1 << 40) -> np.ndarray:
        """Returns keys that no other part of a script uses, if it has another `low`."""
        return (U64(low) + self.rng.permutation(4 * num + 4)[:num].astype(np.uint64) * U64(0x100000001)).astype(U64)

    def mix_keys(self, num: int, present) -> np.ndarray:
        """Returns keys with rows and new keys, some repeated, with padding."""
        rng = self.rng
        pool = np.concatenate([as_keys(present), self.distinct(num // 3 + 1)])
        keys = rng.choice(pool, num) if num else np.zeros(0, np.uint64)
        keys[rng.random(num) < 0.07] = PADDING_KEY
        return keys

    def weights(self, num: int) -> np.ndarray:
        return self.rng.uniform(-0.5, 2, num).astype(F32)

    def keys_of_homes(self, buckets, num: int, table: int = 0) -> np.ndarray:
        """Returns the first keys whose walk begins in one of these buckets, in equal parts."""
        found = []
        for bucket in buckets:
            part: list[np.ndarray] = []
            start = 0
            while sum(map(len, part)) < -(-num // len(buckets)):
                block = np.arange(start, start + (1 << 19), dtype=np.uint64)
                homes = home_buckets(block, np.full(len(block), table), self.store.salt, self.store.num_buckets)
                part.append(block[homes == U64(bucket)])
                start += len(block)
            found.append(np.concatenate(part)[: -(-num // len(buckets))])
        return np.concatenate(found)[:num]


def _pairs(keys, tables) -> tuple[np.ndarray, np.ndarray]:
    keys = as_keys(keys)
    return keys, np.broadcast_to(np.asarray(tables, np.int64), keys.shape)


def _owners(num_shards: int, owners=None) -> np.ndarray:
    """Returns the owner of each partition."""
    if owners is None:
        owners = np.arange(NUM_PARTITIONS) * num_shards // NUM_PARTITIONS
    return np.broadcast_to(np.asarray(owners, np.uint32), NUM_PARTITIONS)


def _share(arrays: list[np.ndarray], num_sharing: int) -> list[np.ndarray]:
    """Joins the arrays of so many neighbouring features."""
    if num_sharing == 1:
        return arrays
    groups = [arrays[first : first + num_sharing] for first in range(0, len(arrays), num_sharing)]
    assert all(len({len(part) for part in group}) == 1 and len(group) == num_sharing for group in groups)
    return [np.concatenate(group) for group in groups]


def _features(batch: Batch) -> dict[str, Any]:
    return {"features": batch.words(), "num_tiles": batch.num_tiles}


CASES: dict[str, Callable[[], Script]] = {}
"""Scripts by name: the function that makes one, then its arguments. Names with "small" run under compute-sanitizer."""
Keys = Sequence[int] | np.ndarray


def case(*arguments: Any) -> Callable:
    """Registers a function that makes a script."""

    def register(build: Callable[..., Script]) -> Callable[..., Script]:
        def script() -> Script:
            with np.errstate(all="ignore"):  # some cases contain infinities and NaN
                return build(*arguments)

        named = zip(inspect.signature(build).parameters, arguments, strict=False)
        parts = [f"{name}_{value}" if isinstance(value, int) else str(value) for name, value in named]
        name = "-".join([build.__name__, *parts])
        assert name not in CASES
        CASES[name] = script
        return build

    return register


def cases(*lists: Any) -> Callable:
    """Applies `case` to each of the arguments, or tuples of arguments."""

    def register(build: Callable[..., Script]) -> Callable[..., Script]:
        for arguments in lists:
            case(*(arguments if isinstance(arguments, tuple) else (arguments,)))(build)
        return build

    return register


SIZES = (0, 1, 31, 32, 33, 255, 256, 257, 1000, 5000)


# Every shape of DispatchShape: rows of 4-float vectors and of single floats, 1 to 32 lanes, 1 to 32 pieces per lane.
DIMS = (1, 2, 3, 4, 7, 8, 12, 13, 16, 30, 32, 33, 64, 66, 100, 128, 200, 201, 256, 301, 400, 513, 1024)


SLABS = ((312,), (5, 307), (5, 7, 300))


HALVES = {"bfloat16": BF16, "float16": F16}


def table_store(num_keys: int, number: int, seed: int, **more) -> Script:
    """Returns a store with slabs, tables, dims and optimizers in turn."""
    slabs = SLABS[number % 3] if num_keys <= 257 else ((5, 2507), (5, 7, 2500), (2512,))[number % 3]
    parameters = {"num_tables": (1, 3, 70)[number % 3], "dim": (8, 3, 4)[number % 3], "optimizer": (number + 3) % 4}
    return Script(seed=seed, slabs=slabs, **{**parameters, **more})


def corner_keys(script: Script, num: int) -> tuple[Keys, Keys]:
    """Returns 0, the sign bit and twins, some of them present."""
    return CORNER_KEYS[::2], script.rng.choice(as_keys(CORNER_KEYS), num)


KINDS: dict[str, Callable[[Script, int], tuple[Keys, Keys]]] = {
    "new": lambda s, n: ([], s.distinct(n)),
    "present": lambda s, n: (pool := s.distinct(n * 2 // 3), s.rng.choice(pool, n)),
    "half_present": lambda s, n: (
        pool := s.distinct(n // 2),
        s.rng.permutation(np.r_[pool, s.distinct(n - n // 2, 7)]),
    ),
    "one_new": lambda s, n: ([1, 2, 3], np.full(n, 2**63, np.uint64)),
    "one_present": lambda s, n: ([1, 2**63, 3], np.full(n, 2**63, np.uint64)),
    "high_words": lambda s, n: ([5, 5 + 2**32], s.rng.integers(0, n, n).astype(U64) << U64(32) | U64(5)),
    "low_words": lambda s, n: ([5 << 32], s.rng.integers(0, n, n).astype(U64) | U64(5 << 32)),
    "corners": corner_keys,
    "padding_between": lambda s, n: ([7, 8], np.where(np.arange(n) % 2, U64(PADDING_KEY), s.distinct(n))),
    "only_padding": lambda s, n: ([7, 8], np.full(n, PADDING_KEY, np.uint64)),
    "in_all_tables": lambda s, n: (range(50), s.rng.integers(0, 100, n)),
    "of_one_home": lambda s, n: ([7, 8], s.rng.choice(s.keys_of_homes([5], 200), n)),
    "of_last_homes": lambda s, n: (
        (last := [s.store.num_buckets - 2, s.store.num_buckets - 1])
        and (s.keys_of_homes(last, 30), s.rng.choice(s.keys_of_homes(last, 200), n))
    ),
}


def batch_with_loose_ends(keys) -> Batch:
    """Returns a batch with positions before the first bag, after the last bag, and without any bag."""
    return Batch(
        make_ragged(keys(64, 5, 40), 0, MEAN, [5, 10, 10, 33, 40]),
        single(keys(5, 0, 5), 1),
        make_ragged(keys(64, 0, 1), 1, SUM, [0, 1]),
        make_ragged(keys(64, 64, 64), 2, SQRTN, [64]),
        make_ragged(keys(64, 60, 64), 2, SUM, [60, 64, 64], np.full(64, 0.5, F32)),
        make_ragged(keys(300, 7, 290), 0, MEAN, np.r_[np.full(300, 7), 290]),
    )


def mostly_two(script: Script, keys: np.ndarray, num: int) -> np.ndarray:
    """Returns `num` positions: one key hot, one warm, the others with a few uses each."""
    found = np.where(np.arange(num) % 8 == 7, script.rng.choice(keys[2:], num), keys[0])
    found[::33] = keys[1]
    return found


def gather_mixed(script: Script, num: int, unknown_zeros: Sequence[int] = ()) -> Script:
    """Requests rows and absent rows, padding with rows and without, and unknown tables, in any order."""
    store, rng = script.store, script.rng
    script.fill(range(60), np.arange(60) % store.num_tables)
    keys = np.where(rng.random(num) < 0.2, U64(PADDING_KEY), rng.integers(0, 2**63, num).astype(np.uint64))
    tables = np.where(rng.random(num) < 0.05, rng.choice([store.num_tables, 2**24, 2**32 - 1], num), 0)
    tables = np.where(tables == 0, rng.integers(0, store.num_tables, num), tables)
    absent = rng.choice([NO_ROW, NO_ROW - 1, store.capacity, 2**31], num)
    row_ids = np.where(rng.random(num) < 0.3, absent, rng.integers(0, store.capacity, num))
    uses = np.where(rng.random(num) < 0.01, 10**6, rng.integers(0, 9, num))
    script.gather(keys, tables, row_ids, uses, unknown_zeros)
    return script
