"""The meaning of every op: dicts of NumPy rows and plain loops, float64. Imports nothing of jaxsok.

A batch is `{feature name: [bag, bag, ...]}`, a bag is a list of Python ints (keys) or of (key, weight) pairs. What a
new row holds is asked from a callback, so that the oracle needs no hash. Everything else is defined here, in terms
of the contract: occurrences are looked up one after the other, in the order of the features and of their positions.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

PADDING_KEY = 2**64 - 1

# --------------------------------------------------------------------------------------------------------------
# Optimizers: (row, state, gradient, learning rate, step) -> (row, state); step is 0 at the first update.


@dataclasses.dataclass(frozen=True)
class Sgd:
    """Plain gradient descent."""

    def initial_state(self, dim: int) -> list[np.ndarray]:
        """Returns no state."""
        return []

    def step(self, row, state, gradient, learning_rate, step):
        """Moves the row against its gradient."""
        return row - learning_rate * gradient, state


@dataclasses.dataclass(frozen=True)
class Adagrad:
    """Duchi, Hazan, Singer (2011), in the form of optax.adagrad: the accumulator counts the present gradient."""

    initial_accumulator_value: float = 0.1
    eps: float = 1e-7

    def initial_state(self, dim: int) -> list[np.ndarray]:
        """Returns one accumulator per column."""
        return [np.full(dim, self.initial_accumulator_value)]

    def step(self, row, state, gradient, learning_rate, step):
        """Divides by the root of the summed squares; a zero accumulator does not move."""
        accumulator = state[0] + gradient**2
        scale = np.where(accumulator > 0, 1 / np.sqrt(np.where(accumulator > 0, accumulator, 1) + self.eps), 0.0)
        return row - learning_rate * gradient * scale, [accumulator]


@dataclasses.dataclass(frozen=True)
class RowwiseAdagrad:
    """FBGEMM's row-wise Adagrad: one accumulator per row, of the mean square of the gradient."""

    initial_accumulator_value: float = 0.0
    eps: float = 1e-8

    def initial_state(self, dim: int) -> list[np.ndarray]:
        """Returns one accumulator per row."""
        return [np.full(1, self.initial_accumulator_value)]

    def step(self, row, state, gradient, learning_rate, step):
        """Divides the whole row by one root."""
        accumulator = state[0] + np.mean(gradient**2)
        return row - learning_rate * gradient / (np.sqrt(accumulator) + self.eps), [accumulator]


@dataclasses.dataclass(frozen=True)
class Adam:
    """Kingma and Ba (2015), lazy: untouched rows do not move; the bias correction counts the collection's steps."""

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    def initial_state(self, dim: int) -> list[np.ndarray]:
        """Returns the first and second moments."""
        return [np.zeros(dim), np.zeros(dim)]

    def step(self, row, state, gradient, learning_rate, step):
        """Decays both moments only when the row is touched, however long ago the last touch was."""
        first = self.b1 * state[0] + (1 - self.b1) * gradient
        second = self.b2 * state[1] + (1 - self.b2) * gradient**2
        first_hat = first / (1 - self.b1 ** (step + 1))
        second_hat = second / (1 - self.b2 ** (step + 1))
        return row - learning_rate * first_hat / (np.sqrt(second_hat) + self.eps), [first, second]


# --------------------------------------------------------------------------------------------------------------
# Bags


def keys_and_weights(bag: Sequence) -> tuple[list[int], list[float]]:
    """Splits a bag of keys or (key, weight) pairs; an unweighted key has weight 1."""
    pairs = [entry if isinstance(entry, tuple) else (entry, 1.0) for entry in bag]
    return [int(key) for key, _ in pairs], [float(weight) for _, weight in pairs]


