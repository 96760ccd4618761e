"""The values of a configuration, which declare its keys: kind, default, and why a key has no effect, if so.

The defaults are those of HugeCTR 24.06. Keys that 24.06 ignores, and versions 3.0 to 23.x read, are here as well.
"""

import dataclasses
import os
import socket
import threading
from typing import Any, Literal

from jaxsok.serving.config import keys
from jaxsok.serving.config.keys import Key, Keys, column, declare, without_effect
from jaxsok.serving.frozen import DTYPES
from jaxsok.types import MAX_DIM

Tier = Literal["device", "cache", "host"]

_UNREAD = "HPS does not read it from this file, either"
_OLDER = "it is of an older HPS: 24.06 does not read it, either"
_OF_PROCESS = "rows in host memory are of this process, in one piece and allocated at once"
_OF_KAFKA = "it is of Kafka, which jaxsok does not read"
_NO_FILTERS = "a stream brings all tables of its model"


@dataclasses.dataclass(frozen=True)
class WithoutEffect:
    """A key that was written but sets nothing here."""

    path: str
    """Its place in the JSON, as `models[0].thread_pool_size`."""
    value: Any = dataclasses.field(repr=False)
    """The value that was written, which may be a password."""
    reason: str
    """The reason why there is nothing to set."""

    def __str__(self) -> str:
        shown = "(not shown)" if self.path.endswith(keys.SECRETS) else repr(self.value)
        return f"{self.path} = {shown}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class TableConfig:
    """A table of a model: an entry of each of HPS's lists."""

    name: str = column("embedding_table_names", keys.SOME_TEXT, "names", None)
    """The table's name, by default `sparse_embedding<i>`. Exports and checkpoints of jaxsok name the table so."""
    dim: int = column("embedding_vecsize_per_table", keys.integer(1, MAX_DIM), "dims")
    """Files of another dim are refused."""
    file: str = column("sparse_files", keys.FILE, "paths")
    """An HPS directory, an export or a delta of `jaxsok.checkpoint`, or a step of an Orbax checkpoint."""
    default: float | None = column("default_value_for_each_table", keys.OPTIONAL_FLOAT32, "numbers")
    """The number that a missing key reads, in every column. None (`null`, or a short list): as in training by the
    files, else 0.0."""
    max_keys_per_sample: int = column("maxnum_catfeature_query_per_table_per_sample", keys.POSITIVE, "numbers of keys")
    """The keys of one sample, at most; a request has at most `max_batch_size` times as many."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A model of the list `models`. Fields have HPS's names where HPS has the key."""

    model: str = declare(keys.NAME)
    """The name in requests: letters, digits, `_` and `-`, at most 120."""
    tables: tuple[TableConfig, ...]  # pyright: ignore[reportGeneralTypeIssues]
    """The tables in the order of `sparse_files`; names differ."""
    deployed_device_list: tuple[int, ...] = declare(keys.list_of(keys.COUNT, "a list of numbers of devices"))
    """Device numbers. Each device has all rows or a cache of them, or the rows that it owns (`is_split`);
    `open(config, device=...)` serves from another device alone."""
    dense_file: str = declare(keys.OPTIONAL_FILE, "")
    """An artifact of `export_model` for `predict`; "": lookups only."""
    max_batch_size: int = declare(keys.POSITIVE, 64)
    """Samples of a request; more are refused (HPS logs an error)."""
    gpucache: bool = declare(keys.BOOL, True)
    """False: every lookup reads rows in host memory."""
    gpucacheper: float = declare(keys.number(0.0), 0.2)
    """The cached fraction of a table's rows; 1.0 or more: all rows."""
    hit_rate_threshold: float = declare(keys.number(0.0), 0.9)
    """From this hit rate on misses read the default value, and their rows are fetched in the background; below it
    lookups wait for them. 0: never waits; above 1: always waits, so that answers are exact."""
    embedding_cache_type: Literal["dynamic", "static", "uvm"] = declare(
        keys.among(("dynamic", "static", "uvm", "stochastic"), stochastic="HPS has disabled it, too: take dynamic"),
        "dynamic",
    )
    """One of "dynamic", a cache over rows in host memory; "static", all rows on the device; and "uvm", `gpucacheper` of
    the rows on the device, and the others in host memory, which the device reads."""
    use_static_table: bool = declare(keys.BOOL, False)
    """True makes `embedding_cache_type` "static"."""
    num_of_worker_buffer_in_pool: int = declare(keys.POSITIVE, 1)
    """Lookups at the same time; others wait."""
    cache_refresh_percentage_per_iteration: float = declare(keys.FRACTION, 0.0)
    """The fraction of the cached rows that a refresh reads at a time. Above 0, opening also fills the cache. 0: no
    refresh by the clock, as in HPS; `Session.refresh` then reads all at once."""
    refresh_delay: float = declare(keys.number(0.0, threading.TIMEOUT_MAX), 0.0)
    """Seconds from opening to the first refresh by the clock."""
    refresh_interval: int = declare(keys.WHOLE_SECONDS, 0)
    """Seconds; 0: only `Session.refresh` refreshes."""
    init_ec: bool = declare(keys.BOOL, True)
    """Whether opening fills the cache; see `cache_refresh_percentage_per_iteration`."""
    fp8_quant: bool = declare(keys.BOOL, False)
    """Whether rows of a static model become float8_e4m3fn (`row_dtype`)."""
    row_dtype: str | None = declare(keys.among(DTYPES), None, block="jaxsok")
    """The dtype of rows on the device; None: as in the files."""
    spare_rows: int = declare(keys.COUNT, 0, block="jaxsok")
    """Free rows of each table, for new keys of updates in place."""
    is_split: bool = declare(keys.BOOL, False, block="jaxsok")
    """Whether each row lies on one of the devices alone."""

    @property
    def devices(self) -> tuple[int, ...]:
        """The numbers of the devices that serve the model."""
        return tuple(dict.fromkeys(self.deployed_device_list))

    @property
    def tier(self) -> Tier:
        """The place of rows: on the "device" all, in its "cache" some (over all in host memory), or none ("host")."""
        if not self.gpucache:
            return "host"
        return "cache" if self.embedding_cache_type == "dynamic" and self.gpucacheper < 1.0 else "device"

    @property
    def device_share(self) -> float:
        """The share of each table's rows that lie on the device, of those that the device reads."""
        return min(1.0, self.gpucacheper) if self.embedding_cache_type == "uvm" else 1.0

    @property
    def chooses_by_uses(self) -> bool:
        """True if the rows used most are the first on the device: opening reads how often each was used."""
        return self.is_filled_at_start or self.device_share < 1

    @property
    def is_filled_at_start(self) -> bool:
        return self.tier == "cache" and self.init_ec and self.cache_refresh_percentage_per_iteration > 0

    @property
    def is_refreshed(self) -> bool:
        return self.tier == "cache" and self.refresh_interval > 0 and self.cache_refresh_percentage_per_iteration > 0

    @property
    def max_keys(self) -> dict[str, int]:
        """Keys of each table that a request may have."""
        return {table.name: self.max_batch_size * table.max_keys_per_sample for table in self.tables}


