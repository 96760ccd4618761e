"""Tables of records, with the comparisons that the terminal and the documentation show.

Fed by `records.py`; feeds `run.py` and `report.py`. The table of all workloads is `rows`; each part with something else
to say has a function of its own in `PARTS`.
"""

from collections.abc import Callable, Iterable, Sequence

from . import records as names
from .records import (
    ALL_TO_ALL,
    EVALUATION,
    FIND_AND_GATHER,
    FORWARD,
    GATHER,
    READ_MODIFY_WRITE,
    STEP,
    TRAINING,
    Record,
)
from .timing import HOST_BOUND

WHOLE = ("single", "pipelined")
"""The programs that leave nothing of a step out: only they are compared with peers."""

TORCHREC = {
    ("M1", TRAINING): (5.02, 3.16),
    ("M1", STEP): (8.23, 4.90),
    ("M1-64", TRAINING): (3.79, 3.12),
    ("M1-64", STEP): (5.49, 4.67),
}
"""Milliseconds of TorchRec 1.6.1 (FBGEMM 1.6.0) on 8 H200s, row-wise and table-wise: published, not measured here."""

TORCHREC_DEVICES = 8

PEER_WHAT = {EVALUATION: FORWARD, TRAINING: FORWARD}
"""The name under which a peer's record of the same work stands, where it has another."""

LIMIT_WHAT = {
    EVALUATION: (GATHER,),
    TRAINING: (GATHER,),
    FORWARD: (GATHER,),
    STEP: (GATHER, READ_MODIFY_WRITE),
    FIND_AND_GATHER: (GATHER,),
}
"""The limits whose times, one after the other, no version of this work undercuts."""


NOTHING = "-"
"""The cell of a number that was not measured or has no meaning."""

COLUMNS = (
    "workload",
    "what",
    "ms",
    "spread",
    "host ms",
    "M keys/s",
    "GB/s",
    "limit ms",
    "of limit",
    "XLA ÷",
    "FBGEMM unchecked ÷",
    "FBGEMM default ÷",
)
"""Columns: `host ms` is an empty step; the last three are the peer's time over jaxsok's: above 1 jaxsok is faster."""

KEY_COLUMNS = ("workload", "keys", "unique", "rows", "load")
"""Columns of the table of keys, for one batch; the load is that of the index."""


PEER_COLUMNS = ("workload", "what", "who", "ms", "spread", "GB/s")


def rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Makes the table of jaxsok's records, each with its limit and its peers, as text."""
    records = _select_workloads(records)
    found = {_place(record): record for record in records}

    def peer(record: Record, subject: str) -> Record | None:
        what = PEER_WHAT.get(record.what, record.what)
        place = (record.workload, record.distribution)
        return found.get((subject, *place, record.optimizer, record.variant, what))

    table = []
    for record in records:
        if record.subject != "jaxsok":
            continue
        ms = record.timing.ms
        limit_ms = limit_of(record, found)
        ratios = [peer(record, subject) for subject in ("xla", "fbgemm_unchecked", "fbgemm_default")]
        table.append(
            (
                " ".join(part for part in (record.workload, record.variant, record.distribution) if part),
                _what(record),
                f"{ms:.4g}{'*' if record.timing.is_host_bound else ''}",
                record.timing.spread_text,
                NOTHING if record.timing.host_ms is None else f"{record.timing.host_ms:.3g}",
                f"{record.num_keys / ms * 1e-3:.4g}",
                record.rate_text,
                NOTHING if limit_ms is None else f"{limit_ms:.4g}",
                NOTHING if limit_ms is None else f"{limit_ms / ms:.2f}",
                *(NOTHING if other is None else f"{other.timing.ms / ms:.2f}" for other in ratios),
            )
        )
    return table


