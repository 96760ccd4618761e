"""The keys of the configuration: what each may be, its default, and why it has no effect, if so.

The defaults are those of the JSON parser of HugeCTR 24.06. There are also the keys that versions 3.0 to 23.x read or
documented, and 24.06 ignores.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from jaxsok import checks
from jaxsok.types import MAX_DIM

ROW_DTYPES: tuple[str, ...] = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")
"""The values of `jaxsok.row_dtype`."""

# Kinds of values -----------------------------------------------------------------------------------------------------

WRONG = object()  # what `Kind.parse` gives for a value of another kind
REQUIRED = object()  # the default of a key without one
_INT_MAX = 2**31 - 1  # of HPS's int, and of an XLA dimension


@dataclasses.dataclass(frozen=True)
class Kind:
    """The values that a key may have."""

    wanted: str  # in words
    parse: Callable[[Any], Any]  # the value as a field has it; WRONG if it is none
    items: "Kind | None" = None  # of a list: what its entries may be


def _one(kind: type, wanted: str) -> Kind:
    return Kind(wanted, lambda value: value if isinstance(value, kind) else WRONG)


def _integer(least: int, most: int = _INT_MAX) -> Kind:
    return Kind(
        f"an integer of {least} to {most}", lambda value: int(value) if checks.is_integer(value, least, most) else WRONG
    )


def _cut(least: int) -> Kind:
    """An integer; a fraction is cut off, as in HPS."""
    whole = _integer(least)

    def parse(value: Any) -> Any:
        return whole.parse(int(value) if isinstance(value, float) and math.isfinite(value) else value)

    return Kind(whole.wanted, parse)


def _maybe(kind: Kind) -> Kind:
    return Kind(f"{kind.wanted}, or null", lambda value: None if value is None else kind.parse(value))


def _number(least: float = -math.inf, most: float = math.inf) -> Kind:
    within = {(True, True): "a number", (False, True): f"a number of {least:g} or more"}
    wanted = within.get((least == -math.inf, most == math.inf), f"a number of {least:g} to {most:g}")

    def parse(value: Any) -> Any:
        # Python's JSON makes integers of any size; a float holds them, or says that they are too large.
        try:
            number = float(value) if checks.is_number(value) else math.nan
        except OverflowError:
            return WRONG
        return number if math.isfinite(number) and least <= number <= most else WRONG

    return Kind(wanted, parse)


def _among(*names: str, **others: str) -> Kind:
    """One of some names, or another name of one of them."""
    meant = {name: name for name in names} | others
    wanted = "one of " + ", ".join(f'"{name}"' for name in names)
    return Kind(wanted, lambda value: meant.get(value, WRONG) if isinstance(value, str) else WRONG)


def _list(items: Kind, wanted: str) -> Kind:
    return Kind(wanted, lambda value: value if isinstance(value, list | tuple) else WRONG, items)


def _path(value: Any) -> str | None:
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    return text if isinstance(text, str) else None


_BOOL = _one(bool, "true or false")
_TEXT = _one(str, "a string")
_SOME_TEXT = Kind("a string that is not empty", lambda value: value if isinstance(value, str) and value else WRONG)
_BLOCK = Kind("an object", lambda value: value if isinstance(value, Mapping) else WRONG)
_FILE = Kind("a path", lambda value: _path(value) or WRONG)
_MAYBE_FILE = Kind("a path", lambda value: WRONG if _path(value) is None else _path(value))
_COUNT, _SIZE = _integer(1), _integer(0, 2**64 - 1)


def _any(value: Any) -> Any:
    """Accepts the value of a key that is not read."""
    items = value if isinstance(value, list | tuple) else [value]
    return WRONG if any(isinstance(item, list | tuple | Mapping) for item in items) else value


def _update_type(value: Any) -> Any:
    """None or Kafka; HPS takes several names for both."""
    if value is None or value in ("null", "none"):
        return None
    return "kafka_message_queue" if value in ("kafka_message_queue", "kafka_mq", "kafka") else WRONG


_ANY = Kind("a number, a string, true, false, null, or a list of them", _any)
_FLOAT32_MAX = 3.4028234663852886e38


# Keys ----------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of a block."""

    kind: Kind
    default: Any = None
    reason: str = ""  # why it has no effect; "": it is honoured, or looked at apart


