"""The insertion of new keys: its speed, with the bytes of the rows and without.

Question: what does inserting cost alone, with rows of one float?
Workload: H1's rows and keys a call, rows of 1 and of 64 floats, SGD; an empty table is filled to load 0.5.
Limit:    the bytes that must move (`limits.insert_bytes`) at the bandwidth of a copy.
Command:  `python -m jaxsok bench --only insert`
Last result: docs/performance.md (H200, commit 7db9096).

"Without the rows' bytes" subtracts the time in which a copy would move them, so that dims can be compared.
"""

from .bench_table import HashTable
from .records import Recorder
from .timing import Protocol
from .workloads import HashWorkload

DIMS = (1, 64)


def measure(workload: HashWorkload, recorder: Recorder, protocol: Protocol, copy_gb_s: float) -> None:
    """Measures both widths."""
    for dim in DIMS:
        with recorder.attempt(f"insert D {dim}"):
            HashTable(workload, dim).insert_new(recorder, protocol, copy_gb_s, part="insert")