def key_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Describes the batches: workload and distribution, keys, unique keys, rows of the store, load."""
    table = {}
    for record in _select_workloads(records):
        if record.subject == "jaxsok" and record.load is not None:
            name = " ".join(part for part in (record.workload, record.variant, record.distribution) if part)
            numbers = (record.num_keys, record.num_unique, record.notes.get("num_rows", 0))
            table[name] = (name, *(f"{number:,}" if number else NOTHING for number in numbers), f"{record.load:.3f}")
    return list(table.values())


def _select_workloads(records: Iterable[Record]) -> list[Record]:
    """Returns the records of one device that no other table shows."""
    return [record for record in records if not record.num_devices and not record.part]


def _place(record: Record) -> tuple[str, ...]:
    return record.subject, record.workload, record.distribution, record.optimizer, record.variant, record.what


def limit_of(record: Record, found: dict[tuple[str, ...], Record]) -> float | None:
    """Returns the sum of the limits of a record's work; None if one of them was not measured."""
    if record.limit_ms is not None:
        return record.limit_ms
    parts = []
    for what in LIMIT_WHAT.get(record.what, ()):
        # A gather has no optimizer; a read-modify-write has, since its state is part of what moves.
        optimizer = record.optimizer if what == READ_MODIFY_WRITE else ""
        part = found.get(("limit", record.workload, record.distribution, optimizer, record.variant, what))
        if part is None:
            return None
        parts.append(part.timing.ms)
    return sum(parts) if parts else None


def peer_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Lists the peers and the limits: workload, what, subject, ms, spread, GB/s."""
    return [
        (
            " ".join(part for part in (record.workload, record.variant, record.distribution) if part),
            _what(record),
            f"{record.subject}{f' ({record.by})' if record.by else ''}",
            f"{record.timing.ms:.4g}",
            record.timing.spread_text,
            record.rate_text,
        )
        for record in _select_workloads(records)
        if record.subject != "jaxsok"
    ]


EXCHANGE_COLUMNS = (
    "workload",
    "devices",
    "what",
    "program",
    "ms",
    "spread",
    "call ms",
    "k samples/s",
    "MB sent",
    "GB/s sent",
    "of the wire",
    "efficiency",
    "XLA ÷",
    "TorchRec row-wise, published, 8 GPUs",
    "TorchRec table-wise, published, 8 GPUs",
)
"""Columns of the table of meshes: the time until the call of a step returns; the bytes that one device sends; `of the
wire`, their rate over that of the bare all-to-all; efficiency against two devices; TorchRec's times, with their ratio
if the number of devices is the same."""


def exchange_rows(records: Sequence[Record], is_full_size: bool) -> list[tuple[str, ...]]:
    """Makes the table of meshes: each record with the wire, two devices, and the peers, as text.

    Args:
      records: of one run or of several, each on another number of devices.
      is_full_size: at full scale on GPUs, which TorchRec's times ask for.
    """
    found = {}
    for record in records:
        notes = record.notes
        if record.num_devices:
            key = (*_mesh_place(record), record.what, notes["program"], notes["wire"], notes["front_end"])
            found[(*key, notes["sharding"]) if "sharding" in notes else key] = record
    table = []
    for key, record in found.items():
        (workload, distribution, scaling, num_devices), what, notes = key[:4], record.what, record.notes
        ms = record.timing.ms
        is_step = notes["program"] in (*WHOLE, "planned", "take")
        is_peer_of = notes["program"] in WHOLE and record.subject == "jaxsok"
        limit = found.get((*key[:4], ALL_TO_ALL, "alone", notes["wire"], "jit"))
        base = found.get((workload, distribution, scaling, 2, *key[4:]))
        peer = found.get((*key[:4], PEER_WHAT.get(what, what), "take", "float32", "jit")) if is_peer_of else None
        ideal = 1.0 if scaling == "weak" else num_devices / 2
        program = " ".join(
            part
            for part in (notes["program"], *(notes[n] for n in ("wire", "front_end")), notes.get("sharding"))
            if part not in USUAL
        )
        sent = record.moved_bytes
        table.append(
            (
                f"{workload} {distribution} {scaling}",
                f"{num_devices}",
                f"{record.subject} {what}" if record.subject != "jaxsok" else what,
                program,
                f"{ms:.4g}",
                record.timing.spread_text,
                NOTHING if record.timing.call_ms is None else f"{record.timing.call_ms:.3g}",
                f"{notes['num_samples'] / ms:.4g}" if is_step else NOTHING,
                f"{sent * 1e-6:.4g}" if sent else NOTHING,
                f"{record.gigabytes_per_s:.3g}" if sent else NOTHING,
                f"{record.gigabytes_per_s / limit.gigabytes_per_s:.2f}" if sent and limit else NOTHING,
                f"{base.timing.ms / ms / ideal:.2f}" if base and num_devices >= 2 else NOTHING,
                f"{peer.timing.ms / ms:.2f}" if peer else NOTHING,
                *_torchrec_cells(record, is_peer_of and is_full_size and notes["wire"] == "float32"),
            )
        )
    return table


USUAL = ("float32", "jit", "torch", None)
"""Wire and front end that a table does not name."""


def _mesh_place(record: Record) -> tuple[str, str, str, int]:
    return record.workload, record.distribution, record.notes["scaling"], record.num_devices


def _torchrec_cells(record: Record, is_comparable: bool) -> tuple[str, str]:
    """Returns TorchRec's time for the same work, and the ratio if the number of devices is the same."""
    times = TORCHREC.get((record.workload, record.what))
    if times is None or not is_comparable or record.notes["scaling"] != "weak" or record.num_devices < 2:
        return NOTHING, NOTHING
    ratio = record.num_devices == TORCHREC_DEVICES
    row_wise, table_wise = (f"{ms} ms{f', {ms / record.timing.ms:.2f}' if ratio else ''}" for ms in times)
    return row_wise, table_wise


