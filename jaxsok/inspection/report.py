"""A report on a table: keys, norms, frequencies and ages, from its records in one pass."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxsok.inspection.counts import QUANTILES, Bin, Frequencies, Magnitudes, Steps
from jaxsok.printed import format_bytes, format_columns
from jaxsok.records import Records

TOP_SHARE = 0.01  # the share of rows that counts as the most used
_BAR = 40  # characters of the longest bar
_BLOCK_BYTES = 4 << 20  # of the float64 numbers whose norms are taken at once


@dataclasses.dataclass(frozen=True)
class Norms:
    """L2 norms of rows, or of one piece of their optimizer state; in float64."""

    dim: int
    num_zero: int
    num_nonfinite: int
    """Rows with an infinite or NaN number, left out of the rest."""
    min: float
    """The least norm; NaN without rows, as are the greatest and the quantiles."""
    max: float
    quantiles: Mapping[float, float]
    """Quantiles by share, to within 0.6%."""
    bins: tuple[Bin, ...]


@dataclasses.dataclass(frozen=True)
class Uses:
    """Frequencies of rows; `num_unused` have frequency 0."""

    num_uses: int
    num_unused: int
    share_of_top: float
    """Part of all uses that the 1% most used rows have, to within 0.1%; NaN without uses."""
    bins: tuple[Bin, ...]


@dataclasses.dataclass(frozen=True)
class Ages:
    """Steps since rows were last used, and the least and greatest last step."""

    clock: int
    """The step that ages are counted from: the step of the file if it has one, else the latest last step."""
    first_step: int
    last_step: int
    resolution: int
    """Ages are to within so many steps less one; 1: exact."""
    bins: tuple[Bin, ...]


@dataclasses.dataclass(frozen=True)
class TableReport:
    """The result of `report` for one table. `str` makes text of it, `to_json` plain numbers."""

    name: str
    num_rows: int
    dim: int
    dtype: str
    num_bytes: int
    """Bytes of keys, rows, state and statistics."""
    min_key: int
    """Unsigned, as the greatest; both 0 without rows."""
    max_key: int
    min_signed_key: int
    max_signed_key: int
    num_negative: int
    """Keys that are negative as int64: 2**63 and above."""
    norms: Norms
    states: Mapping[str, Norms]
    uses: Uses | None
    """None: the records have no frequency."""
    ages: Ages | None
    """None: the records have no last step."""
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Facts in the files that are not in its records, as the number of keys that wait for a row."""

    def to_json(self) -> dict[str, Any]:
        """Returns dicts, lists and numbers; None for what is not a number."""
        return _to_plain(dataclasses.asdict(self))

    def __str__(self) -> str:
        states = ", ".join(f"{name} ({norms.dim})" for name, norms in self.states.items())
        lines = [
            f'table "{self.name}": {self.num_rows:,} rows of {self.dim} {self.dtype}, '
            f"{f'state {states}' if states else 'no optimizer state'}; {format_bytes(self.num_bytes)}"
        ]
        if self.facts:
            facts = {name: f"{value:,}" if isinstance(value, int) else value for name, value in self.facts.items()}
            lines += [", ".join(f"{name} {value}" for name, value in facts.items())]
        if not self.num_rows:
            return "\n".join(lines)
        keys = f"keys {self.min_key} to {self.max_key}"
        if self.num_negative:
            keys += f"; as int64 {self.min_signed_key} to {self.max_signed_key}, {self.num_negative:,} negative"
        lines += [keys, "", *_table_of_norms({"rows": self.norms, **self.states})]
        for name, norms in {"rows": self.norms, **self.states}.items():
            lines += ["", f"norms of {name}:", *_bars(norms.bins, _number)]
        if self.uses is not None:
            top = self.uses.share_of_top
            share = "" if math.isnan(top) else f"; the most used 1% have {top:.1%}"
            lines += ["", f"frequencies: {self.uses.num_uses:,} uses{share}:", *_bars(self.uses.bins, _whole)]
        if self.ages is not None:
            about = "" if self.ages.resolution == 1 else f", to within {self.ages.resolution:,}"
            lines += [
                "",
                f"last steps {self.ages.first_step:,} to {self.ages.last_step:,}; steps since, at step "
                f"{self.ages.clock:,}{about}:",
                *_bars(self.ages.bins, _whole),
            ]
        return "\n".join(lines)


