"""Tables of TorchRec and of NVIDIA's dynamicemb, which are read only: rows and optimizer state, from either's files.

TorchRec's come in a folder of `torch.distributed.checkpoint`, under any sharding. A table is the tensor
`….embedding_bags.NAME.weight` or `….embeddings.NAME.weight`; its state is `….weight.NAME.momentum1` and others of the
fused optimizer, or `….weight.sum` of a dense one. Keys are the numbers of the rows. Neither torch nor TorchRec is
needed.

dynamicemb writes, for each table and rank, raw files `NAME_emb_keys.rank_0.world_size_1` (int64), `…_values…` and
`…_opt_values…` (float32).
"""

import dataclasses
import itertools
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxsok import checks, optimizers
from jaxsok.collection import Collection
from jaxsok.interchange import files
from jaxsok.interchange.files import RawArray, RecordChunks
from jaxsok.interchange.torch_files import Tensor, read_tensors
from jaxsok.optimizers import Optimizer
from jaxsok.records import Records
from jaxsok.specs import TableSpec
from jaxsok.store import State

_SUMS = {"accumulator": ("momentum1", "dense sum")}
_MOMENTS = {"m": ("momentum1", "exp_avg"), "v": ("exp_avg_sq",)}
_STATES: dict[str, dict[str, tuple[str, ...]]] = {
    "sgd": {},
    "adagrad": _SUMS,
    "rowwise_adagrad": _SUMS,
    "adam": _MOMENTS,
    "adamw": _MOMENTS,
    "rowwise_adam": _MOMENTS,
}
"""By optimizer, the names that each state may have in files. A dense optimizer's have "dense " before them: its sums
are those of lazy Adagrad, since a gradient of zero adds nothing; its moments are not those of lazy Adam."""

_PLACE = re.compile(r"((?:.+\.)?(?:embedding_bags|embeddings)\.([^.]+))\.weight(?:\.(.+))?")
_COLUMNS = re.compile(r"(.+)\[(\d+):(\d+)\]")
_KEYS_FILE = re.compile(r"(.+)_emb_keys\.rank_(\d+)\.world_size_(\d+)")


@dataclasses.dataclass(frozen=True)
class _Saved:
    """A table in files."""

    num_rows: int
    dim: int
    dtype: np.dtype
    states: Mapping[str, int]
    """Numbers a row by name of state; 0: it is not by rows."""
    read: Callable[[int, int], tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]]
    """Reads keys, rows and states of some rows, by number."""
    blocks: Sequence[tuple[int, int]] = ()
    """Ranges of columns that have one number of state a row each, if they are not those of the table."""


def read_torchrec(
    folder: str | os.PathLike, table: str, *, optimizer: Optimizer | None = None, chunk_rows: int | None = None
) -> RecordChunks:
    """Reads a table of a checkpoint of TorchRec or a dump of dynamicemb, whatever number of devices wrote it.

    `table` is TorchRec's name of it, or all that stands before `.weight` in the checkpoint where two collections have
    tables of one name; `"user[0:8]"` takes columns. `optimizer`, one of `jaxsok.optim`, says whose state to read; None:
    rows alone.

    Raises:
      FileNotFoundError, ValueError: what is missing, truncated or of another format; state that the optimizer cannot
        continue from exactly.

    Cost:
      A chunk of rows is in host memory at a time; files are mapped, so that no shard is read as a whole.

    Example:
      `chunks = read_torchrec("checkpoint", "user", optimizer=jaxsok.optim.rowwise_adagrad(0.1))`
    """
    op = "read_torchrec"
    return _records(op, table, _open(op, folder, [table])[table], optimizer, chunk_rows)