SMALL_COLUMNS = (
    "samples",
    "what",
    "dispatched ms",
    "on the device ms",
    "M keys/s",
    "kernels",
    "as many without work ms",
    "bytes ms",
    "of limit",
)
"""Columns for small batches: one program a step; several steps in one; floors; the larger floor over the faster."""


def small_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Lists small batches of W1 by size, after an empty program."""
    table = []
    floors = {record.variant: record for record in records if record.what == names.NO_WORK}
    for record in sorted(records, key=lambda record: record.notes.get("num_samples", 0)):
        notes, ms = record.notes, record.timing.ms
        if record.what == names.EMPTY:
            table.append((NOTHING, "an empty program", f"{ms:.4g}", *[NOTHING] * 6))
        elif record.subject == "jaxsok":
            floor = floors.get(record.what)
            limit_ms = max(record.limit_ms, floor.timing.ms if floor else 0.0)
            table.append(
                (
                    f"{notes['num_samples']}",
                    _what(record),
                    f"{record.timing.dispatch_ms:.4g}",
                    f"{notes['device_ms']:.4g}",
                    f"{record.num_keys / ms * 1e-3:.4g}",
                    NOTHING if floor is None else f"{floor.notes['num_kernels']:g}",
                    NOTHING if floor is None else f"{floor.timing.ms:.4g}",
                    f"{record.limit_ms:.3g}",
                    f"{limit_ms / ms:.2f}",
                )
            )
    return table


SKEW_COLUMNS = ("workload", "keys", "what", "ms", "spread", "ns a key", "GB/s", "of limit", "time ÷ uniform")
"""Columns for skew: the last is the time over that of uniform keys in the same shape, or of bags of one key."""


def skew_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Lists one key repeated, and bags of three lengths."""
    table = []
    for record in records:
        is_base = record.distribution == "uniform" and record.variant in ("", "bags of 1")
        same = [other for other in records if (other.workload, other.what) == (record.workload, record.what)]
        uniform = (other for other in same if other.distribution == "uniform" and other.variant in ("", "bags of 1"))
        base = next(uniform, None)
        per_key = record.timing.ms / record.num_keys
        ratio = NOTHING if base is None or is_base else f"{per_key / (base.timing.ms / base.num_keys):.2f}"
        keys = ", ".join(part for part in (record.distribution, record.variant) if part)
        table.append(
            (
                record.workload,
                keys,
                _what(record),
                f"{record.timing.ms:.4g}",
                record.timing.spread_text,
                f"{per_key * 1e6:.4g}",
                record.rate_text,
                _share_of_limit(record),
                ratio,
            )
        )
    return table


DIM_COLUMNS = ("dim", "rows", "what", "ms", "spread", "M keys/s", "GB/s", "of a copy", "÷ next multiple of 4")
"""Columns for dims: the last is the rate in GB/s over that of the next multiple of 4."""


