"""The workloads by name (W1 to W6, H1; M1 on meshes), and their keys.

Fed by nothing; feeds every benchmark and every peer, so that all of them see the same ids. NumPy alone: the process
that measures FBGEMM imports this without JAX, and the ids of a run are a function of its seed.

An *id* is a number below the rows of its table, as static tables want it. A dynamic table gets `mix(table, id)` as its
64-bit key: nothing in the key then says where the row lies.

Not here: what is done with the keys (`bench_*.py`), how it is timed (`timing.py`).
"""

import dataclasses
from typing import Any

import numpy as np

SCATTER = 2654435761
"""Prime near 2**32 / golden ratio (Knuth): times it, modulo the number of rows, neighbouring ranks lie far apart."""

_ROUNDS = ((0x9E3779B1, 0x85EBCA77), (0xC2B2AE3D, 0x27D4EB2F), (0x165667B1, 0x9E3779B1))
"""Odd multipliers of the rounds of `mix` (the primes of xxHash32)."""


LIFTED_ADAM = "lifted_adam"
"""Optax's Adam by `optim.lift`: compared with the fused one, and without peers of its own."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One optimizer of a workload, and the key distributions under which its update is measured."""

    optimizer: str
    """Name of a function of `jaxsok.optim`."""
    distributions: tuple[str, ...]
    """"uniform" or "zipf" followed by the exponent, as in "zipf1.05"."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """A named set of shapes: tables of one dim in one store, one feature each."""

    name: str
    """W1 to W6, M1."""
    title: str
    num_tables: int
    num_rows: int
    """Rows of each table; all of them are in use before anything is measured."""
    dim: int
    num_bags: int
    """Bags of each feature in a batch."""
    hotness: int
    """Keys of each bag."""
    combiner: str | None
    runs: tuple[Run, ...]

    @property
    def num_keys(self) -> int:
        """The keys of one batch, over all features."""
        return self.num_tables * self.num_bags * self.hotness

    @property
    def num_embeddings(self) -> int:
        """The bags of one batch, over all features."""
        return self.num_tables * self.num_bags

    @property
    def distributions(self) -> tuple[str, ...]:
        """Every key distribution of the workload, in the order of its runs."""
        return tuple(dict.fromkeys(name for run in self.runs for name in run.distributions))

    def scale(self, scale: float) -> "Workload":
        """Returns the workload with fewer rows and bags; tables, dim and hotness stay."""
        if scale == 1.0:
            return self
        return dataclasses.replace(
            self, num_rows=_scale_count(self.num_rows, scale), num_bags=_scale_count(self.num_bags, scale)
        )

    def on_devices(self, num_devices: int, scaling: str) -> "Workload":
        """Returns the workload on several devices: `num_bags` is per device under "weak" scaling, else in total.

        Example:
          >>> m1 = MESH_WORKLOADS["M1"]
          >>> m1.on_devices(4, "weak").num_bags, m1.on_devices(4, "strong").num_bags
          (32768, 8192)
        """
        if scaling == "weak":
            return dataclasses.replace(self, num_bags=self.num_bags * num_devices)
        return dataclasses.replace(self, num_bags=-(-self.num_bags // num_devices) * num_devices)


@dataclasses.dataclass(frozen=True)
class HashWorkload:
    """The workload H1: one table, whose optimizer does not matter; keys in, row ids or rows out."""

    name: str
    title: str
    num_rows: int
    """Rows of the table when it is full, which is load 0.5 of an index of twice as many entries."""
    dims: tuple[int, ...]
    keys_per_call: tuple[int, ...]
    """HierarchicalKV's own protocol asks 1 Mi keys a call, the cleaner one 4 Mi."""

    def with_dims(self, dims: tuple[int, ...]) -> "HashWorkload":
        """Returns the workload at other dims."""
        return dataclasses.replace(self, dims=dims)

    def scale(self, scale: float) -> "HashWorkload":
        """Returns the workload with fewer rows and keys; a scale that is a power of two keeps powers of two."""
        if scale == 1.0:
            return self
        return dataclasses.replace(
            self,
            num_rows=_scale_count(self.num_rows, scale),
            keys_per_call=tuple(_scale_count(count, scale) for count in self.keys_per_call),
        )


_CRITEO = ("uniform", "zipf1.05", "zipf1.15")


def _by_name(*made: Workload) -> dict[str, Workload]:
    return {workload.name: workload for workload in made}


def _criteo(name: str, dim: int, num_rows: int, runs: tuple[Run, ...]) -> Workload:
    """Returns 26 tables, 65,536 samples, one key each: the shape of Criteo's click logs."""
    return Workload(name, f"criteo{dim}", 26, num_rows, dim, num_bags=65_536, hotness=1, combiner="sum", runs=runs)