def load(
    collection: Collection,
    state: State,
    folder: str | os.PathLike,
    tables: Sequence[str] | Mapping[str, str] | None = None,
    *,
    with_state: bool = True,
    step: int | None = None,
    reset_state: bool = False,
    chunk_rows: int | None = None,
) -> State:
    """Enters tables of TorchRec or dynamicemb with their optimizer state, into any mesh.

    Other arguments are those of `jaxsok.interchange`. `tables` may map names to those that `read_torchrec` takes.
    `step`, the number of updates so far, becomes `state.step`. Neither system saves it, and Adam's bias correction
    needs it.

    Raises:
      ValueError: besides those of `jaxsok.interchange`: state that the declared optimizer cannot continue from exactly,
        or Adam without `step`.

    Example:
      `state = torchrec.load(collection, state, "checkpoint", {"user": "t_user"}, step=500)`
    """
    op, names = "torchrec.load", files.names_of("torchrec.load", collection, tables)
    if step is not None:
        checks.integer(f"{op}: step", step, 0, 2**32 - 1, wanted="the number of updates so far")
    chunks, saved = {}, _open(op, folder, names.values())
    for table, name in names.items():
        optimizer = files.spec_of(collection, table).optimizer if with_state else None
        if optimizer is not None and _STATES.get(optimizer.name) is _MOMENTS and step is None:
            raise ValueError(
                f'{op}: table "{table}": step: got None, wanted the number of updates so far: {optimizer.name} '
                "corrects its bias by it, and the files do not have it; with_state=False takes rows alone."
            )
        chunks[table] = _records(op, name, saved[name], optimizer, chunk_rows)
    state = files.import_all(op, collection, state, chunks, reset_state=reset_state)
    if step is None:
        return state
    return dataclasses.replace(state, step=jax.device_put(np.uint32(step), state.step.sharding))


def read_dense(folder: str | os.PathLike) -> dict[str, np.ndarray]:
    """Reads all tensors of a checkpoint that belong to no table, by name: dense parameters and their optimizer state.

    Raises:
      FileNotFoundError, ValueError: as `read_torchrec`.

    Example:
      `weight = read_dense("checkpoint")["model.over.weight"]`
    """
    tensors = read_tensors("read_dense", pathlib.Path(folder))
    return {name: tensor.read() for name, tensor in tensors.items() if not _PLACE.fullmatch(name)}


def declare(folder: str | os.PathLike, learning_rate: float = 0.01) -> list[TableSpec]:
    """Declares the tables in the files, with optimizers that fit their state.

    The files do not name optimizers: state of `dim` numbers a row is taken for that of `adagrad`, of one number for
    that of `rowwise_adagrad`, two arrays for `adam` or `rowwise_adam`, none for `sgd`. Where blocks of columns have
    rowwise state of their own, as under column-wise sharding, each becomes a table, as `user[0:8]`.

    Raises:
      FileNotFoundError, ValueError: as `read_torchrec`.

    Example:
      `tables = declare("checkpoint", learning_rate=0.1)`
    """
    specs = []
    for name, saved in _open("declare", folder).items():
        widths = [width for width in saved.states.values() if width]
        if len(widths) > 1:
            optimizer = (optimizers.adam if widths[-1] == saved.dim else optimizers.rowwise_adam)(learning_rate)
        elif widths == [1]:
            optimizer = optimizers.rowwise_adagrad(learning_rate)
        else:
            adagrad = optimizers.adagrad(learning_rate, 0.0, 1e-8, eps_in_sqrt=False)
            optimizer = adagrad if widths else optimizers.sgd(learning_rate)
        dtype = saved.dtype.name if saved.dtype.name in ("float16", "bfloat16") else "float32"
        parts = {f"{name}[{low}:{high}]": high - low for low, high in saved.blocks} or {name: saved.dim}
        capacity = max(1, saved.num_rows)
        specs += [TableSpec(part, dim, optimizer, dtype=dtype, capacity=capacity) for part, dim in parts.items()]
    return specs


