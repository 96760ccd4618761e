"""Dumps of NVIDIA's SparseOperationKit (SOK) 2.x, and the older files of SOK 1, which are read only.

A table T is a file `T-key`, a file `T-weight` and, for each piece of optimizer state, `T-<optimizer>-<slot>`, with all
punctuation of the table's name as underscores. sok_files.py has their bytes.

SOK writes keys in the order of its devices, which means nothing on another number of them; here every row is placed by
its key.
"""

import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxsok import checks, published
from jaxsok.collection import Collection
from jaxsok.interchange import files
from jaxsok.interchange.files import RawArray, RecordChunks, RecordsIn
from jaxsok.interchange.sok_files import HEADER_BYTES, KEY_DTYPES, ROW_DTYPES, Header, header_bytes, read_header
from jaxsok.records import Records, convert_to
from jaxsok.store import State

_SLOTS: dict[str, dict[str, str]] = {
    "sgd": {"trace": "SGD-momentum"},
    "adagrad": {"accumulator": "Adagrad-accumulator"},
    "adam": {"m": "Adam-m", "v": "Adam-v"},
    "adamw": {"m": "Adam-m", "v": "Adam-v"},
    "adamax": {"m": "Adamax-m", "u": "Adamax-v"},
    "adadelta": {"v": "Adadelta-accum_grad", "u": "Adadelta-accum_var"},
    "ftrl": {"accumulator": "Ftrl-accumulator", "z": "Ftrl-linear"},
    "group_ftrl": {"accumulator": "Ftrl-accumulator", "z": "Ftrl-linear"},
}  # by optimizer, the file of each state. TensorFlow's slots hold the same numbers, except for momentum

_ALSO = {"adamax": {"m": "Adam-m", "u": "Adam-v"}}  # SOK takes Adamax for Adam where it names the files
_ENDS = {"key", "weight", *(end for slots in (*_SLOTS.values(), *_ALSO.values()) for end in slots.values())}

OptimizerLike = str | Mapping[str, str] | None


def write_sok(
    directory: str | os.PathLike,
    table: str,
    records: RecordsIn,
    *,
    optimizer: OptimizerLike = None,
    learning_rate: float | None = None,
    key_dtype: str = "int64",
    dtype: str | None = None,
    overwrite: bool = False,
) -> int:
    """Writes a table as SOK's `load` reads it; returns the number of rows. Headers have the real names.

    `directory` is made, and may hold other tables; `table` is the name of SOK's variable, as `user:0`. The format has
    no place for statistics, nor for the step of Adam's bias correction.

    `optimizer` says whose state to write: the name of a function in `jaxsok.optim`, or a mapping from names of state to
    ends of files, as `{"m": "Adam-m"}`; None: rows alone. With "sgd" it needs a `learning_rate`: TensorFlow's Keras
    keeps `-learning_rate * trace`. `key_dtype` is "int64", "int32", "uint32" or "uint64"; keys of 2**63 and above are
    negative as int64. `dtype`, of rows and state, is "float16", "float32" or "float64"; None: that of the rows, float32
    for state and for rows of bfloat16.

    Raises:
      ValueError: state that SOK has no name for, or that the records lack; a key or a number that the dtype cannot
        hold; a name too long for the header.
      FileExistsError: there are files of this table, or of one whose name differs in punctuation alone.

    Example:
      >>> import tempfile
      >>> ones = np.ones((1, 4), np.float32)
      >>> records = Records(np.array([7], np.uint64), ones, {"accumulator": ones})
      >>> with tempfile.TemporaryDirectory() as path:
      ...     write_sok(path, "user:0", records, optimizer="adagrad"), sorted(os.listdir(path))
      (1, ['user_0-Adagrad-accumulator', 'user_0-key', 'user_0-weight'])

    Source: `dump` of SOK 2.1.
    """
    op, spelled = "write_sok", _spell("write_sok", table)
    slots, scale = _slots_of(op, optimizer, learning_rate)
    checks.one_of(f"{op}: key_dtype", key_dtype, KEY_DTYPES)
    checks.one_of(f"{op}: dtype", dtype, (None, *ROW_DTYPES), f"None or one of {list(ROW_DTYPES)}")
    form, chunks = files.check_records(op, records)
    missing = [name for name in slots if name not in dict(form.states)]
    if missing and form is not files.EMPTY:
        raise ValueError(f"{op}: records.state: got {list(dict(form.states))}, wanted also {missing}.")
    of_rows = dtype or (form.dtype.name if form.dtype.name in ROW_DTYPES else "float32")
    of_state = dtype or "float32"
    # The end of each file's name, and kind, slot and dtype of its header.
    outputs = [("key", 0, "", key_dtype), ("weight", 1, "", of_rows)]
    outputs += [(end, 2, _slot_name(op, end), of_state) for end in slots.values()]
    headers = [header_bytes(op, table, *output) for _, *output in outputs]
    paths, num_rows = [pathlib.Path(directory) / f"{spelled}-{end}" for end, *_ in outputs], 0
    with published.partial_files(
        op, paths, overwrite=overwrite, stale=lambda: _files_of(op, directory, table)
    ) as opened:
        for file, header in zip(opened, headers, strict=True):
            file.write(header)
        for chunk in chunks:
            files.write_array(opened[0], _as_key_dtype(op, chunk.keys, key_dtype))
            arrays = [chunk.rows, *(chunk.state[name] * np.float32(1 / scale) for name in slots)]
            for file, (end, *_, name), array in zip(opened[1:], outputs[1:], arrays, strict=True):
                narrow = convert_to(f"{op}: {end}", array, np.dtype(name))
                files.write_array(file, narrow.astype(np.dtype(name).newbyteorder("<"), copy=False))
            num_rows += chunk.num_rows
    return num_rows