def dim_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Lists every dim and dtype of rows, by dim."""
    found = {(record.notes["dim"], record.notes["dtype"], _what(record)): record for record in records}
    table = []
    for (dim, dtype, what), record in sorted(found.items()):
        base = found.get((-(-dim // 4) * 4, dtype, what)) if dim % 4 else None
        table.append(
            (
                f"{dim}",
                dtype,
                what,
                f"{record.timing.ms:.4g}",
                record.timing.spread_text,
                f"{record.num_keys / record.timing.ms * 1e-3:.4g}",
                record.rate_text,
                _share_of_limit(record),
                f"{record.gigabytes_per_s / base.gigabytes_per_s:.2f}" if base else NOTHING,
            )
        )
    return table


SCALE_COLUMNS = ("what", "", "ms", "spread", "M keys/s", "of limit", "more")
"""Columns for size, growth and churn."""


def scale_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Lists lookups by the size of the table, growing, building, churn."""
    return [
        (
            record.what,
            record.variant,
            f"{record.timing.ms:.4g}",
            record.timing.spread_text,
            f"{record.num_keys / record.timing.ms * 1e-3:.4g}" if record.num_keys else NOTHING,
            _share_of_limit(record),
            _scale_notes(record),
        )
        for record in records
    ]


def _scale_notes(record: Record) -> str:
    notes = record.notes
    if record.what == names.GROW:
        peak = "" if notes["peak_after"] is None else f", at its peak {notes['peak_after'] * 1e-9:.1f} GB"
        in_use = "" if notes["in_use_after"] is None else f"; {notes['in_use_before'] * 1e-9:.1f} GB in use, then "
        in_use += "" if notes["in_use_after"] is None else f"{notes['in_use_after'] * 1e-9:.1f}"
        moved = "no row moved" if notes["rows_stay"] else "ROWS MOVED"
        return f"{notes['num_rows']:,} → {notes['capacity']:,} rows, {moved}{in_use}{peak}"
    if record.what == FIND_AND_GATHER:
        return f"{notes['bytes'] * 1e-9:.1f} GB, {notes['num_slabs']} slabs"
    if record.what == names.FILL:
        share = "" if notes["memory"] is None else f", {notes['bytes'] / notes['memory']:.0%} of the device's memory"
        return f"{notes['num_rows']:,} rows, {notes['bytes'] * 1e-9:.1f} GB{share}; growth and its compiling included"
    if record.what == names.CHURN:
        made = f", {notes['round_ms']:.3g} ms a round" if "round_ms" in notes else ""
        rounds = f"{notes['rounds']} rounds of {notes['num_changed']:,} keys{made}; " if made else ""
        return f"{rounds}{notes['num_rows']:,} rows, longest probe {notes['longest_probe']}"
    return ""


INSERT_COLUMNS = ("keys", "ms", "spread", "M keys/s", "M keys/s without the rows' bytes", "GB/s", "of limit")
"""Columns for inserting: without the time in which a copy moves the rows."""


def insert_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Lists insertions of new keys, by the dim of the rows."""
    return [
        (
            record.variant,
            f"{record.timing.ms:.4g}",
            record.timing.spread_text,
            f"{record.num_keys / record.timing.ms * 1e-3:.4g}",
            f"{record.num_keys / (record.timing.ms - record.notes['row_bytes_ms']) * 1e-3:.4g}",
            record.rate_text,
            _share_of_limit(record),
        )
        for record in records
    ]


EVICT_COLUMNS = ("table", "what", "ms", "spread", "M rows/s", "GB/s", "of a copy's bandwidth", "more")
"""Columns for eviction: rows are those of the table, or those that leave in the hand-over."""


def evict_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Lists selecting rows, releasing them, both together, and the index's share."""
    return [
        (
            record.variant,
            record.what,
            f"{record.timing.ms:.4g}",
            record.timing.spread_text,
            f"{record.num_keys / record.timing.ms * 1e-3:.4g}",
            f"{record.gigabytes_per_s:.4g}",
            _share_of_limit(record),
            f"{record.notes['num_gone']:,} of {record.notes['num_rows']:,} rows go",
        )
        for record in records
    ]


LIFE_COLUMNS = (
    "what",
    "keys or table",
    "statistics and admission",
    "ms",
    "spread",
    "time ÷ without",
    "GB/s",
    "of the link",
)
"""Columns for statistics, admission and exports."""


