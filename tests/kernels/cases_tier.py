"""Cases of tiers: rows in host memory that move into a cache, change and move back. See kernel_scripts.py."""

import itertools
from collections.abc import Callable

import numpy as np
from kernel_model import ADAGRAD, ADAM, EMPTY, F32, NO_ROW, ROWWISE_ADAGRAD, SGD, Store, from_words, nearest, words
from kernel_scripts import HALVES, SLABS, Script, case, cases

FRESH, IN_HOST = 2**32 - 1, 2**32 - 2
CLOCK, HITS, FETCHED, WRITTEN, TICKET, AHEAD, FORESEEN, WINDOW = range(8)
HISTORY, SINGLE_IN_HOST = 3 * 2**30, 2**29  # of a place: in host memory, with the mean use; the mean of one use
ONE_USE = 5  # calls
CLOCK_AT_FIRST = 60_000
TIMES = 2**28
TILE = 2**13
SINGLE, FIRST_SINGLE, FREE = 2**31, 864, 1024  # of a priority; ages
MARK = 2**29


def bin_of(age: int, per_octave: int) -> int:
    """Returns the bin of an age: twice as wide in each octave."""
    width = 1
    while age >= 2 * per_octave * width:
        width *= 2
    return (width.bit_length() - 1) * per_octave + age // width


def time_of(clock: int) -> int:
    return int(clock) % TIMES + 1


def since(time: int, now: int) -> int:
    return (int(now) - int(time)) % TIMES


def age_of_use(age: int) -> int:
    return min(max(bin_of(age, 32), 1), FIRST_SINGLE - 1)


def is_free_or_marked(priority: int) -> bool:
    return priority == 0 or bool(priority & MARK)