def read_sok(
    directory: str | os.PathLike,
    table: str,
    *,
    dim: int,
    optimizer: OptimizerLike = None,
    learning_rate: float | None = None,
    widths: Mapping[str, int] | None = None,
    chunk_rows: int | None = None,
) -> RecordChunks:
    """Reads a table of a SOK dump, whatever number of devices wrote it: rows in their dtype, state as float32.

    `table`, `optimizer` and `learning_rate` are as for `write_sok`; a header has the table's name, or blanks. State of
    "adamax" is also found in files named after Adam, as SOK writes them. `widths` gives, by name of state, numbers a
    row where they are not `dim`, as `{"accumulator": 1}` of "rowwise_adagrad". Keys are read twice, and sorted.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: names, types or sizes that do not fit; fewer rows of state than keys; PADDING_KEY, or a key that
        occurs twice. Names file and byte.

    Example:
      `chunks = read_sok("dump", "user:0", dim=64, optimizer="adagrad")`
    """
    op, base = "read_sok", pathlib.Path(directory) / _spell("read_sok", table)
    files.check_dim(op, dim)
    slots, scale = _slots_of(op, optimizer, learning_rate)
    if isinstance(optimizer, str) and optimizer in _ALSO:
        slots = _find_spelling(op, base, [slots, _ALSO[optimizer]])
    key_path, rows_path = _path(base, "key"), _path(base, "weight")
    key_dtype = read_header(op, key_path, table, 0, "")
    num_rows = files.rows_in(op, key_path, key_dtype.itemsize, HEADER_BYTES)
    keys = RawArray(op, key_path, key_dtype, (num_rows,), HEADER_BYTES)
    rows_dtype = read_header(op, rows_path, table, 1, "")
    rows = RawArray(op, rows_path, rows_dtype, (num_rows, int(dim)), HEADER_BYTES, key_path)
    width_of = {name: (widths or {}).get(name, int(dim)) for name in slots}
    states = {name: _state(op, _path(base, end), table, end, num_rows, width_of[name]) for name, end in slots.items()}
    return _chunks(op, chunk_rows, keys, rows, states, scale)