@dataclasses.dataclass(frozen=True)
class VolatileDb:
    """`volatile_db`: rows under the device's cache, in host memory or in Redis. All keys but `type` are of Redis."""

    type: Literal["disabled", "hash_map", "parallel_hash_map", "redis_cluster"] = declare(
        keys.VOLATILE_TYPE, "disabled"
    )
    """Both maps are jaxsok's host store, which holds every row. "disabled" is for models with all rows elsewhere."""
    address: str = declare(keys.SOME_TEXT, "127.0.0.1:7000")
    """`host[:port]` of a node of the cluster, or of a single server; of several, by commas, the first that answers."""
    user_name: str = declare(keys.TEXT, "default")
    """The user; sent only with a password."""
    password: str = declare(keys.TEXT, "", repr=False)
    num_partitions: int = declare(keys.POSITIVE, min(16, os.cpu_count() or 1))
    """The hashes of each table; the same number for all users of a database."""
    num_node_connections: int = declare(keys.POSITIVE, 5)
    """Calls at the same time, at most."""
    max_batch_size: int = declare(keys.POSITIVE, 65536)
    """Keys in a call, at most."""
    enable_tls: bool = declare(keys.BOOL, False)
    tls_ca_certificate: str = declare(keys.SOME_TEXT, "cacertbundle.crt")
    """The path of a file or a folder."""
    tls_client_certificate: str = declare(keys.TEXT, "client_cert.pem")
    """The path of a file; "": no certificate is shown."""
    tls_client_key: str = declare(keys.TEXT, "client_key.pem")
    overflow_margin: int = declare(keys.SIZE, 2**64 - 1)
    """Rows of a partition, at most; then `overflow_policy`."""
    overflow_policy: Literal["evict_random", "evict_least_used", "evict_oldest"] = declare(
        keys.OVERFLOW_POLICY, "evict_random"
    )
    overflow_resolution_target: float = declare(keys.FRACTION, 0.8)
    """The fraction of `overflow_margin` that then stays."""
    initialize_after_startup: bool = declare(keys.BOOL, True)
    """Whether opening writes the rows of `sparse_files`, and removes those that these do not have."""
    initial_cache_rate: float = declare(keys.FRACTION, 1.0)
    """The fraction of these rows that is written, the first of each table."""
    cache_missed_embeddings: bool = declare(keys.BOOL, False)
    """Whether rows that were read from `persistent_db` are written here as well."""
    timeout_s: float = declare(keys.number(0.001), 5.0, block="jaxsok")
    """Seconds that a call waits for a node."""