def bag_factors(keys: Sequence[int], weights: Sequence[float], combiner: str | None, weighted: bool) -> list[float]:
    """Returns the factor of each row of a bag in the sum; 0 for padding, and if the divisor is zero."""
    real = [key != PADDING_KEY for key in keys]
    present = [weight for weight, is_real in zip(weights, real, strict=True) if is_real]
    if combiner in ("sum", None):
        divisor = 1.0
    elif combiner == "mean":
        divisor = math.fsum(present) if weighted else float(len(present))
    elif combiner == "sqrtn":
        divisor = math.sqrt(math.fsum(weight**2 for weight in present)) if weighted else math.sqrt(len(present))
    else:
        raise ValueError(f"oracle: combiner {combiner!r}")
    if divisor == 0:
        return [0.0] * len(keys)
    return [weight / divisor if is_real else 0.0 for weight, is_real in zip(weights, real, strict=True)]


def has_divisor(keys: Sequence[int], weights: Sequence[float], combiner: str | None, weighted: bool) -> bool:
    """Returns whether the bag is not zeros by definition.

    Keys of a bag whose divisor is zero (no keys, or weights that cancel) are no uses: they contribute nothing, so
    they do not step their rows.
    """
    present = [weight for key, weight in zip(keys, weights, strict=True) if key != PADDING_KEY]
    if combiner == "mean":
        return math.fsum(present) != 0 if weighted else bool(present)
    if combiner == "sqrtn":
        return any(weight != 0 for weight in present) if weighted else bool(present)
    return True


def combine(rows: Sequence[np.ndarray], factors: Sequence[float], dim: int) -> np.ndarray:
    """Adds the rows of one bag in order, each multiplied by its factor."""
    embedding = np.zeros(dim)
    for row, factor in zip(rows, factors, strict=True):
        if factor != 0:
            embedding = embedding + factor * row
    return embedding


# --------------------------------------------------------------------------------------------------------------
# Tables


@dataclasses.dataclass
class TableOracle:
    """One named map from keys to row ids; the rows are in its store."""

    name: str
    initial_row: Callable[[int], np.ndarray]
    unknown: str = "initial"
    row_ids: dict[int, int] = dataclasses.field(default_factory=dict)

    def unknown_row(self, key: int, dim: int) -> np.ndarray:
        """Returns what evaluation reads for a key without a row."""
        return np.zeros(dim) if self.unknown == "zeros" else np.asarray(self.initial_row(key), np.float64)


@dataclasses.dataclass
class StoreOracle:
    """The rows of the tables of one dim and optimizer: capacity, row ids, optimizer state."""

    dim: int
    optimizer: object
    learning_rate: float | Callable[[int], float]
    capacity: int
    tables: dict[str, TableOracle]
    row_gradient: str = "sum"
    rows: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
    states: dict[int, list[np.ndarray]] = dataclasses.field(default_factory=dict)
    freed: list[int] = dataclasses.field(default_factory=list)
    num_allocated: int = 0
    generation: int = 0

    @property
    def num_rows(self) -> int:
        """Returns the number of rows in use."""
        return len(self.rows)

    def find(self, table: str, key: int) -> int | None:
        """Returns the row id of a key, or None."""
        return self.tables[table].row_ids.get(key)

    def find_or_insert(self, table: str, key: int) -> tuple[int | None, str]:
        """Returns the row id of a key and whether it was "found", "inserted" or "refused" (the store is full)."""
        row_id = self.find(table, key)
        if row_id is not None:
            return row_id, "found"
        if self.num_rows >= self.capacity:
            return None, "refused"
        if self.freed:
            row_id = self.freed.pop(0)
        else:
            row_id = self.num_allocated
            self.num_allocated += 1
        self.tables[table].row_ids[key] = row_id
        self.rows[row_id] = np.asarray(self.tables[table].initial_row(key), np.float64)
        self.states[row_id] = self.optimizer.initial_state(self.dim)
        return row_id, "inserted"

    def erase(self, table: str, keys: Sequence[int]) -> int:
        """Erases the rows of the keys; their ids are reused, smallest first."""
        num_erased = 0
        for key in keys:
            row_id = self.tables[table].row_ids.pop(int(key), None)
            if row_id is not None:
                del self.rows[row_id], self.states[row_id]
                self.freed.append(row_id)
                num_erased += 1
        self.freed.sort()
        self.generation += 1
        return num_erased

    def scale(self, num_uses: int) -> float:
        """Returns the factor of the summed gradient of a row with so many uses."""
        return {"sum": 1.0, "mean": 1.0 / num_uses, "sqrt": 1.0 / math.sqrt(num_uses)}[self.row_gradient]

    def apply(self, row_id: int, gradient: np.ndarray, num_uses: int, step: int, learning_rate=None) -> bool:
        """Steps the optimizer of one row. If the gradient is not finite, returns False and changes nothing."""
        gradient = gradient * self.scale(num_uses)
        if not np.isfinite(gradient).all():
            return False
        rate = self.learning_rate if learning_rate is None else learning_rate
        rate = rate(step) if callable(rate) else rate
        self.rows[row_id], self.states[row_id] = self.optimizer.step(
            self.rows[row_id], self.states[row_id], gradient, float(rate), step
        )
        return True


