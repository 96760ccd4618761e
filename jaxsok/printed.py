"""Text for people: columns, bytes in units, arrays by their shapes; for reports and `repr`."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax


def format_columns(head: Sequence[str], body: Sequence[Sequence[str]], is_text: Sequence[int]) -> list[str]:
    """Formats the lines of a table: text columns to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in is_text else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *body)
    ]


def name_devices(num_shards: int) -> str:
    """Names the place of per-device numbers, as "each of 8 devices"."""
    return "the device" if num_shards == 1 else f"each of {num_shards} devices"


def format_bytes(num_bytes: float) -> str:
    """Formats bytes in a readable unit: 1536 is "1.5 KiB"."""
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    power = min(int(math.log2(num_bytes)) // 10, 4)
    return f"{num_bytes / 1024**power:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"


def join_items(items: Iterable[str], most: int = 8) -> str:
    """Joins items by commas, and counts those beyond `most`: "user, item, 1 more"."""
    items = list(items)
    return ", ".join(items[:most] + ([f"{len(items) - most} more"] if len(items) > most else []))


def describe_value(value: Any) -> str:
    """Describes an array by dtype and shape (float32[2,3]), a plain value as it is, others by type; reads no array."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None:
        return f"{dtype}[{','.join(map(str, shape))}]"
    if value is None or isinstance(value, (bool, int, float)) or (isinstance(value, str) and len(value) <= 20):
        return repr(value)
    return type(value).__name__


def condition_of(tree: Any) -> list[str]:
    """Names the conditions "traced" and "deleted" that arrays of a tree have; waits for nothing."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    is_traced = [isinstance(leaf, jax.core.Tracer) for leaf in arrays]
    is_deleted = any(leaf.is_deleted() for leaf, traced in zip(arrays, is_traced, strict=True) if not traced)
    return ["traced"] * any(is_traced) + ["deleted"] * is_deleted
