"""What people read: columns, and bytes in units. For what the planner and the estimate of memory print."""

import math
from collections.abc import Sequence


def aligned(head: Sequence[str], body: Sequence[Sequence[str]], is_text: Sequence[int]) -> list[str]:
    """The lines of a table: columns of text to the left, of numbers to the right."""
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in is_text else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *body)
    ]


def each_device(num_shards: int) -> str:
    """Where everything is that is counted by device: as "each of 8 devices"."""
    return "the device" if num_shards == 1 else f"each of {num_shards} devices"


def in_units(num_bytes: float) -> str:
    """As people read it: 1536 is "1.5 KiB"."""
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    power = min(int(math.log2(num_bytes)) // 10, 4)
    return f"{num_bytes / 1024**power:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"