def read_sok_v1(directory: str | os.PathLike, table: str, *, dim: int, chunk_rows: int | None = None) -> RecordChunks:
    """Reads `<table>_keys.file` and `<table>_values.file`, as the `Saver` of SOK 1 wrote them.

    Without a header: rows are float32, keys int64 or uint32, as their size shows. SOK 1 had one table for all slots of
    a layer, and wrote no optimizer state.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: empty or mis-sized files, PADDING_KEY, or a key that occurs twice; names file and byte. A file of
        int64 keys that lost its second half looks like one of uint32.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as path:
      ...     np.array([7, 9], np.uint32).tofile(f"{path}/user_keys.file")
      ...     np.ones((2, 4), np.float32).tofile(f"{path}/user_values.file")
      ...     [chunk.keys.tolist() for chunk in read_sok_v1(path, "user", dim=4)]
      [[7, 9]]

    Source: `Saver` of SOK 1.1.4, of HugeCTR 3.9.
    """
    op = "read_sok_v1"
    files.check_dim(op, dim)
    key_path, rows_path = (pathlib.Path(directory) / f"{table}_{what}.file" for what in ("keys", "values"))
    num_rows = files.rows_in(op, rows_path, 4 * int(dim))
    if num_rows == 0:
        raise ValueError(f"{op}: {rows_path}: byte 0: got the end of the file, wanted at least one row.")
    key_dtype = np.dtype("<u4" if files.size_of(op, key_path) == 4 * num_rows else "<i8")
    keys = RawArray(op, key_path, key_dtype, (num_rows,))
    rows = RawArray(op, rows_path, np.dtype("<f4"), (num_rows, int(dim)))
    return _chunks(op, chunk_rows, keys, rows, {})


def save(
    collection: Collection,
    state: State,
    directory: str | os.PathLike,
    tables: Sequence[str] | Mapping[str, str] | None = None,
    *,
    with_state: bool = True,
    optimizers: Mapping[str, OptimizerLike] | None = None,
    overwrite: bool = False,
) -> dict[str, int]:
    """Writes tables of a collection as a SOK dump; `jaxsok.interchange` has the other arguments and errors.

    `tables` may map names to those of SOK's variables. `optimizers` has, by table, what `write_sok` takes in place of
    the declared optimizer; one that SOK has no files for is a ValueError.

    Example:
      `sok.save(collection, state, "dump", {"user": "user:0"})`
    """
    op, names = "sok.save", files.names_of("sok.save", collection, tables)
    files.refuse_processes(op, collection, "write_sok")
    chosen = {table: _choose_slots(op, collection, table, with_state, optimizers) for table in names}
    for name in names.values():
        published.refuse_existing(op, _files_of(op, directory, name), overwrite)
    num_rows = {}
    for table, name in names.items():
        optimizer, rate = chosen[table]
        chunks = collection.export_chunks(state, table, with_state=optimizer is not None)
        how = {"optimizer": optimizer, "learning_rate": rate, "overwrite": overwrite}
        num_rows[table] = write_sok(directory, name, chunks, **how)
    return num_rows


def load(
    collection: Collection,
    state: State,
    directory: str | os.PathLike,
    tables: Sequence[str] | Mapping[str, str] | None = None,
    *,
    with_state: bool = True,
    optimizers: Mapping[str, OptimizerLike] | None = None,
    reset_state: bool = False,
    chunk_rows: int | None = None,
) -> State:
    """Enters the rows of a SOK dump into tables; arguments and errors are those of `save` and `jaxsok.interchange`.

    Optimizer state must be there, unless `with_state` is False. `state.step`, by which Adam corrects its bias, stays.

    Example:
      `state = sok.load(collection, state, "dump", {"user": "user:0"}, with_state=False)`
    """
    op, names = "sok.load", files.names_of("sok.load", collection, tables)
    chunks = {}
    for table, name in names.items():
        optimizer, rate = _choose_slots(op, collection, table, with_state, optimizers)
        spec = files.spec_of(collection, table)
        widths = {state.name: state.dim for state in spec.optimizer.state_specs(spec.dim)}
        how = {"optimizer": optimizer, "learning_rate": rate, "widths": widths, "chunk_rows": chunk_rows}
        chunks[table] = read_sok(directory, name, dim=spec.dim, **how)
    return files.import_all(op, collection, state, chunks, reset_state=reset_state)