def life_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Lists forwards and steps with statistics and admission over those without; compares an export with the link."""
    plain = {(record.what, record.distribution): record.timing.ms for record in records if record.variant == "without"}
    return [
        (
            record.what,
            record.distribution or record.variant,
            record.variant if record.distribution else NOTHING,
            f"{record.timing.ms:.4g}",
            record.timing.spread_text,
            f"{record.timing.ms / plain[record.what, record.distribution]:.3f}"
            if (record.what, record.distribution) in plain
            else NOTHING,
            f"{record.gigabytes_per_s:.4g}" if record.moved_bytes else NOTHING,
            _share_of_limit(record) if record.moved_bytes else NOTHING,
        )
        for record in records
    ]


CPU_COLUMNS = ("keys", "who", "ms", "spread", "M keys/s", "jaxsok's time ÷ this")
"""Columns for the comparison on a CPU."""


def cpu_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Lists lookup and update with SGD: jaxsok, a static table in XLA, torch."""
    ours = {record.distribution: record.timing.ms for record in records if record.subject == "jaxsok"}
    return [
        (
            record.distribution,
            record.subject,
            f"{record.timing.ms:.4g}",
            record.timing.spread_text,
            f"{record.num_keys / record.timing.ms * 1e-3:.4g}",
            f"{ours[record.distribution] / record.timing.ms:.2f}" if record.distribution in ours else NOTHING,
        )
        for record in records
    ]


INPUT_COLUMNS = (
    "workload",
    "what",
    "who",
    "keys",
    "threads",
    "workers",
    "ms",
    "spread",
    "M keys/s",
    "M samples/s",
    "cores",
    "GB/s",
    "of limit",
)
"""Columns for `input`: packing's limit is a copy of as many bytes by as many threads; a fed step's, a packed step."""


def input_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Lists packing, copies on the host and to the device, and steps, by workload."""
    return [
        (
            record.workload,
            _what(record),
            record.by or record.subject,
            record.variant,
            f"{record.notes['num_threads'] or NOTHING}",
            f"{record.notes.get('num_workers') or NOTHING}",
            f"{record.timing.ms:.4g}",
            record.timing.spread_text,
            f"{record.num_keys / record.timing.ms * 1e-3:.4g}",
            f"{record.notes['num_samples'] / record.timing.ms * 1e-3:.3g}"
            if "num_samples" in record.notes
            else NOTHING,
            f"{record.notes['cores']:.1f}" if "cores" in record.notes else NOTHING,
            record.rate_text if record.moved_bytes else NOTHING,
            _share_of_limit(record),
        )
        for record in records
    ]


SERVING_COLUMNS = (
    "workload",
    "samples",
    "rows",
    "way",
    "ms",
    "99th percentile",
    "back to back ms",
    "in a row ms",
    "kernels ms",
    "launches",
    "floor ms",
    "ms ÷ fused",
)
"""Columns for serving: a caller's wait; a call among many; one of several in a program; the device alone; the floor."""


