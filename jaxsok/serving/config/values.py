"""The values of a configuration, and their JSON."""

import dataclasses
import re
from typing import Any, Literal

from jaxsok.serving.config.keys import MODEL_KEYS, PER_TABLE

Tier = Literal["device", "cache", "host"]


@dataclasses.dataclass(frozen=True)
class WithoutEffect:
    """A key that was written but sets nothing here."""

    path: str  # in the JSON, as `models[0].thread_pool_size`
    value: Any = dataclasses.field(repr=False)  # it may be a password
    reason: str  # why there is nothing to set

    def __str__(self) -> str:
        shown = "(not shown)" if self.path.endswith("password") else repr(self.value)
        return f"{self.path} = {shown}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class TableConfig:
    """One table of a model: an entry of each of HPS's lists."""

    name: str
    """`embedding_table_names[i]`, by default `sparse_embedding<i>`. A jaxsok export or checkpoint has the table under
    this name.
    """
    dim: int  # `embedding_vecsize_per_table[i]`; files of another dim are refused
    file: str
    """`sparse_files[i]`: an HPS directory, a folder of `jaxsok.checkpoint.export_full` or `export_delta`, or a step of
    an Orbax checkpoint. A relative path begins where the process runs, as in HPS."""
    default: float | None
    """`default_value_for_each_table[i]`: what a missing key reads, in every column. None, of `null` or of a list
    that is too short: what it reads in training, if the files say it, else 0.0.
    """
    max_keys_per_sample: int
    """`maxnum_catfeature_query_per_table_per_sample[i]`: a request has at most `max_batch_size` times as many keys."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One of `models`. Fields have HPS's names where HPS has the key."""

    model: str  # its name in requests: letters, digits, `_` and `-`, at most 120
    tables: tuple[TableConfig, ...]  # in the order of `sparse_files`; names differ
    deployed_device_list: tuple[int, ...]
    """Device numbers. The last one is used, as in HPS; `open(config, device=...)` makes a session on another device."""
    dense_file: str = ""  # an artifact of `export_model`, which `predict` runs over the tables; "": lookups only
    max_batch_size: int = 64  # samples in a request, at most; larger ones are refused (HPS logs an error)
    gpucache: bool = True  # whether rows lie on the device at all; False: every lookup reads rows in host memory
    gpucacheper: float = 0.2
    """The fraction of a table's rows that the device's cache holds; 1.0 or more: all rows, and nothing can miss."""
    hit_rate_threshold: float = 0.9
    """A lookup with this hit rate or more answers misses with the default value and fetches their rows in the
    background; others wait for them. 0: never waits; above 1: always waits, so that answers are exact.
    """
    embedding_cache_type: Literal["dynamic", "static"] = "dynamic"
    """"dynamic": a cache over rows in host memory. "static": all rows on the device. `use_static_table` makes it so."""
    use_static_table: bool = False  # the same as `embedding_cache_type` "static"
    num_of_worker_buffer_in_pool: int = 1  # lookups that run at the same time, at most; others wait
    cache_refresh_percentage_per_iteration: float = 0.0
    """Fraction of the cached rows that a refresh reads at a time. Above 0 the cache is also filled when a model is
    opened, if `init_ec` is on. 0: no refresh by the clock, as in HPS; `Session.refresh` then reads all at once.
    """
    refresh_delay: float = 0.0  # seconds between opening a model and the first refresh of its cache by the clock
    refresh_interval: int = 0  # whole seconds between refreshes by the clock; 0: only `Session.refresh` refreshes
    init_ec: bool = True  # whether opening fills the cache; see `cache_refresh_percentage_per_iteration`
    fp8_quant: bool = False  # whether rows of a static model become float8_e4m3fn (`row_dtype`)
    fuse_embedding_table: bool | None = None
    """True: one call looks up all tables of a request. False: one call for each. None, if neither the model nor the
    configuration says: as True, since answers are the same to the bit, and HPS's restrictions (disjoint keys, all
    tables in each request) do not exist here.
    """
    row_dtype: str | None = None
    """`jaxsok.row_dtype`: the dtype of rows on the device (ROW_DTYPES); None: as in their files (float32 in HPS)."""
    spare_rows: int = 0  # `jaxsok.spare_rows`: rows of each table left free for new keys of updates in place
    enable_pagelock: bool = False  # without effect where it is False; True is refused for a static model
    maxnum_des_feature_per_sample: int = 26  # without effect
    num_of_refresher_buffer_in_pool: int = 1  # without effect
    use_context_stream: bool = True  # without effect
    use_hctr_cache_implementation: bool = True  # without effect
    thread_pool_size: int = 16  # without effect

    @property
    def device_id(self) -> int:
        """The number of the device that serves the model."""
        return self.deployed_device_list[-1]

    @property
    def tier(self) -> Tier:
        """Where rows are: "device", all on the device; "host", none; "cache", some there, over all in host memory."""
        if not self.gpucache:
            return "host"
        return "device" if self.embedding_cache_type == "static" or self.gpucacheper >= 1.0 else "cache"

    @property
    def is_filled_at_start(self) -> bool:
        """Whether a device cache has rows before the first lookup."""
        return self.tier == "cache" and self.init_ec and self.cache_refresh_percentage_per_iteration > 0

    @property
    def is_refreshed(self) -> bool:
        """Whether a device cache is refreshed by the clock."""
        return self.tier == "cache" and self.refresh_interval > 0 and self.cache_refresh_percentage_per_iteration > 0

    @property
    def is_fused(self) -> bool:
        """Whether one call looks up all tables of a request."""
        return self.fuse_embedding_table is not False

    @property
    def max_keys(self) -> dict[str, int]:
        """Keys of each table that a request may have."""
        return {table.name: self.max_batch_size * table.max_keys_per_sample for table in self.tables}


