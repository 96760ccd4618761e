"""Reads raw batches and packs them ahead of the steps, in a thread or by the thread that steps.

The thread reads raw batches and packs them. When batch k is handed out, the next one is packed and its copy to the
devices has begun, and the one after that is read and packed while the caller dispatches step k.

With `prefetch=0` the same happens without that thread. The calling thread reads, and begins to pack batch k + 2 just
before it hands out batch k: the library's threads then pack while the caller dispatches step k.
"""

import concurrent.futures
import contextlib
import copy
import dataclasses
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxsok.checks import not_none
from jaxsok.features import Bags, Batch
from jaxsok.pack import Begun, HostBatch, Packer, Packing, PadTo
from jaxsok.settings import current_settings, in_settings

_Read = tuple[Packing, Any] | None
"""A batch on its way to the devices, and the iterator's state after it; None: there is no further batch."""


class _Slot(concurrent.futures.Future):
    """A future of the reader's thread."""

    def __init__(self, settings: tuple | None):
        super().__init__()
        self.settings = settings
        """JAX's settings in the thread that opened the slot."""
        self.is_requested = False
        """True as soon as the reader is sure to fill it."""


class _Stages:
    """A future that has no thread: the caller that needs its result reads, packs and sends a batch, in stages.

    Ctrl-C is raised at once; the stage is done again when the result is needed, by the end of the loop or a later one.
    """

    def __init__(self, reader: "BatchReader"):
        self._reader: BatchReader | None = reader  # None at the end
        self._raw: tuple[Mapping[str, Any], ...] = ()  # one, from when it is read until it is packed
        self._state: Any = None
        self._begun: Begun | None = None
        self._packed: HostBatch | Batch | None = None
        self._result: _Read = None
        self._error: BaseException | None = None

    def run_next(self) -> None:
        """Runs one stage, if there is one left."""
        if (reader := self._reader) is None:
            return
        try:
            self._run_stage(reader)
        except Exception as error:
            reader.is_over = True
            self._end(None, error)
        except BaseException:
            self._begun = None  # it is packed again
            raise

    def pack(self) -> None:
        """Runs stages until the batch is packed: then the reader may fill its arrays again."""
        while self._reader is not None and self._packed is None:
            self.run_next()

    def _run_stage(self, reader: "BatchReader") -> None:
        """Reads a batch and begins to pack it; waits until it is packed; or sends it."""
        packer = reader.packer
        if self._packed is not None:
            self._end((packer.send(self._packed), self._state), None)
        elif self._begun is not None:
            packed = packer.complete(self._begun)
            # The reader may fill its own arrays again before the batch is handed out.
            self._packed = dataclasses.replace(packed, rest=_copy_arrays(packed.rest))
            self._raw, self._begun = (), None
        elif self._raw or self._read(reader):
            self._state = reader.state_of_batches()
            self._begun = packer.begin(self._raw[0], reader.pad_to)
        else:
            self._end(None, None)

    def _end(self, result: _Read, error: BaseException | None) -> None:
        """Keeps the result, and nothing else."""
        self._result, self._error, self._reader = result, error, None
        self._raw, self._begun, self._packed = (), None, None

    def _read(self, reader: "BatchReader") -> bool:
        """Reads the raw batch; returns False if there is none."""
        if not reader.is_over:
            # `for` keeps the batch before a Ctrl-C is heard, unlike a call of `next`.
            for raw in map(next, (reader.batches,)):
                self._raw = (raw,)
            if not self._raw:
                reader.is_over = True
        return bool(self._raw)

    def exception(self) -> BaseException | None:
        """Runs all stages; returns what one of them raised."""
        while self._reader is not None:
            self.run_next()
        return self._error

    def result(self) -> _Read:
        """Runs all stages; returns their result."""
        if error := self.exception():
            raise error
        return self._result


class BatchReader:
    """Reads the batches of a pipeline, packs them and sends them on their way."""

    def __init__(self, packer: Packer, batches: Iterable[Mapping[str, Any]], pad_to: PadTo, has_thread: bool):
        self.packer, self.batches, self.pad_to = packer, iter(batches), pad_to
        self.packed: tuple[_Slot | _Stages, ...] = ()
        """Batches that are being read and packed, or are packed. Whoever takes the first one assigns the rest."""
        self.is_over = False
        """True if nothing is read any more: there is no more, or reading failed, or the loop is over."""
        self._executor = concurrent.futures.ThreadPoolExecutor(1, "jaxsok.pipeline") if has_thread else None
        self._thread_id: int | None = None
        self._reading = threading.Lock()  # held by the thread: Ctrl-C while it starts may leave two

    def pack(self, num_batches: int, num_awaited: int = 1) -> None:
        """Reads and packs until there are `num_batches` batches, or no more; waits for the first `num_awaited`."""
        while len(self.packed) < num_batches and not self.is_over:
            if self._executor is not None:
                slot = _Slot(current_settings())
                self.packed = (*self.packed, slot)
                self._request(slot)
                continue
            if self.packed and isinstance(last := self.packed[-1], _Stages):
                last.pack()  # since the reader may fill its arrays again
            stages = _Stages(self)
            self.packed = (*self.packed, stages)
            stages.run_next()
        for packed in self.packed[:num_awaited]:
            self._wait_for(packed)

    def _request(self, slot: _Slot) -> None:
        not_none(self._executor).submit(self._fill)
        slot.is_requested = True

    def _wait_for(self, packed: _Slot | _Stages) -> BaseException | None:
        """Waits until a batch is packed; returns what was raised."""
        if isinstance(packed, _Slot) and not packed.is_requested:  # Ctrl-C came first
            self._request(packed)
        return packed.exception()

    def _fill(self) -> None:
        """Fills all open slots in the reader's thread, under the settings of the threads that opened them."""
        with self._reading:
            self._thread_id = threading.get_ident()
            while (slot := next((s for s in self.packed if isinstance(s, _Slot) and not s.done()), None)) is not None:
                try:
                    settings = slot.settings
                    with contextlib.nullcontext() if settings is None else in_settings(settings):
                        read = _Stages(self).result()
                except BaseException as error:
                    slot.set_exception(error)
                else:
                    slot.set_result(read)

    def stop(self) -> None:
        """Reads no more; when it returns, nothing reads the caller's iterator. What was read stays."""
        self.is_over = True
        # Where the reader's thread collects the pipeline, it would wait for itself.
        if threading.get_ident() != self._thread_id:
            self.packed = tuple([packed for packed in self.packed if self._wait_for(packed) or packed.result()])

    def state_of_batches(self) -> Any:
        """Returns the state of the iterator of batches; None if it reports none."""
        get_state = getattr(self.batches, "get_state", None)
        return None if get_state is None else get_state()


def _copy_arrays(value: Any) -> Any:
    """Copies the NumPy arrays of a value, also in bags and containers; other leaves stay."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Bags):
        return Bags(**{field.name: _copy_arrays(getattr(value, field.name)) for field in dataclasses.fields(value)})
    if type(value) in (list, tuple):
        return type(value)(map(_copy_arrays, value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_copy_arrays, value))
    if isinstance(value, dict):
        result = copy.copy(value)  # of its own kind
        for name, each in value.items():
            result[name] = _copy_arrays(each)
        return result
    return value