def _spell(op: str, table: str) -> str:
    if not isinstance(table, str) or not table:
        raise ValueError(f"{op}: table: got {table!r}, wanted the name of SOK's variable.")
    return files.spell_name(table)


def _files_of(op: str, directory: str | os.PathLike, table: str) -> list[pathlib.Path]:
    """Finds the files of a table; refuses those of another one whose name is spelled the same."""
    base = pathlib.Path(directory) / _spell(op, table)
    if not base.parent.is_dir():
        return []
    there = sorted(
        path
        for path in base.parent.iterdir()
        if path.name.startswith(f"{base.name}-") and _is_of(path, path.name.removeprefix(f"{base.name}-"), table)
    )
    key_path = _path(base, "key")
    name = Header.of(key_path).table if key_path in there else ""
    if name not in ("", table):
        raise FileExistsError(
            f"{op}: {key_path}: is of the table {name!r}, wanted {table!r}: their names differ in punctuation alone, "
            "and so their files do not; choose another name or another directory."
        )
    return there


def _is_of(path: pathlib.Path, end: str, table: str) -> bool:
    """Checks whether a file is a table's, by the end of its name or, for slots of any name, by its header."""
    if not path.is_file() or path.suffix == ".partial":
        return False
    if end in _ENDS:
        return True
    header, slot = Header.of(path), end.partition("-")[2]
    is_slot = header.kind == 2 and 0 < end.find("-") < len(end) - 1
    return is_slot and header.table in ("", table) and header.slot in ("", slot)


def _path(base: pathlib.Path, end: str) -> pathlib.Path:
    return base.with_name(f"{base.name}-{end}")


def _slot_name(op: str, end: str) -> str:
    name, dash, slot = end.partition("-")
    if not (name and dash and slot) or "/" in end:
        raise ValueError(f'{op}: optimizer: got the end of a file {end!r}, wanted "<optimizer>-<slot>", as "Adam-m".')
    return slot


def _slots_of(op: str, optimizer: Any, learning_rate: float | None) -> tuple[dict[str, str], float]:
    """Returns ends of files by name of state, and the factor from a file's numbers to state."""
    if optimizer is None:
        return {}, 1.0
    if isinstance(optimizer, Mapping):
        slots = dict(optimizer)
        for end in slots.values():
            _slot_name(op, end)
        if len(set(slots.values())) != len(slots):
            raise ValueError(f"{op}: optimizer: got {slots}, wanted a file of its own for each state.")
        return slots, 1.0
    if not isinstance(optimizer, str) or optimizer not in _SLOTS:
        raise ValueError(
            f"{op}: optimizer: got {optimizer!r}, wanted one whose state SOK has, of {list(_SLOTS)}; None for rows "
            'alone; or a mapping from names of state to ends of files, as {"m": "Adam-m"}.'
        )
    if optimizer != "sgd":
        return _SLOTS[optimizer], 1.0
    wanted = "a positive number: Keras keeps the momentum of SGD as -learning_rate * trace"
    return _SLOTS["sgd"], -1.0 / checks.number(f"{op}: learning_rate", learning_rate, checks.ABOVE_ZERO, wanted=wanted)