def serving_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Lists S1, and the DLRM shape by samples and dtype of rows, in each execution mode."""
    on_device = {(record.workload, record.variant): record for record in records if record.what == names.SERVED_KERNELS}
    floors = {record.workload: record.timing.ms for record in records if record.what == names.SERVED_FLOOR}
    served = [record for record in records if record.what == names.SERVED]
    fused = {_served_shape(record): record.timing.ms for record in served if record.notes["way"] == "fused"}
    table = []
    for record in served:
        notes, kernels = record.notes, on_device.get((record.workload, record.variant))
        base = fused.get(_served_shape(record))
        is_fused = notes["way"] == "fused"
        table.append(
            (
                record.workload,
                f"{notes['num_samples']}",
                notes["dtype"],
                notes["way"],
                f"{record.timing.ms:.4g}",
                f"{notes['p99_ms']:.4g}",
                f"{notes['back_to_back_ms']:.4g}",
                f"{notes['in_a_row_ms']:.4g}" if "in_a_row_ms" in notes else NOTHING,
                NOTHING if kernels is None else f"{kernels.timing.ms:.4g}",
                NOTHING if kernels is None else f"{kernels.notes['num_kernels']:g}",
                f"{floors.get(record.workload, record.limit_ms):.3g}" if is_fused else NOTHING,
                NOTHING if is_fused or base is None else f"{record.timing.ms / base:.2f}",
            )
        )
    return table


def _served_shape(record: Record) -> tuple[str, int, str]:
    return record.workload, record.notes["num_samples"], record.notes["dtype"]


FRESH_COLUMNS = (
    "what",
    "of",
    "ms",
    "spread",
    "99th percentile",
    "most",
    "changed rows/s",
    "pause ms",
    "export ms",
    "publish ms",
)
"""Columns for freshness: the delay of a version, and lookups without and with updates."""


def fresh_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Lists delays, then lookups."""
    return [
        (
            record.what,
            record.variant,
            f"{record.timing.ms:.4g}",
            record.timing.spread_text,
            f"{record.notes['p99_ms']:.4g}" if "p99_ms" in record.notes else NOTHING,
            f"{record.notes['max_ms']:.4g}",
            *(
                f"{record.notes[name]:,.0f}" if name in record.notes else NOTHING
                for name in ("rows_per_s", "pause_ms", "export_ms", "publish_ms")
            ),
        )
        for record in records
    ]


CACHE_COLUMNS = (
    "what",
    "keys",
    "to",
    "in the cache",
    "who",
    "hit rate",
    "ms",
    "99th percentile",
    "M keys/s",
    "M keys/s, 4 threads",
    "limit ms",
    "of limit",
)
"""Columns for a cache over rows in host memory: the wait for one lookup, and several threads; shares of one lookup."""


def cache_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Lists the link, then lookups by their keys, place and hit rate, each next to its peers."""
    link = [
        (record.what, *[NOTHING] * 5, f"{record.timing.ms:.4g}", *[NOTHING] * 4, f"{record.rate_text} GB/s")
        for record in records
        if record.what in (names.LINK, names.TO_HOST)
    ]
    order = lambda one: (-one.num_keys, one.notes["to_host"], one.notes["wanted"] is None, one.notes["wanted"] or 0.0)  # noqa: E731
    return link + [
        (
            record.what,
            f"{record.num_keys:,}",
            "host" if record.notes["to_host"] else "device",
            NOTHING if record.notes["wanted"] is None else f"{record.notes['wanted']:.0%}",
            f"{record.subject}{f' ({record.by})' if record.by else ''}",
            f"{record.notes['hit_rate']:.3f}" if record.notes.get("hit_rate") is not None else NOTHING,
            f"{record.timing.ms:.4g}",
            f"{record.notes['p99_ms']:.4g}",
            f"{record.num_keys / record.timing.ms * 1e-3:.4g}",
            f"{record.notes['threads_keys_per_s'] * 1e-6:.4g}" if "threads_keys_per_s" in record.notes else NOTHING,
            NOTHING if record.limit_ms is None else f"{record.limit_ms:.4g}",
            _share_of_limit(record),
        )
        for record in sorted(
            (one for one in records if one.what in (names.CACHED, names.FROM_HOST, names.FROM_C, names.FETCH)),
            key=order,
        )
    ]


HTTP_COLUMNS = (
    "what",
    "of",
    "requests/s",
    "p50 ms",
    "p99 ms",
    "p99.9 ms",
    "errors",
    "clients alone/s",
    "notes",
)
"""Columns for the HTTP server; "clients alone": what they ask of servers that do nothing."""


def http_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Lists loads, then updates, memory and the restart."""
    return [
        (
            record.what,
            record.variant,
            f"{record.notes['requests_per_s']:,.0f}",
            f"{record.timing.ms:.4g}",
            f"{record.notes['p99_ms']:.4g}",
            f"{record.notes['p999_ms']:.4g}",
            f"{record.notes['errors']}",
            f"{record.notes['clients_alone_per_s']:,.0f}" if "clients_alone_per_s" in record.notes else NOTHING,
            _http_note(record),
        )
        for record in records
    ]