WORKLOADS: dict[str, Workload] = _by_name(
    _criteo(
        "W1",
        64,
        4_000_000,
        (
            Run("rowwise_adagrad", _CRITEO),
            Run("adagrad", ("uniform",)),
            Run("adam", _CRITEO[:2]),
            Run(LIFTED_ADAM, _CRITEO[:2]),
        ),
    ),
    _criteo("W2", 128, 2_000_000, (Run("rowwise_adagrad", _CRITEO[:2]),)),
    _criteo("W3", 16, 4_000_000, (Run("rowwise_adagrad", _CRITEO[:2]),)),
    _criteo("W4", 32, 4_000_000, (Run("rowwise_adagrad", _CRITEO[:2]),)),
    Workload(
        name="W5",
        title="multihot",
        num_tables=32,
        num_rows=1_000_000,
        dim=128,
        num_bags=8_192,
        hotness=20,
        combiner="sum",
        runs=(Run("rowwise_adagrad", ("uniform", "zipf1.15")), Run("sgd", ("uniform",))),
    ),
    Workload(
        name="W6",
        title="dynamicemb",
        num_tables=10,
        num_rows=1_677_721,
        dim=128,
        num_bags=104_857,
        hotness=1,
        combiner=None,
        runs=(Run("sgd", ("zipf1.05",)), Run("adam", ("zipf1.05",)), Run("rowwise_adagrad", ("uniform",))),
    ),
)

H1 = HashWorkload(
    name="H1", title="raw hash", num_rows=32 << 20, dims=(8, 32, 64, 128), keys_per_call=(1 << 20, 4 << 20)
)

_M1 = dataclasses.replace(
    WORKLOADS["W2"],
    name="M1",
    title="TorchRec's shape; bags are those of each device",
    num_bags=8_192,
    runs=(Run("rowwise_adagrad", ("uniform",)),),
)

MESH_WORKLOADS: dict[str, Workload] = _by_name(
    _M1, dataclasses.replace(_M1, name="M1-64", title="the same, half as wide", dim=64)
)
"""Measured on meshes alone, by `bench_exchange.py`, which also takes those above."""

NAMES = ("W1", "W2", "W5", "W6", "W3", "W4", H1.name)
"""The default workloads in their order: those that a run without time leaves out come last."""

SCALINGS = ("weak", "strong")


def on_mesh(name: str) -> Workload:
    """Returns the workload of a name, for a mesh."""
    return MESH_WORKLOADS[name] if name in MESH_WORKLOADS else WORKLOADS[name]


def chosen_runs(workload: Workload, distributions: str | None, optimizers: str | None) -> list[Run]:
    """Returns the runs of a workload that a command line asks for.

    Named optimizers are run under every named distribution (or every one of the workload), whether or not the workload
    pairs them; without names, the workload's own runs are, filtered by the named distributions. Distributions that the
    workload does not have are run with its first optimizer.
    """
    named = [part.strip() for part in distributions.split(",") if part.strip()] if distributions else []
    for distribution in named:
        if distribution != "uniform":
            exponent_of(distribution)
    if optimizers:
        names = [part.strip() for part in optimizers.split(",") if part.strip()]
        for name in names:
            state_dims(name, 1)
        return [Run(name, tuple(named) or workload.distributions) for name in names]
    if not named:
        return list(workload.runs)
    foreign = tuple(name for name in named if name not in workload.distributions)
    runs = []
    for number, run in enumerate(workload.runs):
        kept = tuple(name for name in run.distributions if name in named) + (foreign if number == 0 else ())
        if kept:
            runs.append(Run(run.optimizer, kept))
    return runs


def state_dims(optimizer: str, dim: int) -> tuple[int, ...]:
    """Returns the numbers per row in each array of an optimizer's state.

    Example:
      >>> state_dims("adam", 64)
      (64, 64)
    """
    dims = {"sgd": (), "rowwise_adagrad": (1,), "adagrad": (dim,), "adam": (dim, dim), LIFTED_ADAM: (dim, dim)}
    if optimizer not in dims:
        raise ValueError(f"--optimizers: unknown optimizer {optimizer!r}; there are {', '.join(dims)}.")
    return dims[optimizer]


def select(names: str | None) -> tuple[str, ...]:
    """Returns the workloads that a comma-separated list names; all of them for None."""
    if names is None:
        return NAMES
    chosen = tuple(name.strip().upper() for name in names.split(",") if name.strip())
    for name in chosen:
        if name not in (*NAMES, *MESH_WORKLOADS):
            known = ", ".join((*NAMES, *MESH_WORKLOADS))
            raise ValueError(f"--workloads: no workload is named {name!r}; there are {known}.")
    return chosen


