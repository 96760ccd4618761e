"""A session: the models of a configuration, opened, looked up in by many threads, and updated meanwhile.

Tables come from folders (folders.py), lie on a device or the host (frozen.py), are read by programs of few sizes
(fused.py), and change in versions (versions.py). Each answer is of one version, whole.
"""

import functools
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxsok import checks, host_limits
from jaxsok.serving import config as config_lib, databases as databases_lib, devices as devices_lib
from jaxsok.serving.config import Config, ModelConfig
from jaxsok.serving.errors import ConfigError, ServingError
from jaxsok.serving.model.served import Answer, Model, Served, choose_model, open_model
from jaxsok.serving.model.versions import InPlace, Memory, Source

_log = logging.getLogger(__name__)


def open(
    config: str | os.PathLike[str] | Mapping[str, Any] | Config,
    device: Any = None,
    *,
    warm_up: bool = True,
    memory_limit: int | None = None,
) -> "Session":
    """Opens all models of a configuration.

    Args:
      config: the path of an HPS JSON file, its parsed content, or what `read_config` gave.
      device: of JAX; None: those whose numbers are in `deployed_device_list`.
      warm_up: whether the programs of lookups in all tables of a model, and of its dense model, are compiled now, so
        that no such request waits for one. They also answer requests for fewer tables, until the programs of these are
        compiled in the background.
      memory_limit: bytes of each device's memory that tables may take; None: all that the device reports as free.
        Rows in host memory may take what the system and its control groups leave.

    Raises:
      ConfigError: the configuration, or a device that is not there.
      ServingError, FileNotFoundError, CorruptFileError, ValueError: files; see `folders.open_table`. Or no room.
      DatabaseError: Redis or RocksDB cannot be reached.

    Cost:
      Reads all files. Memory of a model: `frozen_bytes` of its tables, and 41 bytes a row on the host.

    Example:
      >>> import tempfile
      >>> import numpy as np
      >>> from jaxsok import Records
      >>> from jaxsok.interchange.hps import write_hps
      >>> model = {
      ...     "model": "dlrm",
      ...     "embedding_table_names": ["user"],
      ...     "embedding_vecsize_per_table": [1],
      ...     "maxnum_catfeature_query_per_table_per_sample": [2],
      ...     "default_value_for_each_table": [-1.0],
      ...     "deployed_device_list": [0],
      ...     "gpucacheper": 1.0,
      ... }
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     _ = write_hps(folder, Records(np.array([7, 9], np.uint64), np.array([[1.0], [2.0]], np.float32)))
      ...     session = open({"supportlonglong": True, "models": [{**model, "sparse_files": [folder]}]})
      >>> answer = session.lookup({"user": np.array([[7, 8], [9, 9]])})
      >>> answer["user"].tolist(), answer.version
      ([[[1.0], [-1.0]], [[2.0], [2.0]]], 1)
    """
    read = config_lib.read(config)
    if memory_limit is not None and not (checks.is_number(memory_limit) and memory_limit >= 0):
        raise ConfigError(f"open: memory_limit: got {memory_limit!r}, wanted bytes, or None.")
    if read.without_effect:
        paths = ", ".join(key.path for key in read.without_effect)
        _log.warning("open: config: got keys without effect: %s; Session.report() says why.", paths)
    return Session(read, device, warm_up=warm_up, memory_limit=memory_limit)