def _http_note(record: Record) -> str:
    notes = record.notes
    if record.what == names.HTTP_MEMORY:
        return f"{notes['early_bytes'] / 1e6:.1f} MB, then {100 * notes['growth']:+.2f}%"
    if record.what == names.HTTP_RESTART:
        stop, start = (f"{notes[name]:.2f} s" for name in ("stop_s", "first_answer_s"))
        refused = f"{notes['refused_connections']} connections refused"
        return f"{stop} to end, {start} to the first answer, {notes['without_answer_s']:.2f} s without any; {refused}"
    if record.what == names.HTTP_UPDATE:
        return f"{notes['num_versions']} versions"
    parts = (
        f", {notes['cpu_us']:.0f} µs a request, {notes['tables_us']:.0f} where the tables are"
        if "cpu_us" in notes
        else ""
    )
    if "late_p99_ms" in notes:
        parts += f"; sent up to {notes['late_p99_ms']:.2f} ms late (99th percentile)"
    return f"{notes['cores']:.2f} cores{parts}"


DEVICES_COLUMNS = ("devices", "as", "keys", "M keys/s", "÷ one device", "ms", "99th percentile")
"""Columns for a session on several devices."""


def devices_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Lists numbers of devices."""
    return [
        (
            f"{record.notes['on']}",
            record.notes["way"],
            f"{record.num_keys:,}",
            f"{record.notes['keys_per_s'] * 1e-6:.4g}",
            f"{record.notes['over_one']:.2f}" if record.notes["over_one"] else NOTHING,
            f"{record.timing.ms:.4g}",
            f"{record.notes['p99_ms']:.4g}",
        )
        for record in records
    ]


DCNV2_COLUMNS = (
    "keys",
    "devices",
    "what",
    "rows",
    "wire",
    "distinct keys",
    "ms",
    "spread",
    "M samples/s",
    "threads",
    "cores",
)
"""Columns for DLRM-DCNv2: the wire has the dtypes of rows and of gradients; threads are those that read."""


def dcnv2_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Lists training from files, its parts, and TorchRec's step on batches that were made before."""
    return [
        (
            record.distribution,
            f"{record.notes['num_devices']}",
            ("" if record.subject == "jaxsok" else f"{record.subject} ")
            + ", ".join(part for part in (_what(record), record.variant) if part),
            record.notes["rows"],
            record.notes["wire"],
            f"{record.num_unique:,}",
            f"{record.timing.ms:.4g}",
            record.timing.spread_text,
            f"{record.notes['num_samples'] / record.timing.ms * 1e-3:.3g}",
            f"{record.notes.get('num_threads', NOTHING)}",
            f"{record.notes['cores']:.1f}" if "cores" in record.notes else NOTHING,
        )
        for record in records
    ]


TIER_COLUMNS = (
    "workload",
    "optimizer",
    "rows",
    "what",
    "ms",
    "spread",
    "÷ on the device",
    "hits",
    "read",
    "written",
    "limit ms",
    "of limit",
)
"""Columns for tables in host memory: the throughput against all rows on the device; distinct rows of a step."""


def tier_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Lists steps with caches of several sizes."""
    return [
        (
            record.workload,
            record.optimizer,
            record.variant,
            _what(record) if record.subject == "jaxsok" else f"{record.what}, {record.subject} {record.by}".strip(),
            f"{record.timing.ms:.4g}",
            record.timing.spread_text,
            f"{record.notes['throughput']:.2f}" if record.notes.get("throughput") else NOTHING,
            *(
                f"{record.notes[name]:,}" if name in record.notes else NOTHING
                for name in ("num_hits", "num_fetched", "num_written")
            ),
            NOTHING if record.limit_ms is None else f"{record.limit_ms:.4g}",
            NOTHING if record.limit_ms is None else f"{record.limit_ms / record.timing.ms:.2f}",
        )
        for record in records
    ]


HOST_ROWS_COLUMNS = ("rows", "what", "ms", "spread", "limit ms", "of limit", "notes")
"""Columns for the long life of tables in host memory."""


def host_rows_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Lists the import, and the steps."""
    return [
        (
            record.variant,
            _what(record),
            f"{record.timing.ms:.4g}",
            record.timing.spread_text,
            NOTHING if record.limit_ms is None else f"{record.limit_ms:.4g}",
            _share_of_limit(record),
            ", ".join(f"{name} {value:,}" for name, value in record.notes.items() if name != "part"),
        )
        for record in records
    ]