# --------------------------------------------------------------------------------------------------------------
# Collections


@dataclasses.dataclass(frozen=True)
class Feature:
    """The rules for reading one feature's bags: its table, its combiner and the number of buffer positions."""

    name: str
    table: str
    combiner: str | None
    num_positions: int
    weighted: bool = False


@dataclasses.dataclass(frozen=True)
class Use:
    """One occurrence of a key: where its row was used, and its factor."""

    feature: str
    output: int  # which row of the feature's embeddings
    table: str
    row_id: int | None
    factor: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """The facts about a lookup that an update needs."""

    uses: tuple[Use, ...]
    generations: tuple[int, ...]
    counts: Mapping[str, Mapping[str, int]]


COUNTS = ("num_found", "num_inserted", "num_missing", "num_refused", "num_padding")


class CollectionOracle:
    """Tables in stores, features over tables: lookup, find, update, erase."""

    def __init__(self, stores: Sequence[StoreOracle], features: Sequence[Feature]):
        """Takes stores with disjoint table names."""
        self.stores = list(stores)
        self.features = list(features)
        self.step = 0

    def store_of(self, table: str) -> StoreOracle:
        """Returns the store of a table."""
        return next(store for store in self.stores if table in store.tables)

    def _walk(self, batch, resolve):
        counts = {table: dict.fromkeys(COUNTS, 0) for store in self.stores for table in store.tables}
        embeddings, uses = {}, []
        for feature in self.features:
            store, count = self.store_of(feature.table), counts[feature.table]
            outputs, num_seen = [], 0
            for bag in batch[feature.name]:
                keys, weights = keys_and_weights(bag)
                num_seen += len(keys)
                groups = [[i] for i in range(len(keys))] if feature.combiner is None else [range(len(keys))]
                for group in groups:
                    group_keys = [keys[i] for i in group]
                    group_weights = [weights[i] for i in group]
                    factors = bag_factors(group_keys, group_weights, feature.combiner, feature.weighted)
                    is_used = has_divisor(group_keys, group_weights, feature.combiner, feature.weighted)
                    rows = []
                    for key, factor in zip(group_keys, factors, strict=True):
                        if key == PADDING_KEY:
                            count["num_padding"] += 1
                            rows.append(np.zeros(store.dim))
                            continue
                        row_id, row, outcome = resolve(store, feature.table, key)
                        count[f"num_{outcome}"] += 1
                        rows.append(row)
                        if is_used:
                            uses.append(Use(feature.name, len(outputs), feature.table, row_id, factor))
                    outputs.append(combine(rows, factors, store.dim))
            count["num_padding"] += feature.num_positions - num_seen
            embeddings[feature.name] = np.array(outputs).reshape(len(outputs), store.dim)
        return embeddings, tuple(uses), counts

    def lookup(self, batch) -> tuple[dict[str, np.ndarray], Plan]:
        """Finds or inserts every key; a refused key contributes its initial row."""

        def resolve(store, table, key):
            row_id, outcome = store.find_or_insert(table, key)
            if row_id is None:
                return None, np.asarray(store.tables[table].initial_row(key), np.float64), outcome
            return row_id, store.rows[row_id], outcome

        embeddings, uses, counts = self._walk(batch, resolve)
        return embeddings, Plan(uses, tuple(store.generation for store in self.stores), counts)

    def find(self, batch) -> tuple[dict[str, np.ndarray], dict[str, dict[str, int]]]:
        """Reads only; a key without a row contributes its table's value for unknown keys."""

        def resolve(store, table, key):
            row_id = store.find(table, key)
            if row_id is None:
                return None, store.tables[table].unknown_row(key, store.dim), "missing"
            return row_id, store.rows[row_id], "found"

        embeddings, _, counts = self._walk(batch, resolve)
        return embeddings, counts

    def update(self, plans: Sequence[Plan], gradients: Sequence[Mapping[str, np.ndarray]], learning_rate=None):
        """Steps each touched row once, with the sum over all its uses; counts rows whose gradient is not finite.

        `gradients` have the shape of the oracle's embeddings: [bags or positions, dim].
        """
        num_nonfinite = {table: 0 for store in self.stores for table in store.tables}
        num_stale = 0
        sums: dict[tuple[str, int], tuple[np.ndarray, int]] = {}
        for plan, gradient in zip(plans, gradients, strict=True):
            if plan.generations != tuple(store.generation for store in self.stores):
                num_stale += 1
                continue
            for use in plan.uses:
                if use.row_id is None:
                    continue
                dim = self.store_of(use.table).dim
                total, num_uses = sums.get((use.table, use.row_id), (np.zeros(dim), 0))
                share = use.factor * np.asarray(gradient[use.feature][use.output], np.float64)
                sums[use.table, use.row_id] = (total + share, num_uses + 1)
        for (table, row_id), (total, num_uses) in sums.items():
            if not self.store_of(table).apply(row_id, total, num_uses, self.step, learning_rate):
                num_nonfinite[table] += 1
        self.step += 1
        return num_nonfinite, num_stale

    def erase(self, table: str, keys: Sequence[int]) -> int:
        """Erases the rows of the keys in one table."""
        return self.store_of(table).erase(table, keys)

    def export_table(self, table: str) -> list[tuple[int, int, np.ndarray, list[np.ndarray]]]:
        """Returns (row id, key, row, state) of every row of a table, ordered by row id."""
        store = self.store_of(table)
        pairs = sorted((row_id, key) for key, row_id in store.tables[table].row_ids.items())
        return [(row_id, key, store.rows[row_id], store.states[row_id]) for row_id, key in pairs]