@dataclasses.dataclass(frozen=True)
class PersistentDb:
    """`persistent_db`: rows on disk, asked for keys that `volatile_db` does not have."""

    type: Literal["disabled", "rocks_db"] = declare(keys.PERSISTENT_TYPE, "disabled")
    path: str = declare(keys.FILE, os.path.join(os.environ.get("TMPDIR") or "/tmp", "rocksdb"))
    num_threads: int = declare(keys.POSITIVE, 16)
    """Background threads of RocksDB."""
    read_only: bool = declare(keys.BOOL, False)
    """True: it is not filled, and models over it take no updates."""
    max_batch_size: int = declare(keys.POSITIVE, 65536)
    """Keys in a call, at most."""
    initialize_after_startup: bool = declare(keys.BOOL, True)
    """Whether opening writes the rows of `sparse_files`, and removes those that these do not have."""


@dataclasses.dataclass(frozen=True)
class UpdateSource:
    """`update_source`: the stream that new versions of the tables come from; docs/freshness.md describes it."""

    type: Literal["redis_stream"] | None = declare(keys.UPDATE_TYPE, None)
    """The kind of stream; None: versions come by `Session.update`."""
    brokers: str = declare(keys.TEXT, "", repr=False)
    """The URL of Redis, as `redis://host:6379`, `rediss://` with TLS; of a cluster, some of its nodes, with commas."""
    consumer: str = declare(keys.SOME_TEXT, socket.gethostname(), block="jaxsok")
    """The name under which Redis keeps the position of this server; each server has another."""


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole configuration, checked and with every default filled in."""

    models: tuple[ModelConfig, ...]
    """At least one; names differ."""
    supportlonglong: bool
    """True: keys have 64 bits. False: 32 bits, unsigned; keys of files are cut to them, as in HPS, others refused."""
    volatile_db: VolatileDb = VolatileDb("parallel_hash_map")
    """The default is for a configuration without the block; a block without a type is "disabled", as in HPS."""
    persistent_db: PersistentDb = PersistentDb()
    update_source: UpdateSource = UpdateSource()
    without_effect: tuple[WithoutEffect, ...] = ()
    """Keys that were written and set nothing, by path."""
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    """Notes on what readers of HPS's manual may not expect."""
    file: str = dataclasses.field(default="", compare=False)
    """The file that it was read from; "": a mapping."""

    @property
    def databases(self) -> str:
        """The databases of rows that are not on the device, in words; "": these rows are in host memory."""
        places = {
            "redis_cluster": f"Redis at {self.volatile_db.address}",
            "rocks_db": f"RocksDB at {self.persistent_db.path}",
        }
        types = (self.volatile_db.type, self.persistent_db.type)
        return " and ".join(places[type] for type in types if type in places)

    @property
    def key_bits(self) -> Literal[32, 64]:
        return 64 if self.supportlonglong else 32

    def summary(self) -> list[str]:
        """Describes the configuration in lines of a report: models, notes, keys without effect."""
        lines = [f"configuration: {self.file or '(a mapping)'}; keys of {self.key_bits} bits"]
        where = self.databases or "host memory"
        for model in self.models:
            tier = {
                "device": "all rows on the device"
                if model.device_share == 1
                else f"{model.device_share:g} of the rows on the device, which reads the others in host memory",
                "cache": f"a device cache of {model.gpucacheper:g} of the rows, over {where}",
                "host": f"rows in {where}",
            }[model.tier]
            devices = f"device{'s' * (len(model.devices) > 1)} {', '.join(map(str, model.devices))}"
            lines.append(
                f'model "{model.model}": {tier}; {"split over " * model.is_split}{devices}; at most '
                f"{model.max_batch_size} samples; lookups at a time: {model.num_of_worker_buffer_in_pool}"
            )
        if self.update_source.type:
            lines.append(f'updates: Redis streams, as consumer "{self.update_source.consumer}"')
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"without effect: {key}" for key in self.without_effect]
        return lines