def rows_of(model: Any, names: Mapping[str, str] | None = None) -> Callable[[str, np.ndarray], np.ndarray]:
    """Returns a function that reads rows of a TorchRec model, sharded or not, as `jaxsok.parity` takes it.

    `names` maps tables to TorchRec's names. The function takes a table and uint64 keys, and returns float32[num_keys,
    dim], NaN for what other processes have. Each call copies the table.

    Example:
      `jaxsok.parity(collection, state, step, peer_step, torchrec.rows_of(model), batches)`
    """

    def read(table: str, keys: np.ndarray) -> np.ndarray:
        wanted, tensors = (names or {}).get(table, table), model.state_dict()
        found = [name for name in tensors if (m := _PLACE.fullmatch(name)) and not m[3] and wanted in (m[1], m[2])]
        tensor = tensors[_only("rows_of", "model", wanted, found)]
        whole = np.full(tensor.size(), np.nan, np.float32)
        shards = tensor.local_shards() if hasattr(tensor, "local_shards") else ()
        for (row, column), part in [(s.metadata.shard_offsets, s.tensor) for s in shards] or [((0, 0), tensor)]:
            whole[row : row + part.size(0), column : column + part.size(1)] = part.detach().float().cpu().numpy()
        return whole[keys.astype(np.int64)]

    return read


# Tables in files -----------------------------------------------------------------------------------------------------


def _only(op: str, where: Any, name: str, found: Sequence[str], every: Iterable[str] = ()) -> str:
    """Returns the one name that was found."""
    if len(found) != 1:
        wanted = f"one of {list(every)}" if every else "the name of one table"
        raise ValueError(f'{op}: {where}: got "{name}", of which there are {list(found)}, wanted {wanted}.')
    return found[0]


def _open(op: str, folder: str | os.PathLike, names: Iterable[str] | None = None) -> dict[str, _Saved]:
    """Finds tables, by default all; reads no rows."""
    path = pathlib.Path(folder)
    if (path / ".metadata").is_file():
        return _open_checkpoint(op, path, names)
    dumped: dict[str, list[tuple[int, int, pathlib.Path]]] = {}
    for file in sorted(path.rglob("*_emb_keys.rank_*")):
        if match := _KEYS_FILE.fullmatch(file.name):
            dumped.setdefault(match[1], []).append((int(match[2]), int(match[3]), file))
    if not dumped:
        raise FileNotFoundError(
            f"{op}: {path}: got neither .metadata nor *_emb_keys.rank_*, wanted a folder of "
            "torch.distributed.checkpoint or of dynamicemb."
        )
    for name in names or ():
        _only(op, path, name, [name] if name in dumped else [], dumped)
    return {name: _open_dump(op, name, dumped[name]) for name in (dumped if names is None else names)}


def _open_checkpoint(op: str, folder: pathlib.Path, names: Iterable[str] | None) -> dict[str, _Saved]:
    weights: dict[str, Tensor] = {}
    places = []
    for name, tensor in read_tensors(op, folder).items():
        if (match := _PLACE.fullmatch(name)) and match[3] is None and len(tensor.shape) == 2:
            weights[match[1]] = tensor
        elif match and match[3]:
            places.append((match, tensor))
    states: dict[str, dict[str, Tensor]] = {path: {} for path in weights}
    for match, tensor in places:
        # Paths of state and weight begin in different dicts; a state belongs to the weight whose path ends most alike.
        common = {path: _num_common(path, match[1]) for path in weights}
        best = [path for path, number in common.items() if number == max(common.values()) > 1]
        fused = match[3].startswith(f"{match[2]}.")
        name = match[3].removeprefix(f"{match[2]}.") if fused else f"dense {match[3]}"
        states[_only(op, folder, match[0], best, weights)][name] = tensor
    tables = {path.rpartition(".")[2]: path for path in weights}
    if names is None:
        names = tables if len(tables) == len(weights) else weights
    result = {}
    for name in names:
        columns = None if name in weights or name in tables else _COLUMNS.fullmatch(name)
        wanted = columns[1] if columns else name
        path = _only(op, folder, wanted, [p for p in weights if wanted in (p, p.rpartition(".")[2])], weights)
        result[name] = _sharded(weights[path], states[path], columns and (int(columns[2]), int(columns[3])))
    return result