class Session:
    """The served models. Made by `open`; all methods may be called from many threads at the same time."""

    def __init__(self, config: Config, device: Any = None, *, warm_up: bool = True, memory_limit: int | None = None):
        self.config = config
        self._memory_limit = memory_limit
        self._is_closed, self._process = False, os.getpid()
        self._models: dict[str, Served] = {}
        self._closing: list[Served] = []  # models of which something ran when they were to be closed
        self._followers: dict[str, Any] = {}  # `streams.Follower`, by model
        lock = threading.Lock()  # of the devices' memory
        self._databases: databases_lib.Connected = (None, None)
        host = Memory([devices_lib.host_device()], lambda: host_limits.available_bytes(), threading.Lock())
        try:
            if config.databases and any(model.tier != "device" for model in config.models):
                self._databases = databases_lib.connect(config)
            for number, model in enumerate(config.models):
                at = _devices(number, model, device)
                memory = Memory(at, functools.partial(self._free_bytes, at), lock)
                self._models[model.model] = open_model(config, model, memory, host, self._databases, warm_up=warm_up)
            if config.update_source.type == "redis_stream":
                from jaxsok.serving import streams

                for name, served in self._models.items():
                    self._followers[name] = streams.Follower(config.update_source, name, served)
                    self._followers[name].start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    @property
    def models(self) -> Mapping[str, Model]:
        """The models as they are now, by name."""
        return {name: served.describe() for name, served in self._models.items()}

    def lookup(self, keys: Mapping[str, Any], model: str | None = None) -> Answer:
        """Reads rows: float32 `[*shape, dim]` by table, read-only.

        All arrays of an answer lie in one piece of memory, pinned for tables on a GPU, which is used again when none of
        them is left: copy rows that are to be kept.

        `keys` are NumPy integers of one axis or more by table; not every table needs some. Negative int64 are the
        uint64 of the same bits; PADDING_KEY (-1) reads zeros. Missing keys read the default of their table, or the row
        that they would get in training. `model` may be None if there is one.

        Raises:
          UnknownModelError, UnknownTableError: there is none.
          RequestError: keys of the wrong type, or keys above 32 bits if the model's keys have 32 bits.
          RequestTooLargeError: more keys of a table than `Model.max_keys`.
        """
        return self._find("lookup", model).lookup(keys)

    def predict(self, inputs: Mapping[str, Any], model: str | None = None) -> Answer:
        """Runs the dense model over the tables; gives its outputs by name.

        If each output has a row for each sample, batches are padded to a power of two, and the model must treat each
        sample by itself. Other models get the batch as it is; each size is compiled when it first comes.

        Args:
          inputs: by name, as in `Model.inputs`.
          model: its name; None, if there is one.

        Raises:
          UnknownModelError: there is none, or it has no dense model.
          RequestError, RequestTooLargeError: inputs that are missing, of the wrong type or shape, or too many.
        """
        return self._find("predict", model).predict(inputs)

    def update(
        self,
        source: Source | None,
        *,
        model: str | None = None,
        dense_file: str | os.PathLike[str] | None = None,
        in_place: InPlace = "auto",
    ) -> int:
        """Brings tables, and the dense model if given, to a new version, while lookups go on; returns its number.

        A lookup reads all its tables before the update or all after it. After a failure the old version is served, and
        after Ctrl-C the old or the new one, as `stats` says.

        Args:
          source: a folder: an export of `jaxsok.checkpoint` (a delta must follow what is served), a step of an Orbax
            checkpoint, or HPS directories in folders of the tables' names. Or a mapping from tables to such folders, or
            to HPS directories. Or a list of exports that follow each other, which become one version. Tables that are
            not there stay. None: only the dense model changes.
          model: its name; None, if there is one.
          dense_file: an artifact that replaces the dense model in the same instant; None: it stays.
          in_place: False: the new version is a copy, in new arrays for the stores that change. True: rows are changed
            where they lie; lookups wait meanwhile, and new keys take spare rows. "auto": in place where two copies do
            not fit.

        Raises:
          ServingError: it does not fit what is served, or there is no room; the message has the bytes or the rows.
          UnknownModelError, UnknownTableError: there is none.
          FileNotFoundError, CorruptFileError, ValueError: of files, as `folders.open_table`.
          MemoryError, JaxRuntimeError: memory ran out on the way. If rows changed in place could not be put back
            either, lookups raise RuntimeError until another update has put them back.

        Cost:
          A copy: the rows of each store that changes. In place: the changed rows, old and new, on the host.
          Both: a copy of the store's map of rows on the host (41 bytes a row), and a new index on the device (25
          bytes a row). Where sizes or the dense model change, the last programs of requests are compiled before the
          version is served.
        """
        return self._find("update", model).update(source, dense_file, in_place)

    def refresh(self, model: str | None = None) -> None:
        """Reads the rows of a device's cache again from the tier below; does nothing without a cache."""
        for reader in self._find("refresh", model).readers:
            reader.refresh()

    def stats(self, model: str | None = None) -> dict[str, Any]:
        """Returns the counts of a model; `model` may be None if there is one.

        Gives `version` and `source` (the folders of its tables); `lookups`, `predicts`, `updates`; the keys that were
        read as `keys`, `hits`, `missing`, `padding` and `hit_rate`; `bytes` of the device and `host_bytes`; and
        `tables`: the same of each. A prediction counts the keys of the inputs by which the model looks up a table, once
        for each such table, and not those that it computes. Where rows are cached, `distinct`, `hits`, `misses` and
        `missing` are of distinct keys of each call: hits were in the cache, missing ones are misses that no tier has.
        Warming up is not counted. With an `update_source`, `lag_versions` of its stream are not served, the first of
        them for `lag_s` seconds; the last one was served after `delay_s`; and `is_following` is False while Redis does
        not answer, it refuses the position of this server, or a version is refused.
        """
        served = self._find("stats", model)
        follower = self._followers.get(served.config.model)
        return served.stats() | (follower.stats() if follower else {})

    def report(self) -> str:
        """Describes what was loaded: tables, memory, limits, and keys of the configuration without effect."""
        self._require_open("report")
        lines = list(self.config.summary())
        for served in self._models.values():
            lines += served.report()
        return "\n".join(lines)

    def close(self, timeout_s: float | None = None) -> bool:
        """Gives the memory back. Lookups that run end; later ones are refused.

        Waits `timeout_s` (None: any time) for a refresh and for background compilation, and returns whether all has
        ended. Later they end by themselves; Python's own end waits for a compiler all the same. Another `close` waits
        for what has not ended, and closes the databases then.
        """
        self._is_closed = True
        if self._process != os.getpid():  # a fork has none of its threads
            return True
        models, self._models = self._models, {}
        self._closing += models.values()
        until = None if timeout_s is None else time.monotonic() + timeout_s
        followers = list(self._followers.values())
        for worker in (
            *followers,
            *(each for served in self._closing for each in (served.versions, *served.readers)),
        ):
            worker.stop()  # stop all before waiting for any
        have_ended = [worker.close(until) for worker in (*followers, *self._closing)]
        of_models = zip(self._closing, have_ended[len(followers) :], strict=True)
        self._closing = [served for served, has_ended in of_models if not has_ended]
        of_databases = [database.close(until) for database in filter(None, self._databases)]
        if all(of_databases):  # otherwise another call closes them
            self._databases = (None, None)
        return all(have_ended + of_databases)

    def _require_open(self, op: str) -> None:
        if self._is_closed:
            raise ServingError(f"{op}: session: got one that is closed, wanted an open one.")

    def _find(self, op: str, model: str | None) -> "Served":
        models = self._models
        self._require_open(op)
        chosen = choose_model(op, self.config, model)
        if chosen.tier == "cache" and self._process != os.getpid():  # its threads fetch rows
            raise ServingError(
                f"{op}: session: got one of process {self._process}, which was forked since, wanted one that process "
                f'{os.getpid()} has opened, for the cache of model "{chosen.model}": a fork has none of its threads.'
            )
        return models[chosen.model]

    def _free_bytes(self, devices: Sequence[Any]) -> int | None:
        """Counts the free bytes of the device that has the fewest; None: not known."""
        free = []
        for device in devices:
            here = [model for model in self._models.values() if device in model.devices and model.config.gpucache]
            limit, used = self._memory_limit, sum(model.device_bytes for model in here)
            if limit is None:
                found = device.memory_stats() or {}
                limit, used = found.get("bytes_limit"), found.get("bytes_in_use", 0)
                if limit is None and device.platform == "cpu":
                    limit, used = host_limits.available_bytes(), 0
            free.append(None if limit is None else max(0, limit - used))
        return None if None in free else min(free)


def _devices(number: int, model: ModelConfig, given: Any) -> tuple[Any, ...]:
    if model.tier == "host":
        return (jax.local_devices(backend="cpu")[0],)
    if given is not None:
        return (given,)
    devices = jax.local_devices()
    if (last := max(model.devices)) >= len(devices):
        path, wanted = f"models[{number}].deployed_device_list", f"0 to {len(devices) - 1}, the devices that are there"
        raise ConfigError(f"open: {path}: got {last}, wanted {wanted}; or pass device=.", path=path)
    return tuple(devices[device] for device in model.devices)