def draw_ids(distribution: str, num_rows: int, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Draws ids below `num_rows`.

    Args:
      distribution: "uniform", or "zipf" and its exponent a ("zipf1.05"): the rank is a truncated power law, sampled by
        inverting its continuous distribution function, and the id is `(rank - 1) * SCATTER mod num_rows`, so that the
        hot rows do not lie side by side.
      num_rows: rows of the table.
      shape: shape of the result.
      rng: where the randomness comes from.

    Returns:
      int64 array of ids; repeats are allowed.

    Example:
      >>> ids = draw_ids("zipf1.15", 100, (1000,), np.random.default_rng(0))
      >>> bool((ids == 0).mean() > 0.1)  # rank 1 is id 0
      True
    """
    if distribution == "uniform":
        return rng.integers(0, num_rows, shape, dtype=np.int64)
    a = exponent_of(distribution)
    u = rng.random(shape)
    rank = np.floor(((num_rows ** (1.0 - a) - 1.0) * u + 1.0) ** (1.0 / (1.0 - a))).astype(np.int64)
    rank = np.minimum(rank, num_rows)  # u close to 1 may round up to num_rows + 1.
    return (rank - 1) * SCATTER % num_rows


def exponent_of(distribution: str) -> float:
    """Returns the exponent of "zipf1.05"; raises ValueError for anything that is not a Zipf distribution."""
    name, _, exponent = distribution.partition("zipf")
    if name or not exponent or float(exponent) <= 1.0:
        raise ValueError(
            f"--keys: unknown distribution {distribution!r}; use uniform, or zipf with an exponent above 1 (zipf1.05)."
        )
    return float(exponent)


@dataclasses.dataclass(frozen=True)
class KeySet:
    """The keys of one batch."""

    ids: np.ndarray
    """int32 [num_tables, num_bags, hotness], each below the rows of its table."""
    num_rows: int
    """Rows of each table."""
    unique_rows: np.ndarray
    """int32, ascending: the distinct rows of the batch in one stacked table."""

    @property
    def stacked_rows(self) -> np.ndarray:
        """The ids as rows of one stacked table [num_tables * num_rows, dim], int32, shaped like `ids`."""
        return self.ids + (np.arange(self.ids.shape[0], dtype=np.int32) * self.num_rows)[:, None, None]

    def shuffled_unique_rows(self) -> np.ndarray:
        """Returns the distinct rows in an order without neighbours, the same on every run."""
        return np.random.default_rng(self.num_unique).permutation(self.unique_rows)

    @property
    def num_keys(self) -> int:
        """The keys of the batch, repeats included."""
        return self.ids.size

    @property
    def num_unique(self) -> int:
        """The number of distinct (table, id) pairs of the batch."""
        return self.unique_rows.size


def draw_batches(workload: Workload, distribution: str, num_sets: int, seed: int) -> list[np.ndarray]:
    """Draws the ids of `num_sets` batches, each int32 [num_tables, num_bags, hotness]; the same for the same seed."""
    shape = (workload.num_tables, workload.num_bags, workload.hotness)
    return [
        draw_ids(distribution, workload.num_rows, shape, np.random.default_rng((seed, number))).astype(np.int32)
        for number in range(num_sets)
    ]


def key_sets(workload: Workload, distribution: str, num_sets: int, seed: int) -> list[KeySet]:
    """Returns the batches of `draw_batches` with their distinct rows, and checks the numbers of distinct rows.

    Raises:
      RuntimeError: a batch has a number of distinct ids that the distribution cannot explain.
    """
    expected = workload.num_tables * expected_unique(
        distribution, workload.num_rows, workload.num_bags * workload.hotness
    )
    sets = []
    for ids in draw_batches(workload, distribution, num_sets, seed):
        base = np.arange(workload.num_tables, dtype=np.int32) * workload.num_rows
        rows = np.sort((ids + base[:, None, None]).reshape(-1))
        unique = rows[np.append(True, rows[1:] != rows[:-1])]
        # Occupancy counts vary by less than a Poisson variable of the same mean; six deviations never happen.
        if abs(unique.size - expected) > 6.0 * np.sqrt(expected) + 1.0:
            raise RuntimeError(
                f"{workload.name} {distribution}: {unique.size} distinct ids, expected about {expected:.0f}; "
                "the generator and its distribution disagree."
            )
        sets.append(KeySet(ids, workload.num_rows, unique))
    return sets


def expected_unique(distribution: str, num_rows: int, num_draws: int) -> float:
    """Returns the expected number of distinct ids in `num_draws` draws from one table."""
    if distribution == "uniform":
        return num_rows * -np.expm1(num_draws * np.log1p(-1.0 / num_rows))
    edges = np.arange(1.0, num_rows + 1.0) ** (1.0 - exponent_of(distribution))
    probability = (edges[:-1] - edges[1:]) / (edges[0] - edges[-1])
    return float(np.sum(-np.expm1(num_draws * np.log1p(-probability))))


def mix(table: int, ids: Any, xp: Any = np) -> Any:
    """Mixes ids of a table into 64-bit keys, words uint32[..., 2] (low, high): a bijection of (table, id).

    Three Feistel rounds on 32-bit halves, so that NumPy and JAX (`xp=jax.numpy`, x64 off) compute the same.

    Example:
      >>> mix(3, np.arange(2)).view(np.uint64)[..., 0]
      array([ 6781096638352085231, 15171744200578051542], dtype=uint64)
    """
    low = ids.astype(xp.uint32)
    high = xp.full(low.shape, table, xp.uint32)
    for first, second in _ROUNDS:
        high = high ^ _scramble(low, first, xp)
        low = low ^ _scramble(high, second, xp)
    return xp.stack([low, high], axis=-1)


def _scramble(words: Any, multiplier: int, xp: Any) -> Any:
    words = (words + xp.uint32(0x7F4A7C15)) * xp.uint32(multiplier)
    words = words ^ (words >> xp.uint32(15))
    words = words * xp.uint32(0x85EBCA6B)
    return words ^ (words >> xp.uint32(13))


def _scale_count(count: int, scale: float) -> int:
    return max(16, round(count * scale))


# Keys for a cache ----------------------------------------------------------------------------------------------------

CACHE_ROWS, CACHE_DIM, CACHE_SHARE = 8_000_000, 128, 0.1
CACHE_KEYS = (65_536, 4_096)
"""Keys of a lookup."""
CACHE_HIT_RATES = (0.5, 0.75, 0.9, 0.99, 1.0)


def cache_keys(scale: float) -> list[int]:
    """Returns the numbers of keys of a lookup at a scale, the larger first.

    Example:
      >>> cache_keys(1.0), cache_keys(0.01)
      ([65536, 4096], [1311, 82])
    """
    return sorted({max(16, round(size * min(1.0, 2 * scale))) for size in CACHE_KEYS}, reverse=True)


class CachedIds:
    """Batches of distinct ids of one table of which a share is in a cache that keeps the latest ids.

    Hot ids come round again before as many others have come as fit the cache, so each is there, whatever its place in
    the cache; cold ones come round after many more, so none is. This holds from one number of keys and hit rate to the
    next, once all hot ids have come (`num_warm_ups`).

    Example:
      >>> ids = CachedIds(num_rows=1000, capacity=100, seed=0)
      >>> first, second = ids.take(8, 0.75), ids.take(8, 0.75)
      >>> int((first < ids.num_hot).sum()), len(np.unique(np.concatenate([first, second])))
      (6, 16)
    """

    def __init__(self, num_rows: int, capacity: int, seed: int):
        """Makes the first batch the next one."""
        if num_rows < 2 * capacity:
            raise ValueError(f"CachedIds: got a cache of {capacity} of {num_rows} rows, wanted at most half of them.")
        # A quarter of the cache: at a hit rate of a half as many others come before an id comes round.
        self.num_hot, self._num_cold = capacity // 4, num_rows - capacity // 4
        self._rng = np.random.default_rng(seed)
        self._orders: dict[int, np.ndarray] = {}
        self._at_hot = self._at_cold = 0

    def num_warm_ups(self, num_keys: int, hit_rate: float) -> int:
        """Returns after how many batches all hot ids are in the cache."""
        return 2 * -(-self.num_hot // max(1, round(hit_rate * num_keys)))

    def take(self, num_keys: int, hit_rate: float) -> np.ndarray:
        """Returns the next batch, int64, hot and cold ids mixed."""
        num_hits = round(hit_rate * num_keys)
        if num_hits > self.num_hot:
            raise ValueError(f"CachedIds: got {num_hits} hits, wanted at most {self.num_hot}, a quarter of the cache.")
        ends = self._at_hot + num_hits, self._at_cold + num_keys - num_hits
        hot = np.arange(self._at_hot, ends[0]) * SCATTER % self.num_hot
        cold = np.arange(self._at_cold, ends[1]) * SCATTER % self._num_cold
        self._at_hot, self._at_cold = ends
        if num_keys not in self._orders:  # of all batches: a permutation of each would take longer than the lookup
            self._orders[num_keys] = self._rng.permutation(num_keys)
        return np.concatenate([hot, self.num_hot + cold])[self._orders[num_keys]]