def _num_common(one: str, other: str) -> int:
    """Counts the parts, between dots, that the ends of two paths have in common."""
    pairs = zip(reversed(one.split(".")), reversed(other.split(".")), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _sharded(weight: Tensor, states: Mapping[str, Tensor], columns: tuple[int, int] | None = None) -> _Saved:
    num_rows, dim = weight.shape
    low, high = columns or (0, dim)
    if not 0 <= low < high <= dim:
        raise ValueError(f'{weight.op}: "{weight.name}": got columns [{low}:{high}], wanted some of {dim}.')
    lefts = sorted({left for _, left in weight.chunks})
    # Where chunks split columns, rowwise state is saved for one block of columns after the other.
    is_split = {name: len(lefts) > 1 and tensor.shape == (num_rows * len(lefts),) for name, tensor in states.items()}
    blocks = list(zip(lefts, [*lefts[1:], dim], strict=True)) if any(is_split.values()) else [(0, dim)]
    number = blocks.index((low, high)) if (low, high) in blocks else 0
    widths = {}
    for name, tensor in states.items():
        rowwise = tensor.shape in ((num_rows,), (num_rows, 1)) or is_split[name]
        widths[name] = high - low if tensor.shape == weight.shape else int(rowwise)

    def read(begin: int, end: int) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        found = {}
        for name, tensor in states.items():
            if widths[name]:
                first = number * num_rows if is_split[name] else 0
                ranges = ((low, high),) if tensor.shape == weight.shape else ()
                found[name] = tensor.read((first + begin, first + end), *ranges).reshape(end - begin, -1)
        return np.arange(begin, end, dtype=np.uint64), weight.read((begin, end), (low, high)), found

    has_others = 1 in widths.values() and (low, high) not in blocks
    return _Saved(num_rows, high - low, weight.dtype, widths, read, blocks if has_others else ())


def _open_dump(op: str, name: str, dumped: Sequence[tuple[int, int, pathlib.Path]]) -> _Saved:
    if sorted(rank for rank, _, _ in dumped) != list(range(dumped[0][1])):
        raise ValueError(
            f'{op}: table "{name}": got {[str(file) for _, _, file in dumped]}, wanted the files of all ranks of one '
            "dump."
        )
    keys = [RawArray(op, path, np.dtype("<i8"), (files.rows_in(op, path, 8),)) for _, _, path in dumped]
    keys = [part for part in keys if part.shape[0]]
    num_rows = sum(part.shape[0] for part in keys)

    def arrays_of(kind: str) -> list[RawArray]:
        paths = [part.path.with_name(part.path.name.replace("_emb_keys.", f"_emb_{kind}.")) for part in keys]
        found = [
            path.is_file() and files.rows_in(op, path, 4 * k.shape[0]) for path, k in zip(paths, keys, strict=True)
        ]
        if len(set(found)) > 1 or (kind == "values" and not any(found)):
            raise ValueError(
                f'{op}: table "{name}": {kind}: got {found} numbers a row, wanted one number in all ranks.'
            )
        shapes = [(part.shape[0], int(width)) for part, width in zip(keys, found, strict=True) if width]
        return [RawArray(op, path, np.dtype("<f4"), shape) for path, shape in zip(paths, shapes, strict=False)]

    rows, state = arrays_of("values"), arrays_of("opt_values")
    dim, width = (parts[0].shape[1] if parts else 0 for parts in (rows, state))
    by_width = {0: {}, 2 * dim: {"momentum1": dim, "exp_avg_sq": dim}, dim: {"momentum1": dim}}
    states = by_width.get(width, {"momentum1": 1} if width in (1, 4) else {"opt_values": width})  # padded to 16 bytes

    def read(begin: int, end: int) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        numbers = _rows_of_parts(state, begin, end) if state else np.zeros((end - begin, 0))
        columns = np.split(numbers, np.cumsum(list(states.values()), dtype=int), axis=1)
        found = dict(zip(states, columns, strict=False))
        return _rows_of_parts(keys, begin, end).view(np.uint64), _rows_of_parts(rows, begin, end), found

    at_once = files.CHUNK_BYTES // 8
    starts = range(0, num_rows, at_once)
    chunks = lambda: (_rows_of_parts(keys, i, i + at_once).view(np.uint64) for i in starts)  # noqa: E731
    files.check_keys(op, num_rows, chunks, lambda number: f'table "{name}": row {number}')
    return _Saved(num_rows, dim, np.dtype(np.float32), states, read)


def _rows_of_parts(parts: Sequence[RawArray], begin: int, end: int) -> np.ndarray:
    """Reads rows of files that follow each other."""
    found = []
    for part in parts:
        if begin < part.shape[0] and end > 0:
            found.append(part.read(max(begin, 0), end))
        begin, end = begin - part.shape[0], end - part.shape[0]
    return np.concatenate(found)


# State ---------------------------------------------------------------------------------------------------------------


def _records(op: str, name: str, saved: _Saved, optimizer: Optimizer | None, chunk_rows: int | None) -> RecordChunks:
    names = {} if optimizer is None else _names_of_state(op, name, saved, optimizer)
    widths = {ours: saved.states[theirs] for ours, theirs in names.items()}
    at_once = files.rows_of_chunk(op, chunk_rows, 8 + saved.dim * saved.dtype.itemsize + 4 * sum(saved.states.values()))

    def chunks() -> Iterator[Records]:
        for begin in range(0, saved.num_rows, at_once):
            keys, rows, states = saved.read(begin, min(begin + at_once, saved.num_rows))
            yield Records(keys, rows, {ours: states[theirs].astype(np.float32) for ours, theirs in names.items()})

    return RecordChunks(saved.num_rows, saved.dim, widths, chunks)


def _names_of_state(op: str, table: str, saved: _Saved, optimizer: Optimizer) -> dict[str, str]:
    """Finds each state of an optimizer in the files; refuses what it could not continue from exactly."""
    what, remedy = f'{op}: table "{table}"', "with_state=False takes rows alone."
    widths = {state.name: state.dim for state in optimizer.state_specs(saved.dim)}
    possible = _STATES.get(optimizer.name, {})
    if optimizer.name not in _STATES or possible.keys() != widths.keys():
        raise ValueError(
            f"{what}: got optim.{optimizer.name} with state {list(widths)}, which continues no state of TorchRec "
            f"exactly, wanted one of {list(_STATES)}, sgd without momentum; {remedy}"
        )
    if getattr(optimizer, "eps_in_sqrt", False) and getattr(optimizer, "eps", 0.0) > 0:
        raise ValueError(
            f"{what}: got optim.{optimizer.name} with eps under the root, wanted eps_in_sqrt=False: TorchRec and torch "
            f"add eps to the root; {remedy}"
        )
    if widths and saved.blocks:
        raise ValueError(
            f"{what}: got one number of state a row for each of the columns {list(saved.blocks)}, which were "
            f"stepped apart, wanted one for the columns of the table; declare a table for each, and map it to "
            f'"{table}[0:{saved.blocks[0][1]}]" and so on; {remedy}'
        )
    found = {ours: [name for name in theirs if name in saved.states] for ours, theirs in possible.items()}
    rest = saved.states.keys() - {"dense step", *(name for theirs in found.values() for name in theirs)}
    got = {ours: saved.states[theirs[0]] for ours, theirs in found.items() if theirs}
    if rest or got != widths:
        raise ValueError(
            f"{what}: got state {dict(saved.states)} (numbers a row) in the files, wanted {widths} of "
            f"optim.{optimizer.name}, named as {possible}; declare the optimizer that wrote them; {remedy}"
        )
    return {ours: theirs[0] for ours, theirs in found.items()}
