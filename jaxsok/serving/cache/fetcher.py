"""Rows from the source below a device cache, as it stores them."""

from collections.abc import Iterable, Sequence

import jax.numpy as jnp
import numpy as np

from jaxsok.records import Records, joined
from jaxsok.serving.backing import RowSource
from jaxsok.serving.frozen import FrozenTable, rounded

Lines = tuple[np.ndarray, ...]  # rows as a cache stores them: float32, or numbers and scales


def fetch(source: RowSource, name: str, keys: np.ndarray) -> tuple[Lines, np.ndarray]:
    """Fetches the rows of those keys that a table has, as a cache stores them, and which keys these are."""
    table = source.tables[name]
    if table.is_quantized:
        numbers, scales, is_found = source.fetch_quantized(name, keys)
        is_found = np.asarray(is_found, bool)
        shapes, wanted = (numbers.shape, scales.shape), ((len(keys), table.dim), (len(keys),))
        dtypes = numbers.dtype, scales.dtype
        if shapes != wanted or dtypes != (jnp.dtype(table.dtype), np.float32) or is_found.shape != wanted[1]:
            raise RuntimeError(
                f'DeviceCache: table "{name}": got {dtypes} of {shapes} of {type(source).__name__}.'
                f"fetch_quantized, wanted {table.dtype} and float32 of {wanted}."
            )
        return (numbers[is_found], scales[is_found]), is_found
    rows, is_found = source.fetch(name, keys)
    is_found = np.asarray(is_found, bool)
    wanted = (len(keys), table.dim)
    if rows.shape != wanted or rows.dtype != np.float32 or is_found.shape != wanted[:1]:
        raise RuntimeError(
            f'DeviceCache: table "{name}": got {rows.dtype}{list(rows.shape)} and found{list(is_found.shape)} of '
            f"{type(source).__name__}.fetch, wanted float32{list(wanted)} and bool[{wanted[0]}]."
        )
    return round_rows(table, rows[is_found]), is_found


def round_rows(table: FrozenTable, rows: np.ndarray) -> Lines:
    """Rounds rows to what a store holds: an answer is the same whether its row was cached or fetched."""
    if table.dtype == "float32":
        return (np.asarray(rows, np.float32),)
    return (rounded(rows, table.dtype).astype(np.float32),)


def take(lines: Lines, which: np.ndarray) -> Lines:
    """Takes some of the rows."""
    return tuple(array[which] for array in lines)


def joined_lines(parts: Iterable[Lines]) -> Lines:
    """Joins rows of one dim and dtype."""
    return tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))


def hottest(chunks: Iterable[Records], num_rows: int) -> Records:
    """The rows of highest frequency, of equal ones the first; without frequencies the first ones."""
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
    whole = joined(parts)
    if whole.frequency is None:
        return whole.take(slice(num_rows))
    return whole.take(np.argsort(-whole.frequency.astype(np.int64), kind="stable")[:num_rows])