def report(records: Iterable[Records], *, name: str = "table", clock: int | None = None) -> TableReport:
    """Goes through the records of one table, in chunks, once.

    `clock` is the step that ages are counted from; None: the latest last step. Only what every chunk has is reported:
    state by name, frequency, last step.

    Raises:
      ValueError: chunks of different dims or dtypes.

    Cost:
      Host memory: one chunk, 4 MiB, and about a megabyte for each of rows and pieces of state.

    Example:
      >>> keys, rows = np.array([7, 9], np.uint64), np.array([[3.0, 4.0], [0.0, 0.0]], np.float32)
      >>> found = report([Records(keys, rows, frequency=np.array([5, 1], np.uint32))], name="user")
      >>> found.num_rows, found.max_key, found.norms.max, found.uses.num_uses
      (2, 9, 5.0, 6)
    """
    num_rows = num_bytes = num_negative = 0
    form: tuple[int, str] | None = None
    keys: list[int] = []  # least and greatest, unsigned and signed
    rows, states = Magnitudes(), dict[str, tuple[int, Magnitudes]]()
    uses: Frequencies | None = None
    steps: Steps | None = None
    for chunk in records:
        form_of_chunk = int(chunk.rows.shape[1]), chunk.rows.dtype.name
        if form is None:
            form, uses, steps = form_of_chunk, Frequencies(), Steps()
            states = {state: (int(array.shape[1]), Magnitudes()) for state, array in chunk.state.items()}
        if form_of_chunk != form:
            raise ValueError(
                f'inspect: table "{name}": got rows of {form_of_chunk[0]} {form_of_chunk[1]} behind rows of {form[0]} '
                f"{form[1]}, wanted one dim and dtype."
            )
        states = {state: found for state, found in states.items() if state in chunk.state}
        uses = None if chunk.frequency is None else uses
        steps = None if chunk.last_step is None else steps
        if not chunk.num_rows:
            continue
        arrays = [chunk.keys, chunk.rows, *chunk.state.values(), chunk.last_step, chunk.frequency]
        num_bytes += sum(array.nbytes for array in arrays if array is not None)
        num_rows += chunk.num_rows
        signed = chunk.keys.view(np.int64)
        found = [int(chunk.keys.min()), int(chunk.keys.max()), int(signed.min()), int(signed.max())]
        keys = [pick(pair) for pick, *pair in zip((min, max, min, max), keys or found, found, strict=True)]
        num_negative += int((signed < 0).sum())
        _add_norms(rows, chunk.rows)
        for state, (_, norms) in states.items():
            _add_norms(norms, chunk.state[state])
        for counts, column in ((uses, chunk.frequency), (steps, chunk.last_step)):
            if counts is not None and column is not None:
                for start in range(0, chunk.num_rows, 1 << 20):
                    counts.add(column[start : start + (1 << 20)])
    dim, dtype = form or (0, "float32")
    now = int(clock if clock is not None else steps.max if steps is not None else 0)
    return TableReport(
        name,
        num_rows,
        dim,
        dtype,
        num_bytes,
        *(keys or [0] * 4),
        num_negative=num_negative,
        norms=_norms(dim, rows),
        states={state: _norms(dim, norms) for state, (dim, norms) in states.items()},
        uses=uses and Uses(uses.num_uses, uses.num_unused, uses.share_of_top(TOP_SHARE), uses.bins()),
        ages=steps and Ages(now, steps.min, steps.max, steps.width, steps.ages(now)),
    )


def _add_norms(norms: Magnitudes, rows: np.ndarray) -> None:
    at_once = max(1, _BLOCK_BYTES // (8 * max(1, rows.shape[1])))
    for start in range(0, rows.shape[0], at_once):
        wide = rows[start : start + at_once].astype(np.float64)
        with np.errstate(invalid="ignore"):  # infinite and NaN rows are counted
            largest = np.abs(wide).max(axis=1, initial=0.0)
            wide /= np.where(largest > 0, largest, 1.0)[:, None]  # squares of float64 may be too large, or too small
            norms.add(largest * np.sqrt(np.einsum("ij,ij->i", wide, wide)))


def _norms(dim: int, seen: Magnitudes) -> Norms:
    return Norms(
        dim=dim,
        num_zero=seen.num_zero,
        num_nonfinite=seen.num_nonfinite,
        min=seen.min,
        max=seen.max,
        quantiles={share: seen.quantile(share) for share in QUANTILES},
        bins=seen.bins(),
    )


def overview(reports: Iterable[TableReport]) -> list[str]:
    """Returns the lines of a table that compares reports."""
    head = ("table", "dtype", "state", "rows", "dim", "bytes", "not finite", "median norm")
    body = [
        (
            table.name,
            table.dtype,
            " ".join(table.states) or "-",
            f"{table.num_rows:,}",
            str(table.dim),
            format_bytes(table.num_bytes),
            f"{table.norms.num_nonfinite:,}",
            _number(table.norms.quantiles[0.5]),
        )
        for table in reports
    ]
    return format_columns(head, body, is_text=(0, 1, 2))


def _table_of_norms(norms: Mapping[str, Norms]) -> list[str]:
    head = ("norms", "least", *(f"{share:.0%}" for share in QUANTILES), "greatest", "zero", "not finite")
    body = [
        (
            name,
            *(_number(value) for value in (found.min, *found.quantiles.values(), found.max)),
            f"{found.num_zero:,}",
            f"{found.num_nonfinite:,}",
        )
        for name, found in norms.items()
    ]
    return format_columns(head, body, is_text=(0,))


def _bars(bins: tuple[Bin, ...], edge: Any) -> list[str]:
    if not bins:
        return ["  none above 0"]
    most = max(counted.num for counted in bins)
    body = [(edge(counted), f"{counted.num:,}", "#" * math.ceil(_BAR * counted.num / most)) for counted in bins]
    return [f"  {line}" for line in format_columns(("", "", ""), body, is_text=(2,))[1:]]


def _number(value: float | Bin) -> str:
    if isinstance(value, Bin):
        return f"{value.low:.3g} - {value.high:.3g}"
    return "-" if math.isnan(value) else f"{value:.4g}"


def _whole(counted: Bin) -> str:
    return f"{counted.low:,}" if counted.high == counted.low + 1 else f"{counted.low:,} - {counted.high - 1:,}"


def _to_plain(value: Any) -> Any:
    if isinstance(value, Bin):
        return {"low": value.low, "high": value.high, "num": value.num}
    if isinstance(value, Mapping):
        return {str(name): _to_plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