PER_TABLE = {field.metadata["name"]: field.name for field in dataclasses.fields(TableConfig)}  # HPS's lists
MODEL_KEYS: Keys = {
    **keys.keys_of(TableConfig),
    **keys.keys_of(ModelConfig),
    "fuse_embedding_table": Key(keys.BOOL),  # at both levels; False has no effect
    "enable_pagelock": Key(keys.BOOL, False),  # True is refused for a static model, and has no effect elsewhere
    **without_effect("the exported model tells its own inputs", keys.COUNT, "maxnum_des_feature_per_sample"),
    **without_effect("a refresh takes one buffer", keys.COUNT, "num_of_refresher_buffer_in_pool"),
    **without_effect("XLA orders what runs on a device", keys.BOOL, "use_context_stream"),
    **without_effect("there is one cache", keys.BOOL, "use_hctr_cache_implementation"),
    **without_effect("threads are those of XLA and of the server", keys.COUNT, "thread_pool_size"),
    **without_effect(_UNREAD, keys.TEXT, "network_file"),
    **without_effect(_UNREAD, keys.COUNT, "label_dim", "slot_num"),
    **without_effect(_UNREAD, keys.BOOL, "initialize_after_startup"),
    **without_effect(
        "it is of HugeCTR's dense model; the exported model has its own dtypes and programs",
        keys.UNREAD,
        *("mixed_precision", "use_mixed_precision", "scaler", "use_algorithm_search", "use_cuda_graph"),
    ),
    **without_effect("supportlonglong says how many bits keys have", keys.UNREAD, "i64_input_key"),
}
DATABASE_KEYS: dict[str, Keys] = {
    "volatile_db": {
        **keys.keys_of(VolatileDb),
        **without_effect(_OF_PROCESS, keys.SIZE, "allocation_rate", "shared_memory_size"),
        **without_effect(_OF_PROCESS, keys.TEXT, "shared_memory_name"),
        **without_effect(_OF_PROCESS, keys.BOOL, "shared_memory_auto_remove"),
        **without_effect("redis-py sends the name of the host itself", keys.TEXT, "tls_server_name_identification"),
        **without_effect(_NO_FILTERS, keys.TEXTS, "update_filters"),
        **without_effect(_OLDER, keys.UNREAD, "max_get_batch_size", "max_set_batch_size", "algorithm"),
        **without_effect(_OLDER, keys.UNREAD, "refresh_time_after_fetch", "partition_overflow_margin"),
        **without_effect(_OLDER, keys.UNREAD, "partition_overflow_resolution_target"),
    },
    "persistent_db": {
        **keys.keys_of(PersistentDb),
        **without_effect(_NO_FILTERS, keys.TEXTS, "update_filters"),
        **without_effect(_OLDER, keys.UNREAD, "max_get_batch_size", "max_set_batch_size"),
    },
    "update_source": {
        **keys.keys_of(UpdateSource),
        **without_effect(_OF_KAFKA, keys.COUNT, "metadata_refresh_interval_ms", "receive_buffer_size"),
        **without_effect(_OF_KAFKA, keys.COUNT, "poll_timeout_ms", "max_batch_size", "failure_backoff_ms"),
        **without_effect(_OF_KAFKA, keys.COUNT, "max_commit_interval"),
        **without_effect(_OLDER, keys.UNREAD, "max_receive_buffer_size"),
    },
}
DATABASE_KEYS |= dict.fromkeys(  # the blocks of HPS 3.3 that later became volatile_db
    ("cpu_memory_db", "distributed_db"), without_effect(_OLDER, keys.UNREAD, *DATABASE_KEYS["volatile_db"])
)
TOP_KEYS: Keys = {
    "supportlonglong": Key(keys.BOOL, keys.REQUIRED),
    "fuse_embedding_table": Key(keys.BOOL),
    "models": Key(keys.list_of(keys.BLOCK, "a list of models"), keys.REQUIRED),
    **dict.fromkeys(DATABASE_KEYS, Key(keys.BLOCK, {})),
    **without_effect(
        f"{_OLDER}; rows come from sparse_files",
        keys.UNREAD,
        *("db_type", "redis_ip", "rocksdb_path", "cache_size_percentage_redis"),
    ),
}