def quantization_error_bound(dtype, row_max, values=None):
    """Bounds the distance of a number of a quantized row from the value it represents, float64.

    With s the row's scale, x a float32 of the row, and q * s its dequantized value:

    - int8: s * (1/2 + 2^-16). Rounding x / s to a whole number errs by 1/2 at most. The quotient in float64 adds less
      than 2^-45, and rounding the product to float32 less than 2^-17 s. The cut at 127 meets only the largest
      magnitude, which lies within 127 (1 + 2^-22) s: it alone errs there, by less than 2^-14 s.
    - float8_e4m3fn: 2^-4 |x| + 2^-10 s. From 2^-6 on a step is 2^-3 of the power of two below x / s, and half of it at
      most 1/17 of x / s. Below 2^-6 a step is 2^-9, and half of it 2^-10. The part of the other case covers the
      roundings of quotient and product, and the cut at 448.

    `row_max` are the largest magnitudes of rows; `values` numbers of these rows, or None for any number of each.
    """
    largest, least = {"int8": (127, 2.0**-126), "float8_e4m3fn": (448, 1 / (448 * 512))}[dtype]
    row_max = np.asarray(row_max, np.float64)
    scales = np.maximum(row_max / largest, least)
    sizes = np.abs(np.asarray(row_max if values is None else values, np.float64))
    if dtype == "int8":
        return np.zeros_like(sizes) + scales * (0.5 + 2.0**-16)
    return sizes * 2.0**-4 + scales * 2.0**-10