_THREADS = "threads are those of XLA and of the server"
_UNREAD = "HPS does not read it from this file, either"
_REDIS = "it is of a Redis cluster, which is not there"
_OLDER = "it is of an older HPS: 24.06 does not read it, either"
_DENSE = "it is of HugeCTR's dense model; the exported model has its own dtypes and programs"
MODEL_KEYS: dict[str, Key] = {
    "model": Key(Kind("a name", lambda value: value if isinstance(value, str) else WRONG), REQUIRED),
    "sparse_files": Key(_list(_FILE, "a list of paths, one for each table"), REQUIRED),
    "embedding_table_names": Key(_list(_SOME_TEXT, "a list of names, one for each table")),
    "embedding_vecsize_per_table": Key(_list(_integer(1, MAX_DIM), "a list of dims, one for each table"), REQUIRED),
    "maxnum_catfeature_query_per_table_per_sample": Key(
        _list(_COUNT, "a list of numbers of keys, one for each table"), REQUIRED
    ),
    "default_value_for_each_table": Key(
        _list(_maybe(_number(-_FLOAT32_MAX, _FLOAT32_MAX)), "a list of numbers, one for each table"), REQUIRED
    ),
    "deployed_device_list": Key(_list(_integer(0), "a list of numbers of devices"), REQUIRED),
    "dense_file": Key(_MAYBE_FILE, ""),
    "max_batch_size": Key(_COUNT, 64),
    "gpucache": Key(_BOOL, True),
    "gpucacheper": Key(_number(0.0), 0.2),
    "hit_rate_threshold": Key(_number(), 0.9),
    "embedding_cache_type": Key(_among("dynamic", "static", "uvm", "stochastic"), "dynamic"),
    "use_static_table": Key(_BOOL, False),
    "num_of_worker_buffer_in_pool": Key(_COUNT, 1),
    "num_of_refresher_buffer_in_pool": Key(_integer(0), 1, "a refresh takes one buffer"),
    "cache_refresh_percentage_per_iteration": Key(_number(0.0, 1.0), 0.0),
    "refresh_delay": Key(_number(0.0), 0.0),
    "refresh_interval": Key(_cut(0), 0),
    "fuse_embedding_table": Key(_BOOL),
    "init_ec": Key(_BOOL, True),
    "enable_pagelock": Key(_BOOL, False),
    "fp8_quant": Key(_BOOL, False),
    "maxnum_des_feature_per_sample": Key(_integer(0), 26, "the exported model tells its own inputs"),
    "use_context_stream": Key(_BOOL, True, "XLA orders what runs on a device"),
    "use_hctr_cache_implementation": Key(_BOOL, True, "there is one cache"),
    "thread_pool_size": Key(_integer(0), 16, _THREADS),
    "network_file": Key(_TEXT, "", _UNREAD),
    "label_dim": Key(_integer(0), 1, _UNREAD),
    "slot_num": Key(_integer(0), 10, _UNREAD),
    "initialize_after_startup": Key(_BOOL, True, _UNREAD),
    **{
        name: Key(_ANY, reason=_DENSE)
        for name in ("mixed_precision", "use_mixed_precision", "scaler", "use_algorithm_search", "use_cuda_graph")
    },
    "i64_input_key": Key(_ANY, reason="supportlonglong says how many bits keys have"),
    "jaxsok": Key(_BLOCK),
}
JAXSOK_KEYS: dict[str, Key] = {"row_dtype": Key(_among(*ROW_DTYPES)), "spare_rows": Key(_integer(0), 0)}
_DATABASE = _among(
    *("disabled", "hash_map", "parallel_hash_map", "multi_process_hash_map", "redis_cluster", "rocks_db"),
    **dict.fromkeys(("disable", "none"), "disabled"),
    **dict.fromkeys(("hashmap", "hash", "map"), "hash_map"),
    **dict.fromkeys(("parallel_hashmap", "parallel_hash", "parallel_map"), "parallel_hash_map"),
    **dict.fromkeys(("multi_process_hashmap", "multi_process_hash", "multi_process_map"), "multi_process_hash_map"),
    **{"redis": "redis_cluster", "rocksdb": "rocks_db", "rocks": "rocks_db"},
)
_OLDER_OF_DATABASES = {name: Key(_ANY, reason=_OLDER) for name in ("max_get_batch_size", "max_set_batch_size")}
VOLATILE_KEYS: dict[str, Key] = {
    "type": Key(_DATABASE, "disabled"),
    "address": Key(_TEXT, reason=_REDIS),
    "user_name": Key(_TEXT, reason=_REDIS),
    "password": Key(_TEXT, reason=_REDIS),
    "num_partitions": Key(_integer(0), reason="the host store of a table is one piece"),
    "allocation_rate": Key(_SIZE, reason="the host store is allocated at once"),
    "shared_memory_size": Key(_SIZE, reason="the host store is memory of the process"),
    "shared_memory_name": Key(_TEXT, reason="the host store is memory of the process"),
    "shared_memory_auto_remove": Key(_BOOL, reason="the host store is memory of the process"),
    "num_node_connections": Key(_integer(0), reason=_REDIS),
    "max_batch_size": Key(_integer(0), reason="rows of the host store are read in one go"),
    "enable_tls": Key(_BOOL, reason=_REDIS),
    "tls_ca_certificate": Key(_TEXT, reason=_REDIS),
    "tls_client_certificate": Key(_TEXT, reason=_REDIS),
    "tls_client_key": Key(_TEXT, reason=_REDIS),
    "tls_server_name_identification": Key(_TEXT, reason=_REDIS),
    "overflow_margin": Key(_SIZE, reason="the host store holds every row and evicts none"),
    "overflow_policy": Key(
        _among(
            *("evict_random", "evict_least_used", "evict_oldest"),
            **{"random": "evict_random", "least_used": "evict_least_used", "oldest": "evict_oldest"},
        ),
        reason="the host store holds every row and evicts none",
    ),
    "overflow_resolution_target": Key(_number(0.0, 1.0), reason="the host store holds every row and evicts none"),
    "initialize_after_startup": Key(_BOOL, reason=_UNREAD),
    "initial_cache_rate": Key(_number(0.0), reason="all rows are entered, as in HPS"),
    "cache_missed_embeddings": Key(_BOOL, reason="there is no database below whose rows could be lifted"),
    "update_filters": Key(_list(_TEXT, "a list of strings"), reason="there is no update_source"),
    **_OLDER_OF_DATABASES,
    **{
        name: Key(_ANY, reason=_OLDER)
        for name in (
            "algorithm",
            "refresh_time_after_fetch",
            "partition_overflow_margin",
            "partition_overflow_resolution_target",
        )
    },
}
_NO_PERSISTENT = "persistent_db is disabled"
PERSISTENT_KEYS: dict[str, Key] = {
    "type": Key(_DATABASE, "disabled"),
    "path": Key(_TEXT, reason=_NO_PERSISTENT),
    "num_threads": Key(_integer(0), reason=_NO_PERSISTENT),
    "read_only": Key(_BOOL, reason=_NO_PERSISTENT),
    "max_batch_size": Key(_integer(0), reason=_NO_PERSISTENT),
    "initialize_after_startup": Key(_BOOL, reason=_UNREAD),
    "update_filters": Key(_list(_TEXT, "a list of strings"), reason=_NO_PERSISTENT),
    **_OLDER_OF_DATABASES,
}
_NO_UPDATES = "update_source has no type"
UPDATE_KEYS: dict[str, Key] = {
    "type": Key(Kind('null or "kafka_message_queue"', _update_type)),
    "brokers": Key(_TEXT, reason=_NO_UPDATES),
    **{
        name: Key(_integer(0), reason=_NO_UPDATES)
        for name in (
            "metadata_refresh_interval_ms",
            "receive_buffer_size",
            "poll_timeout_ms",
            "max_batch_size",
            "failure_backoff_ms",
            "max_commit_interval",
        )
    },
    "max_receive_buffer_size": Key(_ANY, reason=_OLDER),
}
OLDER_BLOCK_KEYS: dict[str, Key] = {name: Key(_ANY, reason=_OLDER) for name in VOLATILE_KEYS}
"""The keys of the blocks of HPS 3.3 that later became volatile_db."""
TOP_KEYS: dict[str, Key] = {
    "supportlonglong": Key(_BOOL, REQUIRED),
    "fuse_embedding_table": Key(_BOOL),
    "models": Key(_list(_BLOCK, "a list of models"), REQUIRED),
    "volatile_db": Key(_BLOCK),
    "persistent_db": Key(_BLOCK),
    "update_source": Key(_BLOCK),
    **dict.fromkeys(("cpu_memory_db", "distributed_db"), Key(_BLOCK)),
    **{
        name: Key(_ANY, reason=f"{_OLDER}; rows come from sparse_files")
        for name in ("db_type", "redis_ip", "rocksdb_path", "cache_size_percentage_redis")
    },
}
PER_TABLE: dict[str, str] = {
    "embedding_table_names": "name",
    "embedding_vecsize_per_table": "dim",
    "sparse_files": "file",
    "default_value_for_each_table": "default",
    "maxnum_catfeature_query_per_table_per_sample": "max_keys_per_sample",
}
"""HPS's lists, and the field of a table that their entries become."""