def idle_keys(model: ModelConfig) -> dict[str, str]:
    """Finds the keys that have no effect in this model, with the reason."""
    idle: dict[str, str] = {}
    if model.embedding_cache_type == "static":
        idle["enable_pagelock"] = "static tables lie in device memory"
    elif model.embedding_cache_type == "uvm":
        idle["fp8_quant"] = "it is of static tables; row_dtype sets it here"
        idle["enable_pagelock"] = "host memory that the device reads is always locked"
    else:
        reason = "it is of static tables, and this model has a dynamic cache"
        idle |= dict.fromkeys(("fp8_quant", "enable_pagelock"), reason)
    refreshes = ("refresh_delay", "refresh_interval", "init_ec")
    if model.tier != "cache":
        is_host = model.tier == "host"
        reason = "gpucache is false: there is no cache" if is_host else "all rows are on the device: nothing can miss"
        if model.device_share < 1:
            reason = "the device reads rows in host memory itself: there is no cache that could miss"
        if is_host or model.embedding_cache_type == "static":
            idle["gpucacheper"] = reason
        idle |= dict.fromkeys(("hit_rate_threshold", "cache_refresh_percentage_per_iteration", *refreshes), reason)
    elif not model.cache_refresh_percentage_per_iteration:
        reason = "cache_refresh_percentage_per_iteration is 0, which turns it off, as in HPS"
        idle |= dict.fromkeys(refreshes, reason)
    return idle
