"""Tables of TorchRec and of NVIDIA's dynamicemb, which are read only: rows and optimizer state. Neither is needed.

In a folder of `torch.distributed.checkpoint` a table is the tensor `….embedding_bags.NAME.weight` or
`….embeddings.NAME.weight`, under any sharding; its state is `….weight.NAME.momentum1` and others of a fused optimizer,
or `….weight.sum` of a dense one. Keys are the numbers of the rows. dynamicemb writes for each table and rank raw files
`NAME_emb_keys.rank_0.world_size_1` (int64), `NAME_emb_values.…` and `NAME_emb_opt_values.…` (float32; first versions:
`NAME_opt_values.…`).
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
from jaxsok.records import Records, convert_to
from jaxsok.specs import TableSpec
from jaxsok.store import State

_SUMS = {"accumulator": ("momentum1", "dense sum")}
_MOMENTS = {"m": ("momentum1", "exp_avg"), "v": ("exp_avg_sq",)}
_STATES: dict[str, dict[str, tuple[str, ...]]] = {"sgd": {}, **dict.fromkeys(("adagrad", "rowwise_adagrad"), _SUMS)}
_STATES |= dict.fromkeys(("adam", "adamw", "rowwise_adam"), _MOMENTS)
"""The names that each state may have in files, by optimizer. A dense optimizer's begin with "dense ": its sums equal
those of lazy Adagrad, since a gradient of zero adds nothing; its moments differ from those of lazy Adam."""

_PLACE = re.compile(r"((?:.+\.)?(?:embedding_bags|embeddings)\.([^.]+))\.weight(?:\.(.+))?")
_COLUMNS = re.compile(r"(.+)\[(\d+):(\d+)\]")
_PADDED = 4  # numbers of state that dynamicemb writes where an optimizer has one
_STATE_FILES = ("emb_opt_values", "opt_values")  # of dynamicemb; the second name is that of its first versions
_KEYS_FILE = re.compile(r"(.+)_emb_keys\.rank_(\d+)\.world_size_(\d+)")

_Pieces = Iterator[tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]]


@dataclasses.dataclass(frozen=True)
class _Saved:
    """A table in files."""

    num_rows: int
    dim: int
    dtype: np.dtype
    states: Mapping[str, int]
    """Numbers a row by name of state; 0: it is not by rows."""
    read: Callable[[int, Sequence[str]], _Pieces]
    """Yields keys, rows and the states that are asked for, so many rows at a time."""
    blocks: Sequence[tuple[int, int]] = ()
    """Ranges of columns that have one number of state a row each, if they are not those of the table."""
    may_be_padded: bool = False
    """The state may also be one number and three that fill it up to 16 bytes."""


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
    """Enters tables of TorchRec or dynamicemb with their optimizer state, whatever number of devices wrote them.

    Other arguments are those of `jaxsok.interchange`. `tables` may map names to TorchRec's: `"user"`, all that stands
    before `.weight` in the checkpoint if two collections have a table of that name, or `"user[0:8]"` for some columns.
    `step`, the number of updates so far, becomes `state.step`. Neither system saves it, and Adam's bias correction
    needs it.

    Raises:
      ValueError: those of `jaxsok.interchange`, and state that the declared optimizer cannot continue from exactly,
        or Adam without `step`.

    Cost:
      A chunk of rows is in host memory at a time; files are mapped, so that no shard is read as a whole.

    Example:
      `state = torchrec.load(collection, state, "checkpoint", {"user": "t_user"}, step=500)`
    """
    op = "torchrec.load"
    names = files.names_of(op, collection, tables, spell=str)
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
        if saved[name].dim:  # else it has no rows, in any rank
            chunks[table] = _records(op, name, saved[name], optimizer, chunk_rows)
    if step is not None:  # now, so that rows count as used in this step
        state = dataclasses.replace(state, step=jax.device_put(np.uint32(step), state.step.sharding))
    return files.import_all(op, collection, state, chunks, reset_state=reset_state)


def read_dense(folder: str | os.PathLike) -> dict[str, np.ndarray]:
    """Reads all tensors of a checkpoint that belong to no table, by name: dense parameters and their optimizer state.

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

    Example:
      `tables = declare("checkpoint", learning_rate=0.1)`
    """
    specs = []
    for name, saved in _open("declare", folder).items():
        if saved.dim == 0:
            raise ValueError(
                f'declare: table "{name}": got no rows in any rank of a dump, which does not name their dim, wanted '
                "some; declare the tables yourself."
            )
        if saved.may_be_padded:
            raise ValueError(
                f'declare: table "{name}": got rows of {saved.dim} numbers with 4 numbers of state, which '
                f"rowwise_adagrad (dynamicemb pads its number to 4) and {'adagrad' if saved.dim == 4 else 'adam'} both "
                "write, wanted other widths; declare the tables yourself."
            )
        widths = [width for width in saved.states.values() if width]
        options = {"initial_accumulator_value": 0.0, "eps": 1e-8, "eps_in_sqrt": False} if len(widths) == 1 else {}
        rowwise = "rowwise_" if widths and widths[-1] < saved.dim else ""
        name_of = ("sgd", f"{rowwise}adagrad", f"{rowwise}adam")[min(len(widths), 2)]
        optimizer = getattr(optimizers, name_of)(learning_rate, **options)
        dtype = saved.dtype.name if saved.dtype.name in ("float16", "bfloat16") else "float32"
        parts = {f"{name}[{low}:{high}]": high - low for low, high in saved.blocks} or {name: saved.dim}
        capacity = max(1, saved.num_rows)
        specs += [TableSpec(part, dim, optimizer, dtype=dtype, capacity=capacity) for part, dim in parts.items()]
    return specs


def rows_of(model: Any, names: Mapping[str, str] | None = None) -> Callable[[str, np.ndarray], np.ndarray]:
    """Makes a function that reads rows of a TorchRec model, sharded or not, as `jaxsok.parity` takes it.

    `names` maps tables to TorchRec's names. The function takes a table and uint64 keys, and returns float32[num_keys,
    dim], NaN for what other processes have. Each call copies the table.

    Example:
      `jaxsok.parity(collection, state, step, peer_step, torchrec.rows_of(model), batches)`
    """

    def read(table: str, keys: np.ndarray) -> np.ndarray:
        wanted, tensors = (names or {}).get(table, table), model.state_dict()
        found = [name for name in tensors if (m := _PLACE.fullmatch(name)) and not m[3] and wanted in (m[1], m[2])]
        tensor = tensors[_require_one("rows_of", "model", wanted, found, tensors)]
        whole = np.full(tensor.size(), np.nan, np.float32)
        shards = tensor.local_shards() if hasattr(tensor, "local_shards") else ()
        for (row, column), part in [(s.metadata.shard_offsets, s.tensor) for s in shards] or [((0, 0), tensor)]:
            whole[row : row + part.size(0), column : column + part.size(1)] = part.detach().float().cpu().numpy()
        return whole[keys.astype(np.int64)]

    return read


# Tables in files -----------------------------------------------------------------------------------------------------


def _require_one(op: str, where: Any, name: str, found: Sequence[str], every: Iterable[str]) -> str:
    if len(found) != 1:
        raise ValueError(f'{op}: {where}: got "{name}", of which there are {list(found)}, wanted one of {list(every)}.')
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
        raise FileNotFoundError(f"{op}: {path}: got neither .metadata nor *_emb_keys.rank_*, wanted one of them.")
    names = dumped if names is None else [_require_one(op, path, n, [n] if n in dumped else [], dumped) for n in names]
    return {name: _open_dump(op, name, dumped[name]) for name in names}


def _open_checkpoint(op: str, folder: pathlib.Path, names: Iterable[str] | None) -> dict[str, _Saved]:
    places = [(match, t) for name, t in read_tensors(op, folder).items() if (match := _PLACE.fullmatch(name))]
    weights = {match[1]: tensor for match, tensor in places if match[3] is None}
    states: dict[str, dict[str, Tensor]] = {path: {} for path in weights}
    for match, tensor in places:
        if match[3] is None:
            continue
        # Paths of state and weight begin in different dicts; a state belongs to the weight whose path ends most alike.
        common = {path: _num_common(path.split("."), match[1].split(".")) for path in weights}
        best = [path for path, number in common.items() if number == max(common.values()) > 1]
        fused = match[3].startswith(f"{match[2]}.")
        name = match[3].removeprefix(f"{match[2]}.") if fused else f"dense {match[3]}"
        states[_require_one(op, folder, match[0], best, weights)][name] = tensor
    tables, result = dict.fromkeys(path.rpartition(".")[2] for path in weights), {}
    for name in (tables if len(tables) == len(weights) else weights) if names is None else names:
        columns = None if name in weights or name in tables else _COLUMNS.fullmatch(name)
        wanted = columns[1] if columns else name
        path = _require_one(op, folder, wanted, [p for p in weights if wanted in (p, p.rpartition(".")[2])], weights)
        result[name] = _make_saved(weights[path], states[path], columns and (int(columns[2]), int(columns[3])))
    return result


def _num_common(path: list[str], other: list[str]) -> int:
    """Counts the parts that the ends of two paths have in common."""
    pairs = zip(reversed(path), reversed(other), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _make_saved(weight: Tensor, states: Mapping[str, Tensor], columns: tuple[int, int] | None = None) -> _Saved:
    num_rows, dim = weight.shape
    low, high = columns or (0, dim)
    if not 0 <= low < high <= dim:
        raise ValueError(f'{weight.op}: "{weight.name}": got columns [{low}:{high}], wanted some of {dim}.')
    lefts = sorted({left for _, left in weight.chunks})
    # Where chunks split columns, rowwise state is saved for one block of columns after the other.
    is_split = {name: len(lefts) > 1 and tensor.shape == (num_rows * len(lefts),) for name, tensor in states.items()}
    blocks = list(zip(lefts, [*lefts[1:], dim], strict=True)) if any(is_split.values()) else [(0, dim)]
    before = num_rows * blocks.index((low, high)) if (low, high) in blocks else 0
    is_rowwise = {name: is_split[name] or t.shape in ((num_rows,), (num_rows, 1)) for name, t in states.items()}
    widths = {name: high - low if t.shape == weight.shape else int(is_rowwise[name]) for name, t in states.items()}

    def read(at_once: int, names: Sequence[str]) -> _Pieces:
        for begin in range(0, num_rows, at_once):
            end, found = min(begin + at_once, num_rows), {}
            for name in names:
                first = before if is_split[name] else 0
                ranges = ((first + begin, first + end), (low, high))[: 1 if is_rowwise[name] else 2]
                found[name] = states[name].read(*ranges).reshape(end - begin, -1)
            yield np.arange(begin, end, dtype=np.uint64), weight.read((begin, end), (low, high)), found

    has_others = any(is_rowwise.values()) and (low, high) not in blocks
    return _Saved(num_rows, high - low, weight.dtype, widths, read, blocks if has_others else ())


def _open_dump(op: str, name: str, dumped: Sequence[tuple[int, int, pathlib.Path]]) -> _Saved:
    worlds = {world for _, world, _ in dumped}
    if len(worlds) > 1 or sorted(rank for rank, _, _ in dumped) != list(range(dumped[0][1])):
        raise ValueError(
            f'{op}: table "{name}": got {[str(file) for *_, file in dumped]}, wanted the files of all ranks of a dump.'
        )
    parts, forms = [], set()
    for _, _, path in dumped:
        found = [path.with_name(path.name.replace("_emb_keys.", f"_{x}.")) for x in ("emb_values", *_STATE_FILES)]
        num_rows = files.rows_in(op, path, 8)
        for file in found if num_rows == 0 else ():
            if file.is_file() and (size := files.size_of(op, file)):
                raise ValueError(
                    f"{op}: {path}: byte 0: got the end of the file, wanted keys for {size} bytes of {file}."
                )
        if num_rows:
            others = [found[0], next((file for file in found[1:] if file.is_file()), found[1])]
            form = tuple(files.rows_in(op, other, 4 * num_rows) if other.is_file() else 0 for other in others)
            shapes = [(other, (num_rows, width)) for other, width in zip(others, form, strict=True) if width]
            arrays = [RawArray(op, other, np.dtype("<f4"), shape) for other, shape in shapes]
            parts.append((RawArray(op, path, np.dtype("<i8"), (num_rows,)), *arrays))
            forms.add(form)
    if not forms:
        return _Saved(0, 0, np.dtype(np.float32), {}, lambda *_: iter(()))
    if len(forms) != 1 or 0 in (form[0] for form in forms):
        raise ValueError(f'{op}: table "{name}": got rows and state of {forms} numbers, wanted the same in all ranks.')
    ((dim, width),) = forms
    by_width = {0: {}, 2 * dim: {"momentum1": dim, "exp_avg_sq": dim}, dim: {"momentum1": dim}}
    states = by_width.get(width, {"momentum1": 1} if width in (1, _PADDED) else {"opt_values": width})
    may_be_padded = width == _PADDED and width in by_width

    def read(at_once: int, names: Sequence[str]) -> _Pieces:
        for keys, *others in parts:
            for i in range(0, keys.shape[0], at_once):
                rows, *state = (array.read(i, i + at_once) for array in others[: 2 if names else 1])
                columns = np.split(state[0], np.cumsum(list(states.values())), axis=1) if names else ()
                yield keys.read_keys(i, i + at_once), rows, dict(zip(states, columns, strict=False))

    def keys_of(at_once: int = files.CHUNK_BYTES // 8) -> Iterator[np.ndarray]:
        return (keys.read_keys(i, i + at_once) for keys, *_ in parts for i in range(0, keys.shape[0], at_once))

    num_rows = sum(keys.shape[0] for keys, *_ in parts)
    files.check_keys(op, num_rows, keys_of, lambda number: f'table "{name}": row {number}')
    return _Saved(num_rows, dim, np.dtype(np.float32), states, read, may_be_padded=may_be_padded)


# State ---------------------------------------------------------------------------------------------------------------


def _records(op: str, name: str, saved: _Saved, optimizer: Optimizer | None, chunk_rows: int | None) -> RecordChunks:
    if saved.may_be_padded and optimizer is not None and optimizer.name == "rowwise_adagrad":
        saved = dataclasses.replace(saved, states={"momentum1": 1})
    names = {} if optimizer is None else _names_of_state(op, name, saved, optimizer)
    widths = {ours: saved.states[theirs] for ours, theirs in names.items()}
    at_once = files.rows_of_chunk(op, chunk_rows, 8 + saved.dim * saved.dtype.itemsize + 4 * sum(widths.values()))

    def chunks() -> Iterator[Records]:
        for keys, rows, states in saved.read(at_once, list(names.values())):
            parts = {ours: states[theirs][:, : widths[ours]] for ours, theirs in names.items()}
            what, dtype = f'{op}: table "{name}"', np.dtype(np.float32)
            state = {ours: convert_to(f"{what}: {ours}", part, dtype) for ours, part in parts.items()}
            yield Records(keys, rows, state)

    return RecordChunks(saved.num_rows, saved.dim, widths, chunks)


def _names_of_state(op: str, table: str, saved: _Saved, optimizer: Optimizer) -> dict[str, str]:
    """Finds each state of an optimizer in the files; refuses what it could not continue from exactly."""
    widths = {state.name: state.dim for state in optimizer.state_specs(saved.dim)}
    possible = _STATES.get(optimizer.name, {})
    found = {ours: [name for name in theirs if name in saved.states] for ours, theirs in possible.items()}
    names = {ours: theirs[0] for ours, theirs in found.items() if theirs}
    got, wanted = f"state {dict(saved.states)} in the files (numbers a row)", ""
    if optimizer.name not in _STATES or possible.keys() != widths.keys():
        got = f"optim.{optimizer.name} with state {list(widths)}, which continues no state of TorchRec exactly"
        wanted = f"one of {list(_STATES)}, sgd without momentum"
    elif getattr(optimizer, "eps_in_sqrt", False) and getattr(optimizer, "eps", 0.0) > 0:
        got = f"optim.{optimizer.name} with eps under the root"
        wanted = "eps_in_sqrt=False: TorchRec and torch add eps to the root"
    elif widths and saved.blocks:
        got = f"one number of state a row for each of the columns {list(saved.blocks)}"
        wanted = f'one for those of the table: declare a table for each, as of "{table}[0:{saved.blocks[0][1]}]"'
    elif {ours: saved.states[theirs] for ours, theirs in names.items()} != widths or (
        saved.states.keys() - {"dense step", *names.values()}
    ):
        wanted = f"{widths} of optim.{optimizer.name}, named as {possible}; declare the optimizer that wrote them"
    if wanted:
        raise ValueError(f'{op}: table "{table}": got {got}, wanted {wanted}; with_state=False takes rows alone.')
    return names