def mean_after(mean: int, is_single: bool, now: int) -> int:
    """Returns the mean use after a use that begins now: half of it counts, but the second use tells only a distance."""
    return mean if is_single else time_of(now - since(mean, now) // 2 - 1)


def age_of(priority: int, now: int) -> int:
    """Returns the age of a slot that the call does not use."""
    if is_free_or_marked(priority):
        return FREE
    if priority < SINGLE:
        return age_of_use(since(priority, now))
    return min(FIRST_SINGLE + bin_of(since(priority - SINGLE, now), 8), FREE - 1)


class TieredStore(Store):
    """A store whose rows are in host memory: `rows` and `states` are the content of that memory."""

    def __init__(self, *, num_slots: int, num_lines: int | None = None, **store):
        """`num_lines`: the length of the cache's arrays, if some of it is unused."""
        super().__init__(**store)
        self.num_slots, self.num_lines = num_slots, num_lines or max(1, num_slots)
        self.places = np.full(self.capacity, FRESH, np.uint32)
        self.cached_rows = np.full((self.num_lines, self.dim), -7, self.dtype)
        self.cached_states = [np.full((self.num_lines, state.shape[1]), F32(-8)) for state in self.states]
        self.owners = np.full((self.num_lines, 4), EMPTY)
        self.last_use, self.priority = np.zeros((2, self.num_lines), np.uint32)
        self.foreseen = np.zeros((self.num_lines, 4), np.uint32)
        self.tier_counters = np.zeros(8, np.uint32)

    def arrays(self) -> dict:
        """Copies all arrays; host memory as bytes, with zeros between the numbers of rows, in the order of row ids.

        Records of rows in the cache, and of fresh ones, are zeros, too: their content is undefined. Zeros stand for the
        homes, since any is right that gives each row a record.
        """
        ends = np.cumsum(self.slabs)[:-1]
        tier = {
            "places": tuple(part.copy() for part in np.split(self.places[:, None], ends)),
            "homes": tuple(np.split(np.zeros((self.capacity, 2), np.uint32), ends)),
            "rows": self.cached_rows.copy(),
            "states": tuple(state.copy() for state in self.cached_states),
            "owners": self.owners.copy(),
            "last_use": self.last_use.copy(),
            "priority": self.priority.copy(),
            "foreseen": self.foreseen.copy(),
            "counters": self.tier_counters.copy(),
            "order": np.zeros(len(self.counters), np.uint32),
        }
        is_in_host = (self.places >= HISTORY) & (self.places != FRESH)
        host = tuple(np.split(np.where(is_in_host[:, None], self._host(), np.uint8(0)), ends))
        return super().arrays() | {"rows": host, "states": (), "tier": (tier,)}

    def _host(self) -> np.ndarray:
        def lines(array: np.ndarray) -> np.ndarray:
            return np.ascontiguousarray(array).view(np.uint8).reshape(self.capacity, -1)

        rows = lines(self.rows)
        parts = [rows, np.zeros((self.capacity, -rows.shape[1] % 4), np.uint8), *map(lines, self.states)]
        size = sum(part.shape[1] for part in parts)
        return np.concatenate([*parts, np.zeros((self.capacity, -size % 16), np.uint8)], axis=1)

    def host(self) -> tuple[np.ndarray, ...]:
        """Returns host memory with the records of all rows."""
        return tuple(np.split(self._host(), np.cumsum(self.slabs)[:-1]))

    def is_number(self) -> tuple[int, ...]:
        """Returns which bytes of a row's record in host memory are its numbers."""
        row_bytes = self.dim * self.dtype.itemsize
        state_bytes = 4 * sum(state.shape[1] for state in self.states)
        begin = -(-row_bytes // 4) * 4
        return tuple(int(at < row_bytes or begin <= at < begin + state_bytes) for at in range(self._host().shape[1]))

    def values(self) -> dict[str, np.ndarray]:
        """Returns the numbers of all rows in use, wherever they are, by row id."""
        columns = {"rows": self.rows.copy()} | {f"states.{k}": state.copy() for k, state in enumerate(self.states)}
        cached = self.cached_rows, *self.cached_states
        for row_id in self.row_of.values():
            slot = self.places[row_id]
            numbers = [array[slot] for array in cached] if slot < HISTORY else self._numbers(row_id)
            for column, value in zip(columns.values(), numbers, strict=True):
                column[row_id] = value
        return columns

    def bring(self, row_ids: np.ndarray) -> dict:
        """Does what `LaunchBring` states, row by row."""
        counters = self.tier_counters
        slot_of, missed, now = self._find(row_ids)
        counters[[HITS]] += np.uint32(len(slot_of))  # an array, so that it wraps
        counters[FETCHED] += sum(self.places[row_id] != FRESH for row_id in missed)
        pairs = {}
        if counters[TICKET]:
            for row_id, slot, priority, _ in self.foreseen[: counters[FORESEEN]].tolist():
                if row_id in missed and is_free_or_marked(int(self.priority[slot])):
                    pairs[row_id] = slot, priority
        rest = [row_id for row_id in missed if row_id not in pairs]
        taken = {*slot_of.values(), *(slot for slot, _ in pairs.values())}
        victims = self._victims(taken, len(rest), len(row_ids), now)
        kept, staged = rest[: len(victims)], rest[len(victims) :]
        pairs |= {row_id: (slot, self._priority(row_id, now)) for row_id, slot in zip(kept, victims, strict=True)}
        for row_id, (slot, priority) in pairs.items():
            numbers = self._numbers(row_id)
            self._leave(slot)
            for array, number in zip((self.cached_rows, *self.cached_states), numbers, strict=True):
                array[slot] = number
            self.owners[slot] = *self.records[row_id, :3], row_id
            slot_of[row_id] = self.places[row_id] = slot
            self.last_use[slot], self.priority[slot] = now, priority
        counters[TICKET] *= not missed
        slot_of |= {row_id: self.num_lines + at for at, row_id in enumerate(staged)}
        # Rows that are not in use give 0, which counts a stale plan's uses.
        none = np.where(row_ids < self.capacity, 0, NO_ROW).tolist()
        slots = np.array([slot_of.get(*pair) for pair in zip(row_ids.tolist(), none, strict=True)], np.uint32)
        return {"slots": slots, **self._stage(dict(enumerate(staged)), max(0, len(row_ids) - self.num_slots))}

    def bring_ahead(self, row_ids: np.ndarray) -> None:
        """Does what `LaunchBringAhead` states: no place changes, but slots are used, listed and marked."""
        slot_of, missed, now = self._find(row_ids)
        self.tier_counters[[TICKET, FORESEEN]] = self.tier_counters[CLOCK] * bool(missed), 0
        self.priority &= ~np.uint32(MARK)
        if not missed:
            return
        recent = np.flatnonzero((self.last_use != 0) & ((now - self.last_use.astype(int)) % TIMES <= ONE_USE)).tolist()
        victims = self._victims({*slot_of.values(), *recent}, len(missed), len(row_ids), now)
        for at, (row_id, slot) in enumerate(zip(missed, victims, strict=False)):
            self.foreseen[at] = row_id, slot, self._priority(row_id, now), self.places[row_id] == FRESH
        for slot in victims:
            if self.owners[slot, 3] != NO_ROW:
                self.priority[slot] |= np.uint32(MARK)
        self.tier_counters[FORESEEN] = len(victims)

    def _find(self, row_ids: np.ndarray) -> tuple[dict[int, int], list[int], int]:
        """Begins a call; returns the slots of its rows, which count as used, the rows without one, and the time."""
        self.tier_counters[[CLOCK]] += np.uint32(1)  # an array, so that it wraps
        now = time_of(self.tier_counters[CLOCK])
        wanted = dict.fromkeys(filter(self._is_row, row_ids.tolist()))
        slot_of = {row_id: int(self.places[row_id]) for row_id in wanted if self.places[row_id] < HISTORY}
        for slot in slot_of.values():
            if since(self.last_use[slot], now) >= ONE_USE:
                priority = int(self.priority[slot])
                self.last_use[slot], self.priority[slot] = now, mean_after(priority % MARK, priority >= SINGLE, now)
        return slot_of, [row_id for row_id in wanted if row_id not in slot_of], now

    def _priority(self, row_id: int, now: int) -> int:
        """Returns the priority that a row gets when it comes."""
        place = int(self.places[row_id])
        if place >= IN_HOST:
            return SINGLE + now
        return mean_after(place % SINGLE_IN_HOST, bool(place & SINGLE_IN_HOST), now)

    def _is_row(self, row_id: int) -> bool:
        return row_id < self.capacity and bool((self.records[row_id, :2] != EMPTY).any())

    def peek(self, row_ids: np.ndarray) -> dict:
        """Does what `LaunchPeek` states: each position that is not in the cache is staged separately."""
        slots, lines = np.full(len(row_ids), NO_ROW, np.uint32), {}
        for i, row_id in enumerate(row_ids.tolist()):
            if self._is_row(row_id):
                slots[i] = self.places[row_id] if self.places[row_id] < HISTORY else self.num_lines + i
                lines |= {} if self.places[row_id] < HISTORY else {i: row_id}
        return {"slots": slots, **self._stage(lines, len(row_ids))}

    def _stage(self, lines: dict[int, int], room: int) -> dict:
        """Returns the staged rows, by their staged position."""
        rows, owners = np.zeros((room, self.dim), self.dtype), np.full((room, 4), EMPTY)
        states = tuple(np.zeros((room, state.shape[1]), F32) for state in self.states)
        for at, row_id in lines.items():
            for array, number in zip((rows, *states), self._numbers(row_id), strict=True):
                array[at] = number
            owners[at] = *self.records[row_id, :3], row_id
        return {"staged_rows": rows, "staged_states": states, "staged_owners": owners}

    def _victims(self, used: set[int], num: int, num_keys: int, now: int) -> list[int]:
        """Returns the slots to replace, in the order of the window."""
        if num == 0:
            return []
        all_tiles, tiles = -(-self.num_slots // TILE), max(32, -(-4 * num_keys // TILE))
        first = int(self.tier_counters[WINDOW]) % all_tiles if tiles < all_tiles else 0
        order = (np.arange(min(tiles, all_tiles) * TILE) + first * TILE) % (all_tiles * TILE)
        window = [slot for slot in order.tolist() if slot < self.num_slots and slot not in used]
        ages = {slot: age_of(int(self.priority[slot]), now) for slot in window}
        slots = sorted(window, key=lambda slot: -ages[slot])[:num]
        if slots:
            self.tier_counters[WINDOW] = (first + min(tiles, all_tiles)) % all_tiles
        chosen = set(slots)
        return [slot for slot in window if slot in chosen]

    def _numbers(self, row_id: int) -> list:
        """Returns the row and its state for a row that is not in the cache."""
        if self.places[row_id] != FRESH:
            return [self.rows[row_id], *(state[row_id] for state in self.states)]
        key = from_words(self.records[None, row_id, :2])
        return [self.initial_rows(key, self.records[None, row_id, 2].astype(np.int64))[0], *self.initial]

    def _leave(self, slot: int) -> None:
        if (row_id := self.owners[slot, 3]) != NO_ROW:
            self.write(row_id, self.cached_rows[slot], *(state[slot] for state in self.cached_states))
            priority = int(self.priority[slot])
            self.places[row_id] = HISTORY + (SINGLE_IN_HOST if priority >= SINGLE else 0) + priority % MARK
            self.tier_counters[WRITTEN] += 1

    def write(self, row_id: int, *numbers: np.ndarray) -> None:
        """Writes a row and its state to host memory."""
        for array, number in zip((self.rows, *self.states), numbers, strict=True):
            array[row_id] = number


class TierScript(Script):
    """A script of calls on a tiered store."""

    store: TieredStore

    def __init__(self, seed: int = 0, **store):
        super().__init__(seed)
        self.store = TieredStore(**store)
        self.last: dict = {}

    def begin(
        self, num_rows: int, fresh=0.3, cached=0.5, free=0.2, ages=6, clock: int = CLOCK_AT_FIRST, is_indexed=True
    ) -> np.ndarray:
        """Makes rows in use, some new, some in the cache; returns their ids. `free` is a share of the slots.

        Where many rows are not to be found by key, their keys need not be in the index, which takes the model long.
        """
        store, rng = self.store, self.rng
        keys, tables = self.distinct(num_rows), rng.integers(0, store.num_tables, num_rows)
        if is_indexed:
            self.fill(keys, tables)
        else:
            store.records[:num_rows, :2], store.records[:num_rows, 2] = words(keys), tables
            store.rows[:num_rows] = nearest(rng.normal(size=(num_rows, store.dim)), store.dtype)
        row_ids = np.arange(num_rows, dtype=np.uint32)
        now = time_of(clock)
        times = (now - 1 - rng.integers(0, 8 * ages, num_rows)) % TIMES + 1
        times += np.where(rng.random(num_rows) < 0.5, SINGLE_IN_HOST, 0)
        places = np.where(rng.random(num_rows) < 0.5, HISTORY + times, IN_HOST)
        store.places[:num_rows] = np.where(rng.random(num_rows) < fresh, FRESH, places)
        store.tier_counters[:] = clock, 2**32 - 3, 5, 6, 0, 0, 0, 0  # the hits wrap
        slots = rng.permutation(np.flatnonzero(rng.random(store.num_slots) >= free))
        rows = rng.permutation(row_ids)[: min(len(slots), int(cached * num_rows))]
        slots = slots[: len(rows)]
        store.places[rows] = slots
        store.owners[slots, :3], store.owners[slots, 3] = store.records[rows, :3], rows
        last = (now - 1 - rng.integers(0, ages, len(slots))) % TIMES + 1
        before = (last - 1 - rng.integers(0, 2 * ages, len(slots))) % TIMES + 1
        store.last_use[slots] = last
        store.priority[slots] = np.where(rng.random(len(slots)) < 0.5, SINGLE + last, before)
        store.cached_rows[slots], *states = self._any_numbers(len(slots))
        for array, numbers in zip(store.cached_states, states, strict=True):
            array[slots] = numbers
        return row_ids

    def _any_numbers(self, num: int) -> list[np.ndarray]:
        """Returns rows and states; NaN, infinity and negative zero are moved like other numbers."""
        store = self.store
        rows = nearest(self.normal(num, store.dim), store.dtype)
        rows[self.rng.random(rows.shape) < 0.02] = np.inf
        rows[self.rng.random(rows.shape) < 0.02] = -0.0
        return [rows, *(self.normal(num, state.shape[1]) for state in store.states)]

    def bring(self, row_ids) -> None:
        self._ask("tier_bring", self.store.bring, row_ids)

    def bring_ahead(self, row_ids) -> None:
        self._begin()
        row_ids = np.asarray(row_ids, np.uint32)
        self.store.bring_ahead(row_ids)
        statics = {"num_slots": self.store.num_slots, "is_number": self.store.is_number()}
        self._add("tier_bring_ahead", {"row_ids": row_ids}, statics, {})

    def peek(self, row_ids) -> None:
        self._ask("tier_peek", self.store.peek, row_ids)

    def _ask(self, op: str, ask: Callable[[np.ndarray], dict], row_ids) -> None:
        self._begin()
        store, row_ids = self.store, np.asarray(row_ids, np.uint32)
        self.last = ask(row_ids)
        statics = {"initial": store.initial, "num_slots": store.num_slots, "is_number": store.is_number()}
        self._add(op, {"seed": store.seed, "row_ids": row_ids}, {**self._tables(), **statics}, self.last)

    def give_back(self) -> None:
        """Changes all rows of the last call, and gives them back; equal rows have equal numbers."""
        store, last = self.store, self.last
        slots, rows = np.unique(last["slots"][last["slots"] < store.num_lines]), last["staged_owners"][:, 3]
        cached = [store.cached_rows, *store.cached_states]
        for array, numbers in zip(cached, self._any_numbers(len(slots)), strict=True):
            array[slots] = numbers
        staged = [numbers[np.minimum(rows, store.capacity)] for numbers in self._any_numbers(store.capacity + 1)]
        for at in np.flatnonzero(rows != NO_ROW):
            store.write(rows[at], *(numbers[at] for numbers in staged))
            store.places[rows[at]] = IN_HOST
        store.tier_counters[TICKET] *= len(rows) == 0
        names = ("rows", "states", "staged_rows", "staged_states")
        numbers = (cached[0].copy(), tuple(array.copy() for array in cached[1:]), staged[0], tuple(staged[1:]))
        inputs = dict(zip(names, numbers, strict=True)) | {"staged_owners": last["staged_owners"]}
        self._add("tier_give_back", inputs, {"is_number": store.is_number()}, {})

    def flush(self) -> None:
        self._begin()
        store = self.store
        for slot in np.flatnonzero(store.owners[:, 3] != NO_ROW):
            store.write(store.owners[slot, 3], store.cached_rows[slot], *(state[slot] for state in store.cached_states))
        self._add("tier_flush", {}, {"is_number": store.is_number()}, {"host": self._numbers_of_host()})

    def _numbers_of_host(self) -> tuple[np.ndarray, ...]:
        mask = np.array(self.store.is_number(), np.uint8)
        has_content = self.store.places != FRESH
        ends = np.cumsum(self.store.slabs)[:-1]
        return tuple(np.split(np.concatenate(self.store.host()) * mask * has_content[:, None], ends))

    def some(self, row_ids: np.ndarray, num: int) -> np.ndarray:
        """Returns row ids with repeats: some of no row, some beyond the capacity, some not in use."""
        asked = self.rng.choice(np.r_[row_ids, NO_ROW], num)
        beyond = self.rng.choice([NO_ROW, NO_ROW - 1, self.store.capacity, 2**31, self.store.capacity - 1], num)
        return np.where(self.rng.random(num) < 0.1, beyond, asked).astype(np.uint32)

    def mixed_calls(self, row_ids: np.ndarray, num: int) -> None:
        """Makes lookups, steps and reads, each with rows of the previous call and others; some are predicted."""
        for number in range(4):
            asked = self.some(row_ids[number::2] if number % 2 else row_ids, num)
            if number != 1:
                self.bring_ahead(asked)
            if number == 2:  # other rows come first
                self.bring(self.some(row_ids, 3))
            self.bring(asked)
            self.give_back()
            self.peek(self.some(row_ids, num))
            if number == 1:
                self.give_back()
            if number == 2:
                self.flush()


@cases(*((number, slots) for number in (0, 1, 33, 256, 1000) for slots in ("none", "one", "some", "all")))
def tier_sizes(num_keys: int, slots: str) -> Script:
    """Uses caches of any size, with slabs, tables and optimizers in turn."""
    num_slots = {"none": 0, "one": 1, "some": 100, "all": 312}[slots]
    script = TierScript(
        seed=num_keys + num_slots,
        slabs=SLABS[(num_keys + num_slots) % 3],
        dim=(4, 3, 8)[num_keys % 3],
        num_tables=(1, 3, 70)[num_keys % 3],
        optimizer=(SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM)[(num_keys + num_slots) % 4],
        num_slots=num_slots,
    )
    script.mixed_calls(script.begin(250), num_keys)
    return script


@cases(*((dim, dtype) for dim in (1, 3, 13, 64, 301, 1024) for dtype in ("float32", *HALVES)))
def tier_dims(dim: int, dtype: str) -> Script:
    """Uses rows of any length, whose records have unused bytes at the end."""
    optimizer = (SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM)[dim % 4]
    script = TierScript(
        seed=dim, slabs=(5, 35), dim=dim, num_tables=4, optimizer=optimizer, num_slots=12, dtype=HALVES.get(dtype, F32)
    )
    script.mixed_calls(script.begin(38), 30)
    return script


@cases("float32", *HALVES)
def small_tier(dtype: str) -> Script:
    """Makes all three calls."""
    script = TierScript(
        slabs=(5, 40), dim=3, num_tables=3, optimizer=ROWWISE_ADAGRAD, num_slots=8, dtype=HALVES.get(dtype, F32)
    )
    script.mixed_calls(script.begin(43), 20)
    return script


@case()
def tier_large() -> Script:
    """Uses several blocks of positions and of slots."""
    script = TierScript(slabs=(5, 7, 8_000), dim=4, num_tables=3, optimizer=ADAGRAD, num_slots=3_000)
    script.mixed_calls(script.begin(8_000), 6_000)
    return script


@cases(1, 600, 5_000)
def tier_ages(ages: int) -> Script:
    """Slots are replaced by age; the older they are, the more ages count as equal."""
    script = TierScript(seed=ages, slabs=(900,), num_slots=300)
    row_ids = script.begin(900, ages=ages, free=0.05)
    for num in (5, 40, 200, 300):
        script.bring(script.rng.permutation(row_ids)[:num])
        script.give_back()
    return script


@cases(TIMES - 5, 2**32 - 5, 2**32 - 1)
def tier_clocks(clock: int) -> Script:
    """Times begin again, and so does the clock: rows that were marked before, and change afterwards, are written."""
    script = TierScript(slabs=(40, 5, 155), dim=5, num_tables=3, optimizer=ADAGRAD, num_slots=60)
    row_ids = script.begin(200, cached=0.9, free=0.02, ages=60, clock=clock)
    for _ in range(6):
        asked = script.some(row_ids, 40)
        script.bring_ahead(asked)
        script.bring(script.rng.permutation(row_ids[script.store.places[row_ids] < HISTORY]))  # all marked rows, too
        script.give_back()
        script.bring(asked)
        script.give_back()
    script.flush()
    return script


@case()
def tier_windows() -> Script:
    """A call looks for slots in a part of a large cache: first in the last tile and those that follow it."""
    script = TierScript(slabs=(500_000,), num_slots=36 * TILE + 100, dim=1)
    row_ids = script.begin(400_000, cached=0.9, free=0.3, ages=100, is_indexed=False)
    script.store.tier_counters[WINDOW] = 36
    asked = [script.rng.choice(row_ids, 5_000).astype(np.uint32) for _ in range(3)]
    for now, following in itertools.pairwise(asked):
        script.bring(now)
        script.bring_ahead(following)
        script.give_back()
    return script


@case()
def tier_unused_lines() -> Script:
    """The arrays of the cache are longer than the cache: staged rows come after its whole length."""
    script = TierScript(slabs=(5, 35), num_slots=6, num_lines=11)
    script.mixed_calls(script.begin(40), 15)
    return script


@case()
def tier_ahead() -> Script:
    """Makes predicted calls, with changed rows among the marked ones, and calls that differ from the prediction."""
    script = TierScript(slabs=(40, 5, 155), dim=5, num_tables=3, optimizer=ADAGRAD, num_slots=90)
    row_ids = script.begin(200, cached=0.9, free=0.02)
    asked = [script.some(row_ids, 40) for _ in range(8)]
    for now, following in itertools.pairwise(asked):
        script.bring(now)
        script.bring_ahead(following)
        script.bring(now)  # as in an update
        script.give_back()
    script.bring_ahead(asked[0])
    script.bring_ahead(asked[1])  # the first prediction never comes true
    script.bring(script.some(row_ids, 90))  # marked rows are used, or leave
    script.give_back()
    script.bring(asked[1])
    script.bring_ahead(asked[2])
    script.flush()
    for _ in range(ONE_USE):
        script.bring(asked[2])
    away, others = row_ids[script.store.places[row_ids] >= HISTORY][:40].astype(np.uint32).reshape(2, 20)
    script.bring_ahead(away)
    script.bring(others)  # the list of slots is that of other rows
    script.bring_ahead(away)
    script.bring(away[::-1])  # of the same rows, in another order
    script.give_back()
    return script


@case()
def tier_marked() -> Script:
    """Rows whose slots are known change after they were written ahead, and then leave."""
    script = TierScript(slabs=(40, 5, 155), dim=5, num_tables=3, optimizer=ADAGRAD, num_slots=60)
    row_ids = script.begin(200, cached=0.9, free=0.0)
    is_away = script.store.places[row_ids] >= HISTORY
    here, away = row_ids[~is_away].astype(np.uint32), row_ids[is_away][:30].astype(np.uint32)
    script.bring(here)
    for _ in range(ONE_USE + 1):
        script.bring(np.full(3, NO_ROW, np.uint32))
    script.bring_ahead(away)  # marks slots of the rows that are here
    script.bring(here)
    script.give_back()
    script.bring(away)
    script.give_back()
    script.flush()
    return script


@case()
def tier_known() -> Script:
    """Several blocks use lists of slots, with rows that many positions share."""
    script = TierScript(slabs=(20_000,), num_slots=9_000, dim=1)
    row_ids = script.begin(20_000, cached=0.4, free=0.1, is_indexed=False)
    hot = script.rng.choice(row_ids, 50)
    first, second = (
        script.rng.permutation(np.r_[script.rng.choice(row_ids, 3_000), script.rng.choice(hot, 3_000)]).astype(
            np.uint32
        )
        for _ in range(2)
    )
    for _ in range(ONE_USE + 3):
        script.bring(first)
        script.give_back()
    script.bring_ahead(second)
    for asked in (first, second, second):
        script.bring(asked)
        script.give_back()
    return script
