"""Serving: a caller's wait for a lookup of frozen tables, fused and unfused, and for `jnp.take` on static arrays.

Question: what does fusing the tables of a model gain, and how near does the fused lookup come to its floor?
Workload: S1, the demonstration of HPS's table fusion: 8 tables x 10,000 rows x 128 floats, 256 x 26 keys of each.
          DLRM: 26 tables x 1,000,000 rows x 128 floats, one key of each for 32 to 131,072 samples; at 65,536 samples
          also with rows of 16 and of 8 bits. Uniform keys, all present, on the device already.
Limit:    bytes at the bandwidth of a copy; for S1 and one launch of a kernel without work (CuPy's CUDA graph of it).
Command:  `python -m jaxsok bench --only fused`
Last result: docs/performance.md (H200, commit 7db9096).

"Latency" is one call, from its dispatch to its result, waited for: what a caller sees; median and 99th percentile.
"Back to back" is a call among many, where the host runs ahead; "in a row" one of several in one program. "Kernels" is
the sum of what JAX's profiler saw on the device. Each mode is one jitted program: "fused" has one lookup for all
tables, "unfused" one per table, "take" one `jnp.take(table, row_numbers, axis=0, mode="clip")` per table, on an array.
"""

import dataclasses
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsok.serving.frozen import FrozenSpec, FrozenStore, FrozenTable, FrozenTables
from jaxsok.serving.fused import LookupInput, lookup
from jaxsok.serving.row_map import RowMap

from . import cuda_kernels, limits, records, workloads
from .records import Record, Recorder
from .timing import Protocol, Step, Timing, summary

DIM = 128

S1_TABLES, S1_ROWS, S1_SAMPLES, S1_HOTNESS = 8, 10_000, 256, 26

DLRM_TABLES, DLRM_ROWS = 26, 1_000_000

SIZES = (32, 128, 512, 2048, 8192, 32_768, 131_072)
"""Samples of the DLRM shape."""

DTYPES, DTYPE_SAMPLES = ("float32", "bfloat16", "int8", "float8_e4m3fn"), 65_536

WAYS = ("fused", "unfused", "take")

CALLS, QUICK_CALLS = 300, 5
"""Calls whose latency is taken, at most."""

LATENCY_S = 2.0
"""Calls of one program take no longer than this, but for a third of them."""

IN_A_ROW, QUICK_IN_A_ROW = 8, 2
"""Steps of S1's program that runs several, each with keys of its own."""


@dataclasses.dataclass
class Filled:
    """Frozen tables of one dim and dtype, all rows in use, and the same rows as separate arrays."""

    tables: FrozenTables
    num_rows: int
    """Rows of each table."""
    static: list[jax.Array] | None
    """The arrays for `jnp.take`; None if it is not measured."""

    @property
    def names(self) -> list[str]:
        """The names of the tables."""
        return list(self.tables.tables)


def measure(
    recorder: Recorder, protocol: Protocol, seed: int, copy_gb_s: float, scale: float, is_quick: bool = False
) -> None:
    """Measures S1, then the DLRM shape by batch size and by dtype; the profiler and CUDA graphs come last."""
    later: list[Callable[[], None]] = []
    run = _Run(recorder, protocol, copy_gb_s, is_quick, later)
    with recorder.attempt("serving S1"):
        filled = fill(S1_TABLES, max(8, round(S1_ROWS * scale)))
        shape = (max(2, round(S1_SAMPLES * scale)), S1_HOTNESS)
        run.all_ways("S1", filled, shape, seed)
    if recorder.has_time("serving DLRM"):
        with recorder.attempt("serving DLRM"):
            _measure_dlrm(run, seed, scale, is_quick)
    recorder.write()
    while later:
        later.pop(0)()
        gc.collect()


