"""A dataset of Grain that says which samples make a batch: batches by number, for one process.

Grain does the rest: epochs (`repeat`), transformations (`map`), threads, worker processes, and iterators whose state
can be saved. A batch depends on nothing but the source, the seed, the epoch and its number. Therefore the state of an
iterator is a number, and training can go on with another number of processes.
"""

import functools
import zlib
from collections.abc import Mapping
from typing import Any

import grain
import jax
import numpy as np
from absl import flags

from jaxsok import checks
from jaxsok.collection import Collection
from jaxsok.data.samples import Source, join_columns
from jaxsok.pack import HostBatch, PadTo

NUM_AHEAD = 4  # batches that are read ahead, if not stated otherwise


class Batches(grain.MapDataset):
    """Batches of a source by number, each for the part of this process: a `grain.MapDataset`.

    Without a seed, batches follow the source's order, and each process reads its part of every batch. With a seed,
    each epoch takes the source's blocks in another order, and mixes the samples of `shuffle_batches` batches in a row;
    within a batch samples keep the source's order. The source is then read in `num_streams` parts of equal size side by
    side, so that a process reads only blocks of its own.

    Args:
      source: the samples.
      batch_size: samples of a batch, of all processes together.
      seed: shuffles each epoch in another way; None: in the source's order.
      shuffle_batches: batches whose samples are mixed; their blocks are kept in memory.
      num_streams: parts in which the source is read at once; a batch has as many samples of each. None: one for each
        process with a seed, else one. Keep the number when training goes on with other processes: the batches stay the
        same.
      start: the first sample to read.
      stop: the sample after the last one; None: all. Negative numbers count from the end.
      drop_remainder: whether to leave out the samples that do not fill a batch. Otherwise the last batch is smaller,
        and may be empty for some processes; that takes one stream.
      process_index: which part of each batch to read; None: that of this JAX process.
      process_count: in how many parts each batch is read; None: as many as there are JAX processes.

    Raises:
      ValueError: numbers out of their range, sizes that cannot be shared evenly, or fewer samples than one batch.

    Cost:
      Reading a batch calls `source.take` once for each stream of this process. A shuffled window holds 8 bytes for each
      of its samples.

    Example:
      >>> from jaxsok.data import ArraySource
      >>> source = ArraySource({"user": np.arange(10)})
      >>> batches = Batches(source, 4, process_index=0, process_count=1)
      >>> [batch["user"].tolist() for batch in batches]
      [[0, 1, 2, 3], [4, 5, 6, 7]]
      >>> shuffled = Batches(source, 4, seed=0, process_index=0, process_count=1).repeat(2)
      >>> iterator = iter(shuffled)
      >>> first = next(iterator)
      >>> state = iterator.get_state()
      >>> second = next(iterator)
      >>> iterator.set_state(state)
      >>> next(iterator)["user"].tolist() == second["user"].tolist()
      True
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        *,
        seed: int | None = None,
        shuffle_batches: int = 16,
        num_streams: int | None = None,
        start: int = 0,
        stop: int | None = None,
        drop_remainder: bool = True,
        process_index: int | None = None,
        process_count: int | None = None,
    ):
        super().__init__()
        self._source = source
        self._first, last, _ = slice(start, stop).indices(len(source))
        count = jax.process_count() if process_count is None else process_count
        index = jax.process_index() if process_index is None else process_index
        streams = (1 if seed is None else count) if num_streams is None else num_streams
        counts = {"batch_size": batch_size, "shuffle_batches": shuffle_batches, "num_streams": streams}
        counts = {name: checks.integer(f"Batches: {name}", value, 1) for name, value in counts.items()}
        batch_size, shuffle_batches, streams = counts.values()
        checks.integer("Batches: process_count", count, 1)
        checks.integer("Batches: process_index", index, 0, count - 1)
        self._seed = None if seed is None else checks.integer("Batches: seed", seed, 0)
        # A process reads whole streams, or a part of one.
        if batch_size % streams or batch_size % count or (streams % count and count % streams):
            raise ValueError(
                f"Batches: batch_size: got {batch_size} for {streams} streams and {count} processes, wanted a multiple "
                "of both, and one of these two a multiple of the other."
            )
        if not drop_remainder and streams > 1:
            raise ValueError(f"Batches: drop_remainder: got False with {streams} streams, wanted one stream.")
        self._of_stream = batch_size // streams  # samples of a batch from one stream
        num_samples = max(0, last - self._first)
        self._stream_samples = num_samples // streams
        self._length = (self._stream_samples + (0 if drop_remainder else self._of_stream - 1)) // self._of_stream
        if not self._length:
            got = f"{batch_size} for {num_samples} samples, {self._first} to {last}"
            raise ValueError(f"Batches: batch_size: got {got}, wanted at most as many.")
        if seed is not None and drop_remainder:
            self._stream_samples = self._length * self._of_stream
        self._num_unread = num_samples - streams * self._stream_samples
        # This process's part of each batch: from these streams, these of each stream's samples.
        self._parts = _parts_of(index, count, streams, self._of_stream)
        self._window = shuffle_batches * self._of_stream
        self._starts = np.append(self._first, source.ends[(source.ends > self._first) & (source.ends < last)])
        self._sizes = np.diff(np.append(self._starts, last))
        self.form = counts | {"seed": self._seed, "start": self._first}
        """A state of an iterator holds for batches of this form alone, in any number of processes."""
        self.form |= {"num_samples": num_samples, "drop_remainder": bool(drop_remainder)}
        if self._seed is not None or streams > 1:
            self.form["blocks"] = zlib.crc32(self._sizes.astype("<i8").tobytes())
        at_once = self._of_stream * max(NUM_AHEAD, shuffle_batches if seed is not None else 0)
        most = int(np.ceil(at_once / self._sizes.mean())) + 1
        source.keep(2 * most * len(self._parts))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        epoch, number = divmod(index if index >= 0 else range(self._length)[index], self._length)
        found = [self._source.take(self._positions(epoch, number, stream, part)) for stream, part in self._parts]
        return found[0] if len(found) == 1 else join_columns(found)

    def __str__(self) -> str:
        return f"Batches({type(self._source).__name__}, {self._length} of {self._of_stream} samples from each stream)"

    def _positions(self, epoch: int, number: int, stream: int, part: slice) -> slice | np.ndarray:
        """Finds the samples of a batch in the source: ascending, or as a slice."""
        begin = number * self._of_stream
        last = min(begin + self._of_stream, self._stream_samples)
        if self._seed is None:
            offset = self._first + stream * self._stream_samples
            return slice(offset + min(begin + part.start, last), offset + min(begin + part.stop, last))
        window, place = divmod(begin, self._window)
        size = min(self._window, self._stream_samples - window * self._window)
        mixed = _mix(self._seed, epoch, window, size, tuple(stream for stream, _ in self._parts))[stream]
        # Blocks in the order of this epoch, and the place of each sample among them.
        order, skipped = _start_epoch(self._seed, epoch, len(self._sizes), self._num_unread)
        places = skipped + stream * self._stream_samples + window * self._window + mixed[place : place + last - begin]
        ends = np.cumsum(self._sizes[order])
        number_of = np.searchsorted(ends, places, "right")
        blocks = order[number_of]
        return np.sort(self._starts[blocks] + places - (ends[number_of] - self._sizes[blocks]))[part]


def iterate(
    dataset: grain.MapDataset, *, num_threads: int = 4, num_workers: int = 0, num_ahead: int = NUM_AHEAD
) -> grain.DatasetIterator:
    """Reads a dataset of batches ahead of its user; the result's state can be saved and set.

    It is what `to_iter_dataset` and `mp_prefetch` do, with few batches in memory: Grain's own defaults are made for
    single samples.

    Args:
      dataset: `Batches`, repeated, mapped and sliced as wanted.
      num_threads: threads that read and transform; NumPy and PyArrow leave the interpreter's lock to others meanwhile.
      num_workers: processes that read and transform; 0: this one. They pay where transformations run in Python. A
        state has a place for each, so it does not fit another number of them.
      num_ahead: batches that wait, in each process; at least one for each thread.

    Example:
      >>> from jaxsok.data import ArraySource
      >>> batches = Batches(ArraySource({"user": np.arange(4)}), 2, process_index=0, process_count=1)
      >>> [batch["user"].tolist() for batch in iterate(batches.repeat(2))]
      [[0, 1], [2, 3], [0, 1], [2, 3]]
    """
    if not isinstance(dataset, grain.MapDataset):
        got = type(dataset).__name__
        raise TypeError(f"iterate: dataset: got {got}, wanted Batches of a source, which may be mapped.")
    options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=max(num_ahead, num_threads))
    read = dataset.to_iter_dataset(options)
    if num_workers:
        if not flags.FLAGS.is_parsed():  # Grain reads its own, also in a program that has none
            flags.FLAGS.mark_as_parsed()
        read = read.mp_prefetch(grain.MultiprocessingOptions(num_workers, per_worker_buffer_size=num_ahead))
    return _ReadAgain(iter(read), _forms_of(dataset))


def _forms_of(dataset: grain.MapDataset) -> list[dict[str, int | None]]:
    """Lists the forms of the batches that a dataset is made of."""
    own = [dataset.form] if isinstance(dataset, Batches) else []
    return own + [form for parent in dataset.parents for form in _forms_of(parent)]


class _ReadAgain(grain.DatasetIterator):
    """Reads a batch again that could not be read; Grain's own iterator leaves it out, and its state names others.

    Its state also has the form of the batches: in another form, their numbers are those of other samples.
    """

    def __init__(self, read: grain.DatasetIterator, forms: list[dict[str, int | None]]):
        super().__init__(read)
        self._read, self._forms = read, forms

    def __next__(self) -> Any:
        state = self.get_state()
        try:
            return next(self._read)
        except StopIteration:
            raise
        except BaseException:  # also after Ctrl-C
            self.set_state(state)
            raise

    def get_state(self) -> Any:
        return {**self._read.get_state(), "batches": self._forms}

    def set_state(self, state: Any) -> None:
        left = dict(state)
        forms = left.pop("batches", self._forms)
        pairs, num_read = list(zip(forms, self._forms, strict=False)), left.get("next_index")
        if len(forms) != len(self._forms) or not all(_fits(form, own, num_read) for form, own in pairs):
            raise ValueError(
                f"iterate: state: got one of batches {forms}, wanted {self._forms}; make Batches as they were: "
                "num_streams is the number of processes unless it is given, and stop keeps new samples out."
            )
        given, own = (len(each.get("iterators_in_use_states", ())) for each in (left, self._read.get_state()))
        if given != own:
            raise ValueError(
                f"iterate: state: got one of {given} worker processes, wanted one of num_workers={own}; use as many as "
                "when it was saved."
            )
        self._read.set_state(left)


def _fits(form: dict[str, int | None], own: Mapping[str, Any], num_read: int | None) -> bool:
    """Returns whether batch `num_read` is the same in two forms, of which the first, of an older version, may say less.

    In order, samples behind those that were read do not matter: they may come, or go.
    """
    others = {name for name, value in form.items() if own.get(name) != value}
    if not others or "blocks" in own or others - {"num_samples", "drop_remainder"} or num_read is None:
        return not others
    fewest = min(own["num_samples"], form.get("num_samples") or 0)
    return num_read <= fewest // own["batch_size"]  # in the first epoch, and behind whole batches


class PackBatch(grain.transforms.Map):
    """A transformation for Grain that packs raw batches for a collection, in whatever process it runs.

    `collection.batch` and `collection.pipeline` take what it makes as a raw batch; the copy to the devices is left to
    them. A batch that only NumPy can pack (such as features whose samples share bags) passes as arrays.

    `collection.pipeline` packs with several threads anyhow, straight into pinned memory; packing in worker processes
    pays where they do other work too, which holds Python's lock.

    Args:
      collection: for whose devices in this process batches are packed.
      pad_to: that of `collection.batch`; give both the same.

    Example:
      >>> import jaxsok, numpy as np
      >>> from jaxsok.data import ArraySource, Batches, iterate
      >>> collection = jaxsok.Collection(
      ...     [jaxsok.TableSpec("user", 4, jaxsok.optim.sgd(0.1))], [jaxsok.FeatureSpec("user", table="user")]
      ... )
      >>> batches = Batches(ArraySource({"user": np.arange(8)}), 4, process_index=0, process_count=1)
      >>> for batch, plan in collection.pipeline(iterate(batches.map(PackBatch(collection)))):
      ...     print(batch.features)
      Features(user: 4 keys -> [4, dim])
      Features(user: 4 keys -> [4, dim])
    """

    def __init__(self, collection: Collection, *, pad_to: PadTo = None):
        self._packer, self._pad_to = collection.packer.for_workers(), pad_to

    def map(self, raw: Mapping[str, Any]) -> HostBatch | Mapping[str, Any]:
        """Packs a raw batch; errors are those of `collection.batch`, but are left to it where data are refused."""
        is_split = self._packer.is_split
        begun = self._packer.start(raw, self._packer.resolve(raw, self._pad_to, is_split), is_split)
        return begun.wait() or begun.raw


def _parts_of(index: int, count: int, streams: int, of_stream: int) -> list[tuple[int, slice]]:
    """Finds which streams a process reads, and which of a batch's samples from each."""
    if streams >= count:
        of_process = streams // count
        return [(stream, slice(0, of_stream)) for stream in range(index * of_process, (index + 1) * of_process)]
    stream, part = divmod(index, count // streams)
    share = of_stream * streams // count
    return [(stream, slice(part * share, (part + 1) * share))]


@functools.lru_cache(maxsize=8)
def _start_epoch(seed: int, epoch: int, num_blocks: int, num_unread: int) -> tuple[np.ndarray, int]:
    """Returns the order of an epoch's blocks, and how many samples it leaves out before the first one that it reads.

    It leaves out `num_unread` samples. Their share before the first differs from epoch to epoch, so that a source of
    few blocks does not lose the same samples each time.
    """
    random = np.random.default_rng([seed, epoch])
    return random.permutation(num_blocks), int(random.integers(num_unread + 1))


@functools.lru_cache(maxsize=8)
def _mix(seed: int, epoch: int, window: int, size: int, streams: tuple[int, ...]) -> dict[int, np.ndarray]:
    """Returns the order of a window's samples in each stream of a process, which its next batches need too."""
    return {stream: np.random.default_rng([seed, epoch, stream, window]).permutation(size) for stream in streams}
