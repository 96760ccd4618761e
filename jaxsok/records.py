"""Rows of a table with their keys, state and statistics, as NumPy arrays, for exports, imports and files."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np


@dataclasses.dataclass(frozen=True)
class Records:
    """Some rows of one table, on the host; each array has an entry per row."""

    keys: np.ndarray
    """uint64[num_rows], distinct."""
    rows: np.ndarray
    """[num_rows, dim] in the dtype of the table."""
    state: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """Optimizer state by name, float32[num_rows, dim or 1]; empty: it is not known."""
    last_step: np.ndarray | None = None
    """uint32[num_rows]; None: not kept."""
    frequency: np.ndarray | None = None
    """uint32[num_rows]; None: not kept."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.keys.shape[0]

    def take(self, lines: np.ndarray | slice) -> "Records":
        """Returns some of the rows, by number, mask or slice."""
        return Records(
            self.keys[lines],
            self.rows[lines],
            {name: array[lines] for name, array in self.state.items()},
            None if self.last_step is None else self.last_step[lines],
            None if self.frequency is None else self.frequency[lines],
        )


def join_records(parts: Sequence[Records]) -> Records:
    """Concatenates at least one part; leaves out arrays that some part lacks."""

    def column(name: str) -> np.ndarray | None:
        arrays = [getattr(part, name) for part in parts]
        return None if any(array is None for array in arrays) else np.concatenate(arrays)

    names = [name for name in parts[0].state if all(name in part.state for part in parts)]
    return Records(
        np.concatenate([part.keys for part in parts]),
        np.concatenate([part.rows for part in parts]),
        {name: np.concatenate([part.state[name] for part in parts]) for name in names},
        column("last_step"),
        column("frequency"),
    )


def make_batch(schema: Any, *columns: np.ndarray) -> Any:
    """Makes Arrow's record batch of `[num_rows]` and `[num_rows, dim]`; arrays that lie in one piece are not copied."""
    import pyarrow as pa

    arrays = []
    for field, column in zip(schema, columns, strict=True):
        flat = pa.array(np.ascontiguousarray(column).reshape(-1))
        arrays.append(flat if column.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, type=field.type))
    return pa.record_batch(arrays, schema=schema)


def round_to(rows: np.ndarray, dtype: Any) -> np.ndarray:
    """Rounds rows to another float dtype as the kernels do: to nearest, and finite numbers stay finite."""
    if rows.dtype == dtype:
        return rows
    wide = rows.astype(np.float32)
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    return np.where(np.isfinite(wide), np.clip(wide, -largest, largest), wide).astype(dtype)


def convert_to(what: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Converts to another float dtype; refuses finite numbers that would become infinite."""
    with np.errstate(over="ignore"):
        result = array.astype(dtype, copy=False)
    is_wider = array.dtype.itemsize < dtype.itemsize
    if result is not array and not is_wider and np.isfinite(result).sum() != np.isfinite(array).sum():
        raise ValueError(f"{what}: got a number beyond the range of {dtype.name}, wanted numbers within it.")
    return result


def regroup(pieces: Iterable[Any], num_rows: int, join: Callable[[list[Any]], Any]) -> Iterator[Any]:
    """Regroups pieces of any size (Records, or others with `take`) to pieces of `num_rows`, the last with the rest."""
    held, num_held = [], 0
    for piece in pieces:
        held.append(piece)
        num_held += piece.num_rows
        while num_held >= num_rows:
            whole = held[0] if len(held) == 1 else join(held)
            yield whole.take(slice(0, num_rows))
            held, num_held = [whole.take(slice(num_rows, None))], num_held - num_rows
    if num_held:
        yield join(held)


def hottest_rows(chunks: Iterable[Records], num_rows: int) -> Records:
    """Selects the rows of highest frequency, the first among equal rows; without frequencies, the first rows."""
    parts, num_kept, are_known = [], 0, True
    for records in chunks:
        parts.append(records)
        num_kept += records.num_rows
        are_known = are_known and records.frequency is not None
        if not are_known and num_kept >= num_rows:
            break
        if are_known and num_kept > 2 * num_rows:
            parts = [_top(parts, num_rows)]
            num_kept = num_rows
    return _top(parts, num_rows) if parts else Records(np.zeros(0, np.uint64), np.zeros((0, 1), np.float32))


def _top(parts: Sequence[Records], num_rows: int) -> Records:
    whole = join_records(parts)
    if whole.frequency is None:
        return whole.take(slice(num_rows))
    return whole.take(np.argsort(-whole.frequency.astype(np.int64), kind="stable")[:num_rows])