PARTS: dict[str, tuple[str, Sequence[str], Callable[[Sequence[Record]], list[tuple[str, ...]]]]] = {
    "small": ("Small batches (W1's tables):", SMALL_COLUMNS, small_rows),
    "skew": ("Skew:", SKEW_COLUMNS, skew_rows),
    "insert": ("All-new keys:", INSERT_COLUMNS, insert_rows),
    "scale": ("Size, growth and churn (64 floats, SGD):", SCALE_COLUMNS, scale_rows),
    "dims": ("Widths of rows:", DIM_COLUMNS, dim_rows),
    "evict": ("Eviction of the least recently used tenth (rowwise Adagrad):", EVICT_COLUMNS, evict_rows),
    "life": ("Statistics, admission and export (W1, rowwise Adagrad):", LIFE_COLUMNS, life_rows),
    "serving": ("Frozen tables, looked up in three ways:", SERVING_COLUMNS, serving_rows),
    "fresh": ("From training to an answer:", FRESH_COLUMNS, fresh_rows),
    "cache": ("A tenth of the rows in a cache on the device:", CACHE_COLUMNS, cache_rows),
    "http": ("The HTTP server, 26 keys a request:", HTTP_COLUMNS, http_rows),
    "devices": ("A session on several devices:", DEVICES_COLUMNS, devices_rows),
    "input": ("From a reader's arrays to the device:", INPUT_COLUMNS, input_rows),
    "tiers": ("Rows in host memory, a cache on the device:", TIER_COLUMNS, tier_rows),
    "host_rows": ("A long life of rows in host memory:", HOST_ROWS_COLUMNS, host_rows_rows),
    "cpu": ("A static table on this CPU (SGD):", CPU_COLUMNS, cpu_rows),
    "dcnv2": ("DLRM-DCNv2, from files:", DCNV2_COLUMNS, dcnv2_rows),
}
"""The parts that have a table of their own: its title, columns, and what makes it of the part's records."""


def all_of(records: Sequence[Record], is_full_size: bool) -> list[tuple[str, Sequence[str], list[tuple[str, ...]]]]:
    """Returns every table that the records fill: title, columns, rows.

    Args:
      records: of one run.
      is_full_size: at full scale on GPUs, which published times ask for.
    """
    made = [
        ("Workloads:", COLUMNS, rows(records)),
        ("The batches:", KEY_COLUMNS, key_rows(records)),
        ("Peers and limits by themselves:", PEER_COLUMNS, peer_rows(records)),
        ("On a mesh:", EXCHANGE_COLUMNS, exchange_rows(records, is_full_size)),
    ]
    for part, (title, columns, function) in PARTS.items():
        of_part = [record for record in records if record.part == part]
        made.insert(-3, (title, columns, function(of_part)))
    return [row for row in made if row[2]]


def _what(record: Record) -> str:
    return f"{record.what}{f', {record.optimizer}' if record.optimizer else ''}"


def _share_of_limit(record: Record) -> str:
    return NOTHING if record.limit_ms is None else f"{record.limit_ms / record.timing.ms:.2f}"


def host_bound_note(records: Sequence[Record]) -> str:
    """Explains the asterisk, if a row has one."""
    if not any(record.timing.is_host_bound for record in records):
        return ""
    return f"* an empty step takes at least {HOST_BOUND:.0%} of this time: the host, not the device, may have set it."


def unsteady_note(records: Sequence[Record]) -> str:
    """Says how many times are unsteady; empty if none are."""
    num_unsteady = sum(record.timing.is_unsteady for record in records)
    if not num_unsteady:
        return ""
    return (
        f"{num_unsteady} of {len(records)} times differ between repetitions by more than their median: something else "
        "runs on this machine, or the repetitions are too short (--batch-ms). They show that it runs, not how fast."
    )


def format_table(columns: Sequence[str], table: Sequence[Sequence[str]]) -> str:
    """Formats a table in Markdown, with columns aligned for a terminal."""
    widths = [max(len(row[i]) for row in (columns, *table)) for i in range(len(columns))]

    def line(cells):
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(columns), rule, *(line(row) for row in table)])