@dataclasses.dataclass(frozen=True)
class VolatileDatabase:
    """`volatile_db`: rows in host memory, under the device's cache. Only `type` has an effect."""

    type: Literal["disabled", "hash_map", "parallel_hash_map"] = "parallel_hash_map"
    """Both maps are the one host store of jaxsok. Without a type it is "disabled", without a block
    "parallel_hash_map", as in HPS. "disabled" is refused for a model whose rows do not all lie on the device.
    """
    address: str = "127.0.0.1:7000"
    user_name: str = "default"
    password: str = dataclasses.field(default="", repr=False)
    num_partitions: int | None = None  # None: HPS has min(16, cores)
    allocation_rate: int = 256 * 2**20
    shared_memory_size: int = 16 * 2**30
    shared_memory_name: str = "hctr_mp_hash_map_database"
    shared_memory_auto_remove: bool = True
    num_node_connections: int = 5
    max_batch_size: int = 65536
    enable_tls: bool = False
    tls_ca_certificate: str = "cacertbundle.crt"
    tls_client_certificate: str = "client_cert.pem"
    tls_client_key: str = "client_key.pem"
    tls_server_name_identification: str = "redis.localhost"
    overflow_margin: int = 2**64 - 1
    overflow_policy: str = "evict_random"
    overflow_resolution_target: float = 0.8
    initialize_after_startup: bool = True
    initial_cache_rate: float = 1.0
    cache_missed_embeddings: bool = False
    update_filters: tuple[str, ...] = ("^hps_.+$",)


@dataclasses.dataclass(frozen=True)
class PersistentDatabase:
    """`persistent_db`: not implemented. "rocks_db" is refused; without it no key has an effect."""

    type: Literal["disabled"] = "disabled"
    path: str | None = None  # None: HPS has "rocksdb" under the system's folder for temporary files
    num_threads: int = 16
    read_only: bool = False
    max_batch_size: int = 65536
    initialize_after_startup: bool = True
    update_filters: tuple[str, ...] = ("^hps_.+$",)