def _measure_dlrm(run: "_Run", seed: int, scale: float, is_quick: bool) -> None:
    filled = fill(DLRM_TABLES, max(8, round(DLRM_ROWS * scale)))
    sizes = sorted({max(2, round(size * scale)) for size in (SIZES[-2:] if is_quick else SIZES)})
    for size in sizes:
        if run.recorder.has_time(f"serving DLRM {size} samples"):
            with run.recorder.attempt(f"serving DLRM {size} samples"):
                run.all_ways("DLRM", filled, (size,), seed)
    size = max(2, round(DTYPE_SAMPLES * scale))
    for dtype in DTYPES:
        if run.recorder.has_time(f"serving DLRM {dtype}"):
            with run.recorder.attempt(f"serving DLRM {dtype}"):
                run.measure_mode("DLRM", "fused", cast_rows(filled, dtype), (size,), seed, dtype)


# Tables --------------------------------------------------------------------------------------------------------------


def fill(num_tables: int, num_rows: int) -> Filled:
    """Returns tables of 128 floats, whose rows are made on the device; key `mix(table, i)` has row i of its table."""
    row_map = RowMap(num_tables, num_tables * num_rows)
    for number in range(num_tables):
        row_ids = row_map.place(number, keys_of(number, np.arange(num_rows)).view(np.uint64)[:, 0])
        if not np.array_equal(row_ids, number * num_rows + np.arange(num_rows)):
            raise RuntimeError("bench_serving: rows are not in the order of their keys; jnp.take would read others.")
    spec = FrozenSpec.of([FrozenTable(f"table{number:02}", DIM) for number in range(num_tables)])
    index, counters = row_map.index(jax.devices()[0])
    rows = limits.varied_floats((num_tables * num_rows, DIM))
    static = [rows[number * num_rows : (number + 1) * num_rows] for number in range(num_tables)]
    return Filled(FrozenTables((FrozenStore(index, counters, rows),), spec), num_rows, static)


def cast_rows(filled: Filled, dtype: str) -> Filled:
    """Returns the same keys over rows of another dtype; rows of 8 bits have a scale each."""
    (store,), (old,) = filled.tables.stores, filled.tables.spec.stores
    spec = FrozenSpec.of([dataclasses.replace(table, dtype=dtype) for table in old])
    is_quantized = old[0].is_quantized or spec.stores[0][0].is_quantized
    factor = 2000.0 if is_quantized else 1.0  # of [-0.05, 0.05)
    rows = _cast(store.rows, dtype, factor)
    scales = (jnp.full((store.capacity,), 1.0 / factor, jnp.float32),) if is_quantized else ()
    return Filled(FrozenTables((dataclasses.replace(store, rows=rows, scales=scales),), spec), filled.num_rows, None)


def keys_of(table: int, ids: np.ndarray) -> np.ndarray:
    """Returns the keys of rows as words: uint32[..., 2]."""
    return workloads.mix(table, ids.reshape(-1)).reshape(*ids.shape, 2)


# Ways ----------------------------------------------------------------------------------------------------------------