def _find_spelling(op: str, base: pathlib.Path, spellings: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Returns the spelling of existing files; the first, if there are none."""
    there = [slots for slots in spellings if any(_path(base, end).exists() for end in slots.values())]
    if len(there) > 1:
        both = [str(_path(base, end)) for slots in there for end in slots.values() if _path(base, end).exists()]
        raise ValueError(
            f"{op}: {both}: got state under two names, wanted one; pass a mapping, as optimizer={dict(there[0])}."
        )
    return dict((there or spellings)[0])


def _choose_slots(
    op: str, collection: Collection, table: str, with_state: bool, optimizers: Mapping[str, OptimizerLike] | None
) -> tuple[OptimizerLike, float | None]:
    """Returns what files call a table's state, and the learning rate, if it is a number."""
    for name in optimizers or {}:
        if name not in [spec.name for spec in collection.tables]:
            raise ValueError(f"{op}: optimizers: got {name!r}, wanted some of {[s.name for s in collection.tables]}.")
    spec = files.spec_of(collection, table)
    states = [state.name for state in spec.optimizer.state_specs(spec.dim)]
    if not with_state or not (states or table in (optimizers or {})):
        return None, None
    rate, chosen = spec.optimizer.learning_rate, (optimizers or {}).get(table, spec.optimizer.name)
    if isinstance(chosen, str) and chosen not in _SLOTS:
        raise ValueError(
            f'{op}: table "{table}": got the optimizer {chosen}, of which SOK has no files, wanted one of '
            f"{list(_SLOTS)}; pass with_state=False for rows alone, or a mapping from names of state to ends of files, "
            f'as optimizers={{"{table}": {{"m": "Adam-m"}}}}.'
        )
    names = _SLOTS[chosen] if isinstance(chosen, str) else dict(chosen or {})
    unknown = [name for name in names if name not in states]
    if unknown:
        raise ValueError(f'{op}: table "{table}": optimizers: got state {unknown}, wanted some of {states}.')
    if chosen == "sgd" and callable(rate):
        raise ValueError(
            f'{op}: table "{table}": got a schedule as the learning rate of sgd with momentum, wanted a number: Keras '
            "keeps -learning_rate * trace. Use write_sok or read_sok with learning_rate=, or with_state=False."
        )
    return chosen, None if rate is None or callable(rate) else float(rate)


def _state(op: str, path: pathlib.Path, table: str, end: str, num_rows: int, width: int) -> RawArray:
    dtype = read_header(op, path, table, 2, _slot_name(op, end))
    size = files.size_of(op, path) - HEADER_BYTES
    lines, rest = divmod(size, dtype.itemsize * width)
    if lines < num_rows and not rest:
        raise ValueError(
            f"{op}: {path}: byte {HEADER_BYTES + size}: got the end of the file after {lines} lines of state, wanted "
            f"{num_rows}, one for each key. SOK writes fewer where keys were looked up and never trained, and nothing "
            "tells whose they are: read without this state (optimizer=None, with_state=False), or let SOK train every "
            "key once before it dumps."
        )
    return RawArray(op, path, dtype, (num_rows, width), HEADER_BYTES)


def _chunks(
    op: str, chunk_rows: int | None, keys: RawArray, rows: RawArray, states: Mapping[str, RawArray], scale: float = 1.0
) -> RecordChunks:
    (num_rows, dim), arrays = rows.shape, (keys, rows, *states.values())
    at_once = files.rows_of_chunk(op, chunk_rows, sum(array.row_bytes for array in arrays))
    files.check_raw_keys(keys)

    def chunks() -> Iterator[Records]:
        for start in range(0, num_rows, at_once):
            stop = start + at_once
            state = {name: _scale(op, array.read(start, stop), scale) for name, array in states.items()}
            yield Records(keys.read_keys(start, stop), rows.read(start, stop), state)

    return RecordChunks(num_rows, dim, {name: array.shape[1] for name, array in states.items()}, chunks)


def _scale(op: str, numbers: np.ndarray, scale: float) -> np.ndarray:
    if numbers.dtype == np.float16:
        numbers = numbers.astype(np.float32)
    scaled = numbers * numbers.dtype.type(scale) if scale != 1 else numbers
    return convert_to(f"{op}: state", scaled, np.dtype(np.float32))


def _as_key_dtype(op: str, keys: np.ndarray, key_dtype: str) -> np.ndarray:
    wide = keys if key_dtype.startswith("uint") else keys.view(np.int64)
    limits = np.iinfo(key_dtype)
    wrong = np.flatnonzero((wide < limits.min) | (wide > limits.max))
    if wrong.size:
        raise ValueError(f"{op}: records.keys: got {wide[wrong[0]]}, wanted {key_dtype}; write them as int64.")
    return wide.astype(np.dtype(key_dtype).newbyteorder("<"), copy=False)