@dataclasses.dataclass(frozen=True)
class UpdateSource:
    """`update_source`: not implemented. "kafka_message_queue" is refused; without it no key has an effect."""

    type: None = None
    brokers: str = "127.0.0.1:9092"
    metadata_refresh_interval_ms: int = 30000
    receive_buffer_size: int = 262144
    poll_timeout_ms: int = 500
    max_batch_size: int = 8192
    failure_backoff_ms: int = 50
    max_commit_interval: int = 32


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole configuration, checked and with every default filled in."""

    models: tuple[ModelConfig, ...]  # at least one; names differ
    supportlonglong: bool
    """True: keys have 64 bits. False: 32 bits, unsigned: keys of files are cut to their low 32 bits, as HPS does, and
    requests with others are refused.
    """
    fuse_embedding_table: bool | None = None  # for models that do not say; see `ModelConfig.fuse_embedding_table`
    volatile_db: VolatileDatabase = VolatileDatabase()
    persistent_db: PersistentDatabase = PersistentDatabase()
    update_source: UpdateSource = UpdateSource()
    without_effect: tuple[WithoutEffect, ...] = ()  # keys that were written and set nothing, by path
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    """What would surprise a reader of HPS's manual, as lines of the report."""
    file: str = dataclasses.field(default="", compare=False)  # where it was read from; "": a mapping

    @property
    def key_bits(self) -> Literal[32, 64]:
        """Bits of the keys of all models."""
        return 64 if self.supportlonglong else 32

    def to_json(self) -> dict[str, Any]:
        """The JSON that `read` takes, with every honoured key, and those without effect where they were written."""
        written: dict[str, Any] = {"supportlonglong": self.supportlonglong}
        if self.fuse_embedding_table is not None:
            written["fuse_embedding_table"] = self.fuse_embedding_table
        # A block that is written out, even an empty one, would count as written by the user.
        if self.volatile_db.type != "parallel_hash_map" or any(
            key.path.startswith("volatile_db.") for key in self.without_effect
        ):
            written["volatile_db"] = {"type": self.volatile_db.type}
        written["models"] = [_model_to_json(model) for model in self.models]
        for key in self.without_effect:
            *outer, last = steps_of(key.path)
            block: Any = written
            for step in outer:
                block = block[step] if isinstance(step, int) else block.setdefault(step, {})
            block[last] = _plain(key.value)
        return written

    def summary(self) -> list[str]:
        """The configuration as lines of a report: models, tables, notes, keys without effect."""
        lines = [f"configuration: {self.file or '(a mapping)'}; keys of {self.key_bits} bits"]
        for model in self.models:
            told = {
                "device": "all rows on the device",
                "cache": f"a device cache of {model.gpucacheper:g} of the rows, over host memory",
                "host": "rows in host memory",
            }[model.tier]
            fused = "one call for all tables" if model.is_fused else "one call for each table"
            lines.append(
                f'model "{model.model}": {told}; device {model.device_id}; {fused}; at most {model.max_batch_size} '
                f"samples; lookups at a time: {model.num_of_worker_buffer_in_pool}"
            )
            lines += [
                f'  table "{table.name}": dim {table.dim}, default '
                f"{'as in training' if table.default is None else format(table.default, 'g')}, at most "
                f'{model.max_keys[table.name]} keys, from "{table.file}"'
                for table in model.tables
            ]
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"without effect: {key}" for key in self.without_effect]
        return lines


def idle_keys(model: ModelConfig) -> dict[str, str]:
    """The keys that have no effect beside the others of this model, with the reason."""
    idle: dict[str, str] = {}
    if model.embedding_cache_type != "static":
        idle |= dict.fromkeys(
            ("fp8_quant", "enable_pagelock"), "it is of static tables, and this model has a dynamic cache"
        )
    else:
        idle["enable_pagelock"] = "static tables lie in device memory"
    if model.tier != "cache":
        reason = "all rows are on the device: nothing can miss"
        if model.tier == "host":
            reason = "gpucache is false: there is no cache"
        if model.tier == "host" or model.embedding_cache_type == "static":
            idle["gpucacheper"] = reason
        of_cache = ("hit_rate_threshold", "cache_refresh_percentage_per_iteration")
        return idle | dict.fromkeys((*of_cache, "refresh_delay", "refresh_interval", "init_ec"), reason)
    if not model.cache_refresh_percentage_per_iteration:
        reason = "cache_refresh_percentage_per_iteration is 0, which turns it off, as in HPS"
        idle |= dict.fromkeys(("refresh_delay", "refresh_interval", "init_ec"), reason)
    return idle


def _model_to_json(model: ModelConfig) -> dict[str, Any]:
    written: dict[str, Any] = {"model": model.model}
    written |= {key: [getattr(table, field) for table in model.tables] for key, field in PER_TABLE.items()}
    written["deployed_device_list"] = list(model.deployed_device_list)
    idle = idle_keys(model)
    for name, key in MODEL_KEYS.items():
        if hasattr(model, name) and name not in written and name not in idle and not key.reason:
            written[name] = getattr(model, name)
    if model.fuse_embedding_table is None:
        del written["fuse_embedding_table"]
    own: dict[str, Any] = {"spare_rows": model.spare_rows}
    if model.row_dtype is not None:
        own["row_dtype"] = model.row_dtype
    written["jaxsok"] = own
    return written


def steps_of(path: str) -> list[str | int]:
    """Splits a path into names, and numbers in lists."""
    return [int(number) if number else name for number, name in re.findall(r"\[(\d+)\]|([^.\[\]]+)", path)]


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