def lookup_fused(tables: FrozenTables, keys: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Looks up all tables in one call."""
    return lookup(tables, {name: LookupInput(name, words) for name, words in keys.items()})


def lookup_unfused(tables: FrozenTables, keys: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Looks up each table in its own call."""
    return {name: lookup(tables, {name: LookupInput(name, words)})[name] for name, words in keys.items()}


def take(tables: list[jax.Array], ids: list[jax.Array]) -> list[jax.Array]:
    """Gathers from each table, by row numbers that are given."""
    return [jnp.take(table, rows, axis=0, mode="clip") for table, rows in zip(tables, ids, strict=True)]


_FUNCTIONS = {"fused": lookup_fused, "unfused": lookup_unfused, "take": take}


def lookup_bytes(num_keys: int, num_unique: int, dim: int, row_bytes: int) -> int:
    """Returns the bytes of a frozen lookup: keys in, unique index lines and rows in, float32 embeddings out.

    Example:
      >>> lookup_bytes(3, 2, dim=128, row_bytes=132)  # 24 + 2 * 196 + 1536
      1952
    """
    read = num_keys * limits.KEY_BYTES + num_unique * (limits.INDEX_LINE_BYTES + row_bytes)
    return read + num_keys * dim * limits.FLOAT_BYTES


def latencies(call: Callable[[Any], Any], sets: Sequence[Any], num_calls: int) -> list[float]:
    """Returns the milliseconds of several calls, each waited for before the next."""
    for inputs in sets:
        jax.block_until_ready(call(inputs))
    found, begin = [], time.perf_counter()
    for number in range(num_calls):
        start = time.perf_counter()
        jax.block_until_ready(call(sets[number % len(sets)]))
        end = time.perf_counter()
        found.append((end - start) * 1e3)
        if end - begin > LATENCY_S and 3 * len(found) >= num_calls:
            break
    return found


@dataclasses.dataclass
class _Run:
    """The objects that all measurements of a run share."""

    recorder: Recorder
    protocol: Protocol
    copy_gb_s: float
    is_quick: bool
    later: list[Callable[[], None]]
    """Measurements that run at the end."""

    def all_ways(self, workload: str, filled: Filled, shape: tuple[int, ...], seed: int) -> None:
        """Measures the three execution modes over the same keys; raises if their results differ."""
        ids = draw(filled, shape, 1, seed)
        results = [
            jax.tree.leaves(jax.jit(_FUNCTIONS[way], donate_argnums=())(*_arguments(way, filled, ids[0])))
            for way in ("fused", "unfused")
        ]
        results.append([table[rows] for table, rows in zip(filled.static, ids[0], strict=True)])
        if not all(
            bool(jnp.array_equal(*pair)) for other in results[1:] for pair in zip(results[0], other, strict=True)
        ):
            raise RuntimeError(f"bench_serving: {workload}: the ways disagree; their times would mean nothing.")
        del results
        for way in WAYS:
            with self.recorder.attempt(f"serving {workload} {shape[0]} samples {way}"):
                self.measure_mode(workload, way, filled, shape, seed, "float32")
        if workload == "S1":
            self.later.append(lambda: self._floor(filled, shape, seed))

    def measure_mode(
        self, workload: str, way: str, filled: Filled, shape: tuple[int, ...], seed: int, dtype: str
    ) -> None:
        """Measures one mode: latency, back to back; its kernels at the end."""
        ids = draw(filled, shape, self.protocol.num_key_sets, seed)
        carry = filled.static if way == "take" else filled.tables
        sets = [_arguments(way, filled, call_ids)[1] for call_ids in ids]
        step = Step(_FUNCTIONS[way], donates=False)
        num_calls = QUICK_CALLS if self.is_quick else CALLS
        found = latencies(lambda inputs: step.run(carry, inputs)[1], sets, num_calls)
        back_to_back, _ = step.measure(carry, sets, self.protocol)
        num_keys = len(ids[0]) * int(np.prod(shape))
        num_unique = _num_unique(ids[0])
        moved = lookup_bytes(num_keys, num_unique, DIM, next(iter(filled.tables.tables.values())).row_bytes)
        notes = {
            "part": "serving",
            "num_samples": shape[0],
            "dtype": dtype,
            "way": way,
            "p99_ms": float(np.percentile(found, 99)),
            "back_to_back_ms": back_to_back.ms,
        }
        if workload == "S1":
            length = QUICK_IN_A_ROW if self.is_quick else IN_A_ROW
            many = [_arguments(way, filled, call_ids)[1] for call_ids in draw(filled, shape, length, seed)]
            notes["in_a_row_ms"] = step.measure_in_a_row(carry, many, self.protocol)[0].ms
        record = Record(
            workload,
            records.SERVED,
            "jaxsok" if way != "take" else "xla",
            summary(found, 1),
            distribution="uniform",
            variant=f"{shape[0]} samples, {dtype}, {way}",
            num_keys=num_keys,
            num_unique=num_unique,
            moved_bytes=moved,
            limit_ms=moved / self.copy_gb_s * 1e-6,
            notes=notes,
        )
        self.recorder.add(record)
        if jax.default_backend() != "cpu":
            self.later.append(lambda: self._kernels(record, step, carry, sets))

    def _kernels(self, record: Record, step: Step, carry: Any, sets: Sequence[Any]) -> None:
        """Returns the profiler's kernels of a program that was measured."""
        label = f"serving {record.workload} {record.variant}, kernels"
        if not self.recorder.has_time(label):
            return
        with self.recorder.attempt(label):
            kernels, _ = step.kernels(carry, sets)
            if not kernels:
                self.recorder.skip(label, "the profiler saw no kernel")
                return
            notes = {**record.notes, "num_kernels": sum(count for count, _ in kernels.values())}
            notes["kernels"] = dict(list(kernels.items())[:12])
            plain = cuda_kernels.load_kernels(4) if record.workload == "S1" else None
            if plain is not None:
                notes["launches_ms"] = plain.nothing(round(notes["num_kernels"]), self.protocol).ms
            total = summary([sum(ms for _, ms in kernels.values())], 1)
            self.recorder.add(dataclasses.replace(record, what=records.SERVED_KERNELS, timing=total, notes=notes))

    def _floor(self, filled: Filled, shape: tuple[int, ...], seed: int) -> None:
        """Measures S1's floor: its bytes at the bandwidth of a copy, and one launch."""
        with self.recorder.attempt("serving S1, floor"):
            self._add_floor(filled, shape, seed)

    def _add_floor(self, filled: Filled, shape: tuple[int, ...], seed: int) -> None:
        (ids,) = draw(filled, shape, 1, seed)
        num_keys = len(ids) * int(np.prod(shape))
        moved = lookup_bytes(num_keys, _num_unique(ids), DIM, DIM * limits.FLOAT_BYTES)
        plain = cuda_kernels.load_kernels(4)
        launch = empty_program(self.protocol) if plain is None else plain.nothing(1, self.protocol)
        by = "xla" if plain is None else "cuda"
        floor_ms = moved / self.copy_gb_s * 1e-6 + launch.ms
        notes = {"part": "serving", "num_samples": shape[0], "dtype": "float32", "launch_ms": launch.ms}
        self.recorder.add(
            Record(
                "S1",
                records.SERVED_FLOOR,
                "limit",
                summary([floor_ms], 1),
                distribution="uniform",
                variant=f"{shape[0]} samples, float32",
                num_keys=num_keys,
                num_unique=_num_unique(ids),
                moved_bytes=moved,
                by=by,
                notes=notes,
            )
        )


def draw(filled: Filled, shape: tuple[int, ...], num_sets: int, seed: int) -> list[list[np.ndarray]]:
    """Returns row numbers by set and table, int32."""
    rng = np.random.default_rng(seed)
    return [[rng.integers(0, filled.num_rows, shape, dtype=np.int32) for _ in filled.names] for _ in range(num_sets)]


def empty_program(protocol: Protocol) -> Timing:
    """Measures the dispatch of a program that adds one to a number, as a launch where CUDA graphs are missing."""
    step = Step(lambda carry, term: (carry + term, ()), donates=True)
    return step.measure(jnp.zeros(()), [jnp.float32(1.0)], protocol)[0]


def _arguments(way: str, filled: Filled, ids: Sequence[np.ndarray]) -> tuple[Any, Any]:
    """Returns a mode's arguments, on the device."""
    if way == "take":
        return filled.static, [jnp.asarray(table_ids) for table_ids in ids]
    keys = [jnp.asarray(keys_of(number, table_ids)) for number, table_ids in enumerate(ids)]
    return filled.tables, dict(zip(filled.names, keys, strict=True))


def _num_unique(ids: Sequence[np.ndarray]) -> int:
    return sum(np.unique(table_ids).size for table_ids in ids)


def _cast(rows: jax.Array, dtype: str, factor: float) -> jax.Array:
    return jax.jit(lambda rows: (rows * jnp.float32(factor)).astype(jnp.dtype(dtype)))(rows)
