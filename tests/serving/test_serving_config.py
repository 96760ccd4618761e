"""The HPS configuration: every default, every key honoured, listed or refused, and files as people write them.

The defaults below were written from the reference (sok-hps.md, 6.1 to 6.3), not from the code.
"""

import copy
import dataclasses
import json
import os
import pathlib
import pickle
import tempfile

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxsok.serving import config as config_lib
from jaxsok.serving.config import ConfigError, read, write
from jaxsok.serving.errors import (
    RequestError,
    RequestTooLargeError,
    ServingError,
    UnknownModelError,
    UnknownTableError,
)

# Required keys, and nothing else.
MODEL = {
    "model": "dlrm",
    "sparse_files": ["/models/dlrm/user", "/models/dlrm/item"],
    "embedding_vecsize_per_table": [16, 32],
    "maxnum_catfeature_query_per_table_per_sample": [2, 26],
    "default_value_for_each_table": [0.0, 1.0],
    "deployed_device_list": [0],
}
MODEL_DEFAULTS = {
    "dense_file": "",
    "max_batch_size": 64,
    "gpucache": True,
    "gpucacheper": 0.2,
    "hit_rate_threshold": 0.9,
    "embedding_cache_type": "dynamic",
    "use_static_table": False,
    "num_of_worker_buffer_in_pool": 1,
    "cache_refresh_percentage_per_iteration": 0.0,
    "refresh_delay": 0.0,
    "refresh_interval": 0,
    "init_ec": True,
    "fp8_quant": False,
    "row_dtype": None,  # jaxsok's own
    "spare_rows": 0,
    "is_split": False,
}
VOLATILE_DEFAULTS = {
    "type": "parallel_hash_map",  # without a block
    "address": "127.0.0.1:7000",
    "user_name": "default",
    "password": "",
    "num_partitions": None,  # HPS: min(16, cores)
    "allocation_rate": 268435456,
    "shared_memory_size": 17179869184,
    "shared_memory_name": "hctr_mp_hash_map_database",
    "shared_memory_auto_remove": True,
    "num_node_connections": 5,
    "max_batch_size": 65536,
    "enable_tls": False,
    "tls_ca_certificate": "cacertbundle.crt",
    "tls_client_certificate": "client_cert.pem",
    "tls_client_key": "client_key.pem",
    "tls_server_name_identification": "redis.localhost",
    "overflow_margin": 18446744073709551615,
    "overflow_policy": "evict_random",
    "overflow_resolution_target": 0.8,
    "initialize_after_startup": True,
    "initial_cache_rate": 1.0,
    "cache_missed_embeddings": False,
    "update_filters": ("^hps_.+$",),
}
PERSISTENT_DEFAULTS = {
    "type": "disabled",
    "path": None,  # HPS: below the system's temporary folder
    "num_threads": 16,
    "read_only": False,
    "max_batch_size": 65536,
    "initialize_after_startup": True,
    "update_filters": ("^hps_.+$",),
}
UPDATE_DEFAULTS = {
    "type": None,
    "brokers": "127.0.0.1:9092",
    "metadata_refresh_interval_ms": 30000,
    "receive_buffer_size": 262144,
    "poll_timeout_ms": 500,
    "max_batch_size": 8192,
    "failure_backoff_ms": 50,
    "max_commit_interval": 32,
}


def whole(model=None, **top):
    """Returns a configuration with one model: the required keys and the given keys; a given None removes a key."""
    merged = {**MODEL, **(model or {})}
    merged = {key: value for key, value in merged.items() if value is not Ellipsis}
    return {"supportlonglong": True, "models": [merged], **top}


def effects(config):
    """Returns the keys without effect, by path."""
    return {key.path: key.value for key in config.without_effect}


# Defaults ------------------------------------------------------------------------------------------------------------


def test_every_documented_default():
    config = read(whole())
    (model,) = config.models
    fields = dataclasses.asdict(model)
    required = ("model", "tables", "deployed_device_list")
    assert {key: value for key, value in fields.items() if key not in required} == MODEL_DEFAULTS
    assert [dataclasses.astuple(table) for table in model.tables] == [
        ("sparse_embedding0", 16, "/models/dlrm/user", 0.0, 2),
        ("sparse_embedding1", 32, "/models/dlrm/item", 1.0, 26),
    ]
    assert config.volatile_db.type == VOLATILE_DEFAULTS["type"] and config.persistent_db.type == "disabled"
    assert not config.databases
    assert config.without_effect == () and config.notes == ()
    assert type(model.refresh_interval) is int and type(model.refresh_delay) is float


@pytest.mark.parametrize("key", sorted(MODEL))
def test_required_keys_of_a_model(key):
    with pytest.raises(ConfigError, match=rf"models\[0\]\.{key}: got nothing, wanted .*the key is required") as caught:
        read(whole({key: ...}))
    assert caught.value.path == f"models[0].{key}"


@pytest.mark.parametrize("key", ["supportlonglong", "models"])
def test_required_keys_of_the_whole(key):
    given = whole()
    del given[key]
    with pytest.raises(ConfigError, match=f"^config: {key}: got nothing"):
        read(given)


def test_no_models():
    with pytest.raises(ConfigError, match=r"models: got \[\], wanted at least one model"):
        read({"supportlonglong": True, "models": []})


def test_a_short_list_of_defaults_is_filled_and_noted():
    config = read(whole({"default_value_for_each_table": [0.5]}))
    assert [table.default for table in config.models[0].tables] == [0.5, None]
    assert config.notes == (
        "models[0].default_value_for_each_table: 1 of 2 entries are not there; what training reads where the files "
        "tell it, else 0.0, as in HPS.",
    )
    config = read(whole({"default_value_for_each_table": [None, 0.5]}))
    assert [table.default for table in config.models[0].tables] == [None, 0.5]
    assert config.notes == ()


# What is honoured ----------------------------------------------------------------------------------------------------

HONOURED = {
    "dense_file": ("/models/dlrm/dense", "/models/dlrm/dense"),
    "max_batch_size": (1024, 1024),
    "gpucacheper": (0.5, 0.5),
    "gpucache": (False, False),
    "hit_rate_threshold": (1, 1.0),
    "embedding_cache_type": ("static", "static"),
    "use_static_table": (True, True),
    "num_of_worker_buffer_in_pool": (3, 3),
    "cache_refresh_percentage_per_iteration": (0.25, 0.25),
    "deployed_device_list": ([0, 0, 3], (0, 0, 3)),
}


@pytest.mark.parametrize("key", sorted(HONOURED))
def test_honoured_keys(key):
    given, wanted = HONOURED[key]
    config = read(whole({key: given}))
    assert getattr(config.models[0], key) == wanted
    assert config.without_effect == ()


def test_keys_of_the_refresh_are_honoured_where_it_is_on():
    keys = {
        "cache_refresh_percentage_per_iteration": 0.2,
        "refresh_delay": 1.5,
        "refresh_interval": 30,
        "init_ec": True,
    }
    config = read(whole(keys))
    (model,) = config.models
    assert config.without_effect == ()
    assert (model.refresh_delay, model.refresh_interval) == (1.5, 30)
    assert model.is_filled_at_start and model.is_refreshed
    assert not read(whole({**keys, "init_ec": False})).models[0].is_filled_at_start
    assert not read(whole({**keys, "refresh_interval": 0})).models[0].is_refreshed
    off = read(whole({**keys, "cache_refresh_percentage_per_iteration": 0}))
    assert not off.models[0].is_filled_at_start and not off.models[0].is_refreshed
    assert effects(off) == {f"models[0].{key}": keys[key] for key in ("init_ec", "refresh_delay", "refresh_interval")}


@pytest.mark.parametrize(
    "keys, tier",
    [
        ({}, "cache"),
        ({"gpucacheper": 0.001}, "cache"),
        ({"gpucacheper": 0.999}, "cache"),
        ({"gpucacheper": 1.0}, "device"),
        ({"gpucacheper": 2}, "device"),
        ({"embedding_cache_type": "static"}, "device"),
        ({"embedding_cache_type": "uvm"}, "device"),
        ({"use_static_table": True}, "device"),
        ({"gpucache": False}, "host"),
        ({"gpucache": False, "gpucacheper": 1.0}, "host"),
    ],
)
def test_tiers(keys, tier):
    assert read(whole(keys)).models[0].tier == tier


@pytest.mark.parametrize("every", [None, True, False])
@pytest.mark.parametrize("own", [None, True, False])
def test_fusion(every, own):
    """One call looks up all tables of a request, as true asks; false, which has no effect, is reported."""
    given = {"fuse_embedding_table": every, "models[0].fuse_embedding_table": own}
    top = {} if every is None else {"fuse_embedding_table": every}
    model = {} if own is None else {"fuse_embedding_table": own}
    config = read(whole(model, **top))
    assert effects(config) == {path: value for path, value in given.items() if value is False}
    assert dataclasses.replace(config, without_effect=()) == read(whole())
    with pytest.raises(ConfigError, match=r"fuse_embedding_table: got 0, wanted true or false"):
        read(whole({"fuse_embedding_table": 0}, **top))


def test_keys_of_32_bits():
    assert read(whole()).key_bits == 64
    assert read({**whole(), "supportlonglong": False}).key_bits == 32


def test_rows_of_other_dtypes():
    for dtype in ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn"):
        assert read(whole({"jaxsok": {"row_dtype": dtype}})).models[0].row_dtype == dtype
    static = {"use_static_table": True, "fp8_quant": True}
    assert read(whole(static)).models[0].row_dtype == "float8_e4m3fn"
    assert read(whole({**static, "jaxsok": {"row_dtype": "float8_e4m3fn"}})).models[0].fp8_quant
    with pytest.raises(ConfigError, match=r'jaxsok\.row_dtype: got "int8", wanted "float8_e4m3fn", as fp8_quant says'):
        read(whole({**static, "jaxsok": {"row_dtype": "int8"}}))
    assert read(whole({"jaxsok": {"spare_rows": 10}})).models[0].spare_rows == 10


@pytest.mark.parametrize("given, wanted", [(0.0, 0), (1.5, 1), (30.0, 30), (30, 30), (0.9, 0)])
def test_fractions_of_the_interval_are_cut_off(given, wanted):
    """Fractions of the interval are cut off, as in HPS; a number that changes by this is reported."""
    config = read(whole({"cache_refresh_percentage_per_iteration": 0.2, "refresh_interval": given}))
    assert config.models[0].refresh_interval == wanted and type(config.models[0].refresh_interval) is int
    notes = [note for note in config.notes if "refresh_interval" in note]
    assert notes == (
        []
        if given == wanted
        else [f"models[0].refresh_interval: got {given:g}, read as {wanted}: whole seconds, as in HPS."]
    )


def test_each_device_serves_once():
    config = read(whole({"deployed_device_list": [2, 0, 2], "gpucacheper": 1.0, "jaxsok": {"is_split": True}}))
    assert config.models[0].devices == (2, 0)
    assert "split over devices 2, 0" in "\n".join(config.summary())
    assert "devices 0, 1;" in "\n".join(read(whole({"deployed_device_list": [0, 1]})).summary())
    with pytest.raises(ConfigError, match=r"models\[0\]\.jaxsok\.is_split: got true, wanted false for rows below a"):
        read(whole({"jaxsok": {"is_split": True}}))


def test_names_of_tables():
    config = read(whole({"embedding_table_names": ["user", "item"]}))
    assert config.models[0].max_keys == {"user": 128, "item": 1664}
    assert [table.dim for table in config.models[0].tables] == [16, 32]


def test_no_database():
    for keys in ({"gpucacheper": 1.0}, {"use_static_table": True}):
        config = read(whole(keys, volatile_db={"type": "disabled"}))
        assert config.volatile_db.type == "disabled" and config.models[0].tier == "device"
    assert read(whole({"gpucacheper": 1.0}, volatile_db={})).notes == (
        "models[0]: without a database HPS answers default values; here all rows are on the device.",
    )


@pytest.mark.parametrize("kind", ["hash_map", "parallel_hash_map"])
def test_databases_in_host_memory(kind):
    config = read(whole(volatile_db={"type": kind}))
    assert config.volatile_db.type == kind and config.without_effect == ()
    unused = read(whole({"use_static_table": True}, volatile_db={"type": kind}))
    assert effects(unused) == {"volatile_db.type": kind}


# What has no effect --------------------------------------------------------------------------------------------------

WITHOUT_EFFECT = {
    "fuse_embedding_table": False,
    "maxnum_des_feature_per_sample": 13,
    "num_of_refresher_buffer_in_pool": 2,
    "use_context_stream": False,
    "use_hctr_cache_implementation": False,
    "thread_pool_size": 4,
    "network_file": "dlrm.json",
    "label_dim": 1,
    "slot_num": 26,
    "initialize_after_startup": False,
    "enable_pagelock": True,  # A key of static tables; this table is dynamic.
    "fp8_quant": True,
}


@pytest.mark.parametrize("key", sorted(WITHOUT_EFFECT))
def test_keys_without_effect_are_listed_where_they_are_written(key):
    config = read(whole({key: WITHOUT_EFFECT[key]}))
    (ignored,) = config.without_effect
    assert (ignored.path, ignored.value) == (f"models[0].{key}", WITHOUT_EFFECT[key]) and ignored.reason
    assert f"without effect: models[0].{key} = {WITHOUT_EFFECT[key]!r}: {ignored.reason}" in config.summary()


# Keys of versions 3.0 to 23.x, by the block where HPS read or documented them; 24.06 ignores them.
OLDER = {
    "": {
        "db_type": "local",
        "redis_ip": "127.0.0.1:7000",
        "rocksdb_path": "/tmp/rocksdb",
        "cache_size_percentage_redis": 0.5,
    },
    "models[0]": {"mixed_precision": True, "use_mixed_precision": False, "scaler": 1.0, "use_cuda_graph": True},
    "volatile_db": {
        "algorithm": "phm",
        "max_get_batch_size": 10_000,
        "max_set_batch_size": 10_000,
        "refresh_time_after_fetch": False,
        "partition_overflow_margin": 5_000_000,
        "partition_overflow_resolution_target": 0.8,
    },
    "persistent_db": {"max_get_batch_size": 10_000, "max_set_batch_size": 10_000},
    "update_source": {"max_receive_buffer_size": 2000},
    "cpu_memory_db": {"type": "parallel_hash_map", "algorithm": "stl", "num_partitions": 8, "initial_cache_rate": 1.0},
    "distributed_db": {"type": "disabled", "address": "10.0.0.1:7000", "password": "hunter2"},
}


@pytest.mark.parametrize("block", list(OLDER))
def test_keys_of_older_versions_are_listed(block):
    """A configuration of an older HPS is read, and each of its keys that has no effect is listed."""
    written = OLDER[block]
    if block == "models[0]":
        given = whole(written)
    else:
        types = {"volatile_db": {"type": "hash_map"}}
        given = whole(**({block: {**types.get(block, {}), **written}} if block else written))
    config = read(given)
    assert effects(config) == {f"{block}.{key}" if block else key: value for key, value in written.items()}
    assert all(key.reason for key in config.without_effect)
    assert read(config) is config and hash(config) == hash(read(given))
    assert "hunter2" not in "\n".join(config.summary())


@pytest.mark.parametrize("key", ["num_of_refresher_buffer_in_pool", "thread_pool_size"])
def test_counts_without_effect_may_be_zero(key):
    assert effects(read(whole({key: 0}))) == {f"models[0].{key}": 0}


@pytest.mark.parametrize("keys", [{"gpucache": False}, {"use_static_table": True}])
def test_a_cache_of_no_rows_is_idle_where_there_is_no_cache(keys):
    assert effects(read(whole({"gpucacheper": 0.0, **keys}))) == {"models[0].gpucacheper": 0.0}


@pytest.mark.parametrize(
    "name, meant",
    [("hashmap", "hash_map"), ("map", "hash_map"), ("parallel_hash", "parallel_hash_map"), ("none", "disabled")],
)
def test_other_names_of_databases(name, meant):
    """Each kind of database can be named by every name that HPS's parser takes."""
    config = read(whole({"gpucacheper": 1.0}, volatile_db={"type": name}))
    assert config.volatile_db.type == meant
    assert read(whole(volatile_db={"type": "redis"})).volatile_db.type == "redis_cluster"
    for name in ("rocks", "rocksdb"):
        config = read(whole(volatile_db={}, persistent_db={"type": name}))
        assert config.persistent_db.type == "rocks_db" and config.databases


@pytest.mark.parametrize("name", [None, "null", "none"])
def test_other_names_of_no_updates(name):
    assert read(whole(update_source={"type": name})) == read(whole())
    with pytest.raises(ConfigError, match="Kafka is not there"):
        read(whole(update_source={"type": "kafka"}))


def read_defaults(defaults):
    """Returns the keys of a block, except the type, whose HPS default is the same everywhere."""
    written = {key: value for key, value in defaults.items() if key != "type" and value is not None}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in written.items()}


@pytest.mark.parametrize("block", ["volatile_db", "persistent_db", "update_source"])
def test_keys_of_databases_that_are_not_there_are_listed(block):
    defaults = {
        "volatile_db": VOLATILE_DEFAULTS,
        "persistent_db": PERSISTENT_DEFAULTS,
        "update_source": UPDATE_DEFAULTS,
    }[block]
    written = read_defaults(defaults)
    for key, value in written.items():
        config = read(whole(**{block: {"type": defaults["type"], key: value}}))
        assert list(effects(config)) == [f"{block}.{key}"]
    config = read(whole(**{block: {"type": defaults["type"], **written}}))
    assert sorted(effects(config)) == sorted(f"{block}.{key}" for key in written)
    assert config.volatile_db.type == VOLATILE_DEFAULTS["type"]


# For an existing database: keys that set nothing, and keys that jaxsok adds.
IDLE_IN_REDIS = [
    "allocation_rate",
    "shared_memory_auto_remove",
    "shared_memory_name",
    "shared_memory_size",
    "tls_server_name_identification",
    "update_filters",
]
VOLATILE = {"type": "redis_cluster", "num_partitions": 8}


def test_every_default_of_redis():
    config = read(whole(volatile_db={"type": "redis_cluster"}))
    fields = dataclasses.asdict(config.volatile_db)
    assert fields.pop("timeout_s") == 5.0
    assert fields.pop("num_partitions") == min(16, os.cpu_count())
    wanted = {key: value for key, value in VOLATILE_DEFAULTS.items() if key not in (*IDLE_IN_REDIS, "num_partitions")}
    assert fields == {**wanted, "type": "redis_cluster"}
    (note,) = config.notes  # Its default differs between machines that share the database.
    assert "volatile_db.num_partitions: took" in note and config.without_effect == ()
    assert config.databases and "over Redis at 127.0.0.1:7000; device 0" in "\n".join(config.summary())


def test_keys_of_redis():
    given = {
        **VOLATILE,
        **{"address": "a:1,b:2", "user_name": "me", "password": "hunter2", "num_node_connections": 3},
        **{"max_batch_size": 262143, "enable_tls": True, "tls_ca_certificate": "ca", "tls_client_certificate": "crt"},
        **{"tls_client_key": "key", "overflow_margin": 10, "overflow_resolution_target": 0.25},
        **{"overflow_policy": "evict_oldest", "cache_missed_embeddings": True, "initialize_after_startup": False},
    }
    config = read(whole(volatile_db={**given, "jaxsok": {"timeout_s": 0.5}}))
    fields = dataclasses.asdict(config.volatile_db)
    assert fields.pop("timeout_s") == 0.5 and fields.pop("initial_cache_rate") == 1.0 and fields == given
    assert config.notes == () and config.without_effect == ()
    assert hash(read(config)) == hash(config) and pickle.loads(pickle.dumps(config)) == config
    assert "hunter2" not in repr(config) + "\n".join(config.summary())
    written = read_defaults(VOLATILE_DEFAULTS)
    config = read(whole(volatile_db={**VOLATILE, **written}))
    assert sorted(effects(config)) == [f"volatile_db.{key}" for key in IDLE_IN_REDIS]
    idle = read(whole(volatile_db={"type": "hash_map", "jaxsok": {"timeout_s": 0.5}}))
    assert list(effects(idle)) == ["volatile_db.jaxsok"] and hash(idle)


def test_keys_of_rocksdb():
    config = read(whole(volatile_db={"type": "disabled"}, persistent_db={"type": "rocks_db"}))
    path = str(pathlib.Path(os.environ.get("TMPDIR") or "/tmp") / "rocksdb")
    wanted = {key: value for key, value in PERSISTENT_DEFAULTS.items() if key != "update_filters"}
    assert dataclasses.asdict(config.persistent_db) == {**wanted, "type": "rocks_db", "path": path}
    assert config.without_effect == () and f"over RocksDB at {path};" in "\n".join(config.summary())
    given = {"type": "rocks_db", "path": "/rows", "num_threads": 2, "read_only": True, "max_batch_size": 9}
    config = read(whole(volatile_db=VOLATILE, persistent_db={**given, "initialize_after_startup": False}))
    assert dataclasses.asdict(config.persistent_db) == {**given, "initialize_after_startup": False}
    assert "over Redis at 127.0.0.1:7000 and RocksDB at /rows;" in "\n".join(config.summary())
    everywhere = read(whole({"gpucacheper": 1.0}, volatile_db=VOLATILE, persistent_db=given))
    assert effects(everywhere) == {"volatile_db.type": "redis_cluster", "persistent_db.type": "rocks_db"}


@pytest.mark.parametrize(
    "keys, idle",
    [
        (
            {"use_static_table": True, "gpucacheper": 0.5, "hit_rate_threshold": 1.0},
            ["gpucacheper", "hit_rate_threshold"],
        ),
        ({"gpucacheper": 1.0, "hit_rate_threshold": 1.0}, ["hit_rate_threshold"]),
        ({"gpucache": False, "gpucacheper": 0.5, "init_ec": False}, ["gpucacheper", "init_ec"]),
        ({"use_static_table": True, "embedding_cache_type": "uvm"}, ["embedding_cache_type"]),
        ({"use_static_table": True, "enable_pagelock": False}, ["enable_pagelock"]),
        ({"gpucacheper": 1.0, "refresh_interval": 5, "refresh_delay": 1}, ["refresh_delay", "refresh_interval"]),
    ],
)
def test_keys_that_others_make_idle_are_listed(keys, idle):
    assert sorted(effects(read(whole(keys)))) == [f"models[0].{key}" for key in idle]


def test_secrets_are_not_shown():
    config = read(whole(volatile_db={"type": "hash_map", "password": "hunter2", "address": "10.0.0.1:7000"}))
    assert "hunter2" not in "\n".join(config.summary()) + repr(config) + str(config)
    assert "10.0.0.1:7000" in "\n".join(config.summary())
    with pytest.raises(ConfigError) as caught:
        read(whole(volatile_db={"type": "hash_map", "password": 12345}))
    assert "12345" not in str(caught.value)


# What is refused -----------------------------------------------------------------------------------------------------

UVM = {"embedding_cache_type": "uvm"}
REFUSED = {
    "large batches": ({}, {"volatile_db": {**VOLATILE, "max_batch_size": 2**18}}, r"max_batch_size: .* at most 262143"),
    "rows nowhere": ({}, {"volatile_db": {**VOLATILE, "initial_cache_rate": 0.5}}, "the other rows would be nowhere"),
    "time-out": (
        {},
        {"volatile_db": {**VOLATILE, "jaxsok": {"timeout_s": 0}}},
        r"volatile_db\.jaxsok\.timeout_s: got 0",
    ),
    "unknown of jaxsok": ({}, {"volatile_db": {**VOLATILE, "jaxsok": {"timeout": 1}}}, r'did you mean "timeout_s"'),
    "rocks below a map": (
        {},
        {"persistent_db": {"type": "rocks_db"}},
        r'volatile_db\.type: .* write {"type": "disabled"}',
    ),
    "processes": ({}, {"volatile_db": {"type": "multi_process_hash_map"}}, "memory shared by processes"),
    "volatile rocks": ({}, {"volatile_db": {"type": "rocks_db"}}, r"volatile_db\.type: .*RocksDB"),
    "persistent map": ({}, {"persistent_db": {"type": "hash_map"}}, r'persistent_db\.type: got "hash_map", wanted'),
    "kafka": ({}, {"update_source": {"type": "kafka_message_queue"}}, r"update_source\.type: .*Session\.update"),
    "no such database": ({}, {"volatile_db": {"type": "memcached"}}, r'wanted one of "disabled", "hash_map"'),
    "no database": ({}, {"volatile_db": {"type": "disabled"}}, r"models\[0\] with gpucacheper 0\.2 has rows that"),
    "block without type": ({}, {"volatile_db": {"num_partitions": 8}}, 'A block without a type is "disabled"'),
    "no database, no cache": ({"gpucache": False}, {"volatile_db": {}}, r"models\[0\] without gpucache has rows"),
    "uvm, no cache": ({**UVM, "gpucache": False}, {}, r"models\[0\]\.gpucache: got false, wanted true for a uvm table"),
    "uvm, a model": ({**UVM, "dense_file": "/d"}, {}, r'models\[0\]\.dense_file: got "/d", wanted none with uvm'),
    "uvm, replicas": (
        {**UVM, "deployed_device_list": [0, 1]},
        {},
        r"deployed_device_list: got .* or set jaxsok\.is_split",
    ),
    "stochastic": ({"embedding_cache_type": "stochastic"}, {}, "HPS has disabled it, too"),
    "no such cache": ({"embedding_cache_type": "lru"}, {}, r'embedding_cache_type: got "lru", wanted one of "dynamic"'),
    "page lock": ({"use_static_table": True, "enable_pagelock": True}, {}, r"models\[0\]\.enable_pagelock: got true"),
    "static, no cache": ({"use_static_table": True, "gpucache": False}, {}, r"models\[0\]\.gpucache: got false"),
    "hdfs": ({"sparse_files": ["hdfs://n:9000/a", "/b"]}, {}, r'sparse_files\[0\]: got "hdfs://n:9000/a".*copy'),
    "s3": ({"sparse_files": ["/a", "s3://bucket/b"]}, {}, r"models\[0\]\.sparse_files\[1\]"),
    "gcs": ({"sparse_files": ["gs://bucket/a", "/b"]}, {}, "no remote storage is read"),
    "https": ({"dense_file": "https://bucket.s3.us-east-1.amazonaws.com/a"}, {}, r"models\[0\]\.dense_file"),
    "zero byte": ({"sparse_files": ["/a\0b", "/b"]}, {}, "zero byte"),
    "empty path": ({"sparse_files": ["", "/b"]}, {}, r'sparse_files\[0\]: got "", wanted a path'),
    "no files": ({"sparse_files": []}, {}, r"sparse_files: got \[\], wanted at least one path"),
    "one file": ({"sparse_files": "/a"}, {}, r'sparse_files: got "/a", wanted a list of paths'),
    "dims": ({"embedding_vecsize_per_table": [16]}, {}, r"embedding_vecsize_per_table: got \[16\], wanted 2 entries"),
    "many dims": ({"embedding_vecsize_per_table": [16] * 3}, {}, "wanted 2 entries, one for each of sparse_files"),
    "keys": ({"maxnum_catfeature_query_per_table_per_sample": [1]}, {}, "query_per_table_per_sample: .*wanted 2"),
    "names": ({"embedding_table_names": ["a"]}, {}, r'embedding_table_names: got \["a"\], .*leave the key out'),
    "twins": ({"embedding_table_names": ["a", "a"]}, {}, r"embedding_table_names\[1\]: .*entry 0 does not have"),
    "no name": ({"embedding_table_names": ["a", ""]}, {}, r"embedding_table_names\[1\]: .*not empty"),
    "many defaults": ({"default_value_for_each_table": [0, 0, 0]}, {}, r"default_value_for_each_table: .*wanted 2"),
    "default": ({"default_value_for_each_table": [0, "0.0"]}, {}, r"_table\[1\]: got \"0.0\".*without quotes"),
    "large default": ({"default_value_for_each_table": [0, 1e39]}, {}, r"_table\[1\]: got 1e\+39, wanted a number of"),
    "dim": ({"embedding_vecsize_per_table": [16, 0]}, {}, r"vecsize_per_table\[1\]: got 0, wanted an integer of 1 to"),
    "real dim": ({"embedding_vecsize_per_table": [16, 16.0]}, {}, r"vecsize_per_table\[1\]: got 16\.0, wanted an int"),
    "true dim": ({"embedding_vecsize_per_table": [16, True]}, {}, r"vecsize_per_table\[1\]: got true, wanted an int"),
    "model name": ({"model": "a b"}, {}, r'models\[0\]\.model: got "a b", wanted 1 to 120 letters'),
    "no model name": ({"model": ""}, {}, "wanted 1 to 120 letters"),
    "long model name": ({"model": "m" * 121}, {}, "wanted 1 to 120 letters"),
    "line in model name": ({"model": "dlrm\n"}, {}, "wanted 1 to 120 letters"),
    "no devices": ({"deployed_device_list": []}, {}, r"deployed_device_list: got \[\], wanted the number of a device"),
    "device": ({"deployed_device_list": [-1]}, {}, r"deployed_device_list\[0\]: got -1"),
    "batch": ({"max_batch_size": 0}, {}, r"max_batch_size: got 0, wanted an integer of 1 to"),
    "text": ({"max_batch_size": "64"}, {}, r'max_batch_size: got "64", wanted an integer.*write it without quotes'),
    "huge": ({"max_batch_size": 2**31}, {}, r"max_batch_size: got 2147483648"),
    "truth": ({"gpucache": "true"}, {}, r'gpucache: got "true", wanted true or false; write it without quotes'),
    "number for truth": ({"gpucache": 1}, {}, r"gpucache: got 1, wanted true or false"),
    "null": ({"gpucacheper": None}, {}, r"gpucacheper: got null, wanted a number of 0 or more"),
    "negative": ({"gpucacheper": -0.1}, {}, r"gpucacheper: got -0\.1"),
    "too large for a float": ({"gpucacheper": 10**400}, {}, r"gpucacheper: got 1000"),
    "percent": ({"cache_refresh_percentage_per_iteration": 20}, {}, r"iteration: got 20, wanted a number of 0 to 1"),
    "hit rate": ({"hit_rate_threshold": -0.1}, {}, r"models\[0\]\.hit_rate_threshold: got -0\.1, wanted a number"),
    "delay": ({"refresh_delay": 1e30}, {}, r"models\[0\]\.refresh_delay: got 1e\+30, wanted a number of 0 to 9\.2"),
    "interval": ({"refresh_interval": -1.5}, {}, r"refresh_interval: got -1\.5, wanted an integer"),
    "no interval": ({"refresh_interval": True}, {}, "refresh_interval: got true, wanted an integer"),
    "workers": ({"num_of_worker_buffer_in_pool": 0}, {}, r"num_of_worker_buffer_in_pool: got 0"),
    "row dtype": ({"jaxsok": {"row_dtype": "fp8"}}, {}, r'models\[0\]\.jaxsok\.row_dtype: got "fp8", wanted one of'),
    "spare rows": ({"jaxsok": {"spare_rows": -1}}, {}, r"models\[0\]\.jaxsok\.spare_rows: got -1"),
    "no block": ({"jaxsok": []}, {}, r"models\[0\]\.jaxsok: got \[\], wanted an object"),
    "null block": ({}, {"volatile_db": None}, r"^config: volatile_db: got null, wanted an object"),
    "model": ({}, {"models": [3]}, r"^config: models\[0\]: got 3, wanted an object"),
    "models": ({}, {"models": {}}, "^config: models: got an object, wanted a list of models"),
    "keys of files": ({}, {"supportlonglong": 1}, r"^config: supportlonglong: got 1, wanted true or false"),
    "same model": ({}, {"models": [MODEL, MODEL]}, r"models\[1\]\.model: got \"dlrm\", .*models\[0\] does not have"),
    "typing error": ({"gpucachper": 0.5}, {}, r'models\[0\]\.gpucachper: .*did you mean "gpucacheper"\? HPS would'),
    "wrong block": (
        {"supportlonglong": True},
        {},
        r"models\[0\]\.supportlonglong: .*it is a key of the whole: move it",
    ),
    "wrong place": ({}, {"gpucacheper": 0.5}, "^config: gpucacheper: .*it is a key of a model: move it there"),
    "own key": ({"jaxsok": {"row_type": "int8"}}, {}, r'models\[0\]\.jaxsok\.row_type: .*did you mean "row_dtype"'),
    "no such key": ({}, {"zzz": 1}, "^config: zzz: got an unknown key, wanted one of HPS 24.06 or jaxsok; HPS would"),
    "no rows in a cache": (
        {"gpucacheper": 0.0},
        {},
        r"^config: models\[0\]\.gpucacheper: got 0\.0, wanted .*above 0.*gpucache",
    ),
    "policy": ({}, {"volatile_db": {"type": "hash_map", "overflow_policy": "lru"}}, r"volatile_db\.overflow_policy"),
    "not a key": ({3: 1}, {}, r"models\[0\]\.3: got an unknown key"),
    "a set": ({"gpucacheper": {1}}, {}, r"gpucacheper: got a set, wanted a number"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refusals(name):
    model, top, message = REFUSED[name]
    given = whole(model, **top)
    before = copy.deepcopy(given)
    with pytest.raises(ConfigError, match=message) as caught:
        read(given)
    assert given == before
    assert str(caught.value).endswith(".") and not str(caught.value).endswith("..")
    assert caught.value.path and caught.value.path in str(caught.value)


def test_errors_are_of_one_family():
    for kind in (ConfigError, UnknownModelError, UnknownTableError, RequestError, RequestTooLargeError):
        assert issubclass(kind, ServingError) and issubclass(kind, ValueError)
    assert issubclass(RequestTooLargeError, RequestError)
    error = pickle.loads(pickle.dumps(ConfigError("config: a: b.", path="a")))
    assert (str(error), error.path) == ("config: a: b.", "a")


# Files ---------------------------------------------------------------------------------------------------------------


def write_config(tmp_path, content):
    path = tmp_path / "ps.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_file_is_named_in_errors(tmp_path):
    path = write_config(tmp_path, json.dumps(whole({"max_batch_size": 0})))
    with pytest.raises(ConfigError, match=rf'^config: file "{path}": models\[0\]\.max_batch_size: got 0'):
        read(path)
    config = read(write_config(tmp_path, "\ufeff" + json.dumps(whole())))  # with a byte order mark
    assert config.file == str(path) and config == read(whole()) and str(path) in config.summary()[0]


@pytest.mark.parametrize(
    "content, message",
    [
        ('{"supportlonglong": true,}', r"got malformed or ambiguous JSON \(.*: line 1 column 2[56] "),
        ('{\n  "supportlonglong": true\n  "models": []\n}', r"\(Expecting ',' delimiter: line 3 column 3 "),
        ("", "line 1 column 1 "),
        ('{"a": 1} {"b": 2}', "line 1 column 10 "),
        ('{"supportlonglong": tru', "line 1 column 21 "),
        (b'{"model": "\xff"}', "byte 0xff in position 11"),
        ('{"models": [{"gpucacheper": NaN}]}', "NaN is no number of JSON"),
        ('{"models": [{"gpucacheper": -Infinity}]}', "-Infinity is no number of JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"supportlonglong": ' + "1" * 5000 + "}", "an integer has thousands of digits"),
        ("[]", r'^config: file "[^"]*": got \[\], wanted an object with supportlonglong and models'),
        ("3", "got 3, wanted an object"),
    ],
)
def test_malformed_files(tmp_path, content, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read(write_config(tmp_path, content))
    assert str(tmp_path) in str(caught.value)


def test_keys_that_are_there_twice(tmp_path):
    text = json.dumps(whole())
    twice = text.replace('"model": "dlrm"', '"max_batch_size": 1, "model": "dlrm", "max_batch_size": 2')
    with pytest.raises(ConfigError, match="one object has the name 'max_batch_size' twice"):
        read(write_config(tmp_path, twice))
    with pytest.raises(ConfigError, match="the name 'supportlonglong' twice"):
        read(write_config(tmp_path, '{"supportlonglong": true, ' + text[1:]))


def test_what_is_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"source: got .*absent\.json', which is no file"):
        read(tmp_path / "absent.json")
    with pytest.raises(FileNotFoundError, match="which is no file"):
        read(tmp_path)
    with pytest.raises(ConfigError, match="source: got int, wanted the path of a JSON file"):
        read(3)


# Configurations as people write them ---------------------------------------------------------------------------------

ONE_TABLE = """
{
  "supportlonglong": false,
  "models": [{
    "model": "demo",
    "sparse_files": ["demo_sparse.model"],
    "num_of_worker_buffer_in_pool": 3,
    "embedding_table_names": ["sparse_embedding0"],
    "embedding_vecsize_per_table": [16],
    "maxnum_catfeature_query_per_table_per_sample": [10],
    "default_value_for_each_table": [1.0],
    "deployed_device_list": [0],
    "max_batch_size": 16384,
    "cache_refresh_percentage_per_iteration": 0.2,
    "hit_rate_threshold": 1.0,
    "gpucacheper": 1.0,
    "gpucache": true
  }]
}
"""
TWO_MODELS = """
{
  "supportlonglong": true,
  "fuse_embedding_table": true,
  "volatile_db": {"type": "parallel_hash_map", "num_partitions": 16, "initial_cache_rate": 1.0},
  "models": [
    {
      "model": "wide-deep",
      "sparse_files": ["/m/wide/0", "/m/wide/1"],
      "dense_file": "/m/wide/dense",
      "network_file": "/m/wide/net.json",
      "embedding_table_names": ["wide", "deep"],
      "embedding_vecsize_per_table": [1, 16],
      "maxnum_catfeature_query_per_table_per_sample": [2, 26],
      "default_value_for_each_table": [0.0, 0.0],
      "deployed_device_list": [0],
      "max_batch_size": 1024,
      "cache_refresh_percentage_per_iteration": 0.2,
      "refresh_interval": 60,
      "hit_rate_threshold": 0.9,
      "gpucacheper": 0.5,
      "num_of_refresher_buffer_in_pool": 1
    },
    {
      "model": "static",
      "fuse_embedding_table": false,
      "embedding_cache_type": "static",
      "fp8_quant": true,
      "sparse_files": ["/m/s/0"],
      "embedding_vecsize_per_table": [128],
      "maxnum_catfeature_query_per_table_per_sample": [1],
      "default_value_for_each_table": [0.0],
      "deployed_device_list": [0]
    }
  ]
}
"""


def test_one_table_all_of_it_cached(tmp_path):
    config = read(write_config(tmp_path, ONE_TABLE))
    (model,) = config.models
    assert (config.key_bits, model.tier, model.num_of_worker_buffer_in_pool) == (32, "device", 3)
    assert model.tables == (config_lib.TableConfig("sparse_embedding0", 16, "demo_sparse.model", 1.0, 10),)
    assert model.max_keys == {"sparse_embedding0": 163840}
    assert sorted(effects(config)) == [
        "models[0].cache_refresh_percentage_per_iteration",
        "models[0].hit_rate_threshold",
    ]


def test_two_models(tmp_path):
    config = read(write_config(tmp_path, TWO_MODELS))
    wide, static = config.models
    assert (wide.tier, wide.is_filled_at_start, wide.is_refreshed) == ("cache", True, True)
    assert (static.tier, static.row_dtype) == ("device", "float8_e4m3fn")
    assert effects(config) == {
        "models[1].fuse_embedding_table": False,
        "models[0].network_file": "/m/wide/net.json",
        "models[0].num_of_refresher_buffer_in_pool": 1,
        "volatile_db.initial_cache_rate": 1.0,
        "volatile_db.num_partitions": 16,
    }
    text = "\n".join(config.summary())
    for part in (
        'model "wide-deep": a device cache of 0.5 of the rows, over host memory; device 0; at most 1024 samples',
        'model "static": all rows on the device; device 0; at most 64 samples',
        "without effect: volatile_db.num_partitions = 16: ",
    ):
        assert part in text
    assert read(json.loads(TWO_MODELS)) == config and read(config) is config


# Any configuration ---------------------------------------------------------------------------------------------------

NAMES = st.text("abcXYZ019_-", min_size=1, max_size=8)
FRACTIONS = st.one_of(st.integers(0, 1), st.floats(0, 1))
OPTIONS = {
    "dense_file": st.sampled_from(["", "/m/dense", "dense"]),
    "max_batch_size": st.integers(1, 10**6),
    "gpucache": st.booleans(),
    "gpucacheper": st.one_of(st.integers(1, 2), st.floats(0, 2, exclude_min=True)),
    "hit_rate_threshold": st.floats(0, 2),
    "embedding_cache_type": st.sampled_from(["dynamic", "static"]),
    "use_static_table": st.booleans(),
    "num_of_worker_buffer_in_pool": st.integers(1, 9),
    "num_of_refresher_buffer_in_pool": st.integers(0, 9),
    "mixed_precision": st.booleans(),
    "cache_refresh_percentage_per_iteration": FRACTIONS,
    "refresh_delay": st.floats(0, 100),
    "refresh_interval": st.integers(0, 100),
    "fuse_embedding_table": st.booleans(),
    "init_ec": st.booleans(),
    "fp8_quant": st.booleans(),
    "maxnum_des_feature_per_sample": st.integers(0, 99),
    "use_context_stream": st.booleans(),
    "use_hctr_cache_implementation": st.booleans(),
    "thread_pool_size": st.integers(1, 99),
    "network_file": NAMES,
    "label_dim": st.integers(0, 3),
    "slot_num": st.integers(0, 30),
    "initialize_after_startup": st.booleans(),
    "jaxsok": st.fixed_dictionaries(
        {},
        optional={
            "row_dtype": st.just("float8_e4m3fn"),
            "spare_rows": st.integers(0, 99),
            "is_split": st.booleans(),
        },
    ),
}


@st.composite
def models(draw, name):
    count = draw(st.integers(1, 4))

    def lists(items):
        return draw(st.lists(items, min_size=count, max_size=count))

    model = {
        "model": name,
        "sparse_files": lists(NAMES),
        "embedding_vecsize_per_table": lists(st.integers(1, 999)),
        "maxnum_catfeature_query_per_table_per_sample": lists(st.integers(1, 99)),
        "default_value_for_each_table": draw(st.lists(st.floats(-9, 9, width=32), max_size=count)),
        "deployed_device_list": draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)),
        **draw(st.fixed_dictionaries({}, optional=OPTIONS)),
    }
    if draw(st.booleans()):
        names = st.lists(NAMES, min_size=count, max_size=count, unique=True)
        model["embedding_table_names"] = draw(names)
    if model.get("use_static_table") or model.get("embedding_cache_type") == "static":
        model["gpucache"] = True
    if model.get("jaxsok", {}).get("is_split"):
        model |= {"gpucache": True, "gpucacheper": 1.0}
    return model


@st.composite
def configurations(draw):
    names = draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))
    top = {"supportlonglong": draw(st.booleans()), "models": [draw(models(name)) for name in names]}
    volatile = {"type": st.sampled_from(["hash_map", "parallel_hash_map"])}
    other = {"num_partitions": st.integers(1, 64), "password": NAMES, "update_filters": st.lists(NAMES, max_size=2)}
    blocks = {
        "fuse_embedding_table": st.booleans(),
        "volatile_db": st.fixed_dictionaries(volatile, optional=other),
        "persistent_db": st.fixed_dictionaries({}, optional={"type": st.just("disabled"), "path": NAMES}),
        "update_source": st.one_of(
            st.fixed_dictionaries({}, optional={"type": st.none(), "brokers": NAMES}),
            st.fixed_dictionaries(
                {"type": st.just("redis_stream"), "brokers": NAMES.map("redis://{}:6379".format)},
                optional={"jaxsok": st.fixed_dictionaries({}, optional={"consumer": NAMES})},
            ),
        ),
    }
    return {**top, **draw(st.fixed_dictionaries({}, optional=blocks))}


@hypothesis.given(configurations())
def test_what_is_written_is_read_again(given):
    """A written configuration reads as the same one; outside of the blocks `jaxsok` it has HPS's keys alone."""
    config = read(given)
    with tempfile.TemporaryDirectory() as folder:
        write(f"{folder}/ps.json", config)
        again = read(f"{folder}/ps.json")
        assert dataclasses.replace(again, without_effect=()) == dataclasses.replace(config, without_effect=())
        assert effects(again).items() <= effects(config).items()
        with open(f"{folder}/ps.json") as opened:  # a reader has the old file, whole
            before = pathlib.Path(f"{folder}/ps.json").read_text()
            os.chmod(f"{folder}/ps.json", 0o600)
            write(f"{folder}/ps.json", given)
            assert opened.read() == before and os.listdir(folder) == ["ps.json"]
            assert os.stat(f"{folder}/ps.json").st_mode & 0o777 == 0o600, "it may have a password"
        with pytest.raises(FileNotFoundError):
            write(f"{folder}/none/ps.json", given)
        write(f"{folder}/same.json", given)  # a mapping is written as it is
        assert json.loads(pathlib.Path(folder, "same.json").read_text()) == json.loads(json.dumps(given))
        with pytest.raises(ConfigError, match="supportlonglong"):
            write(f"{folder}/no.json", {**given, "supportlonglong": 1})
        assert not pathlib.Path(folder, "no.json").exists()


def test_databases_are_written(tmp_path):
    """Redis and RocksDB are written, with the values that depend on the machine written out."""
    given = whole(
        volatile_db={"type": "redis_cluster", "address": "cache:7000", "jaxsok": {"timeout_s": 2.0}},
        persistent_db={"type": "rocks_db", "read_only": True},
    )
    write(tmp_path / "ps.json", read(given))
    written = json.loads((tmp_path / "ps.json").read_text())
    assert written["volatile_db"]["num_partitions"] >= 1 and written["persistent_db"]["path"]
    assert read(written) == read(given)


@hypothesis.given(configurations())
def test_no_key_is_forgotten(given):
    before = copy.deepcopy(given)
    config = read(given)
    assert given == before
    again = read(json.loads(json.dumps(given)))
    assert again == config and hash(again) == hash(config) and again.without_effect == config.without_effect
    # Every key that was written is a field, in a table, or listed.
    listed = effects(config)
    for i, model in enumerate(given["models"]):
        for key, value in model.items():
            if key in ("sparse_files", "jaxsok", *(name for name in MODEL if name.endswith("per_table"))):
                continue
            if f"models[{i}].{key}" in listed:
                assert listed[f"models[{i}].{key}"] == value
            elif hasattr(config.models[i], key):
                got = getattr(config.models[i], key)
                assert got == (tuple(value) if isinstance(value, list) else value)
        tables = config.models[i].tables
        assert [table.file for table in tables] == model["sparse_files"]
        assert [table.dim for table in tables] == model["embedding_vecsize_per_table"]
        count = len(model["default_value_for_each_table"])
        defaults = model["default_value_for_each_table"] + [None] * (len(tables) - count)
        assert [table.default for table in tables] == defaults


@hypothesis.given(configurations(), st.data())
def test_an_unknown_key_anywhere_is_refused(given, data):
    key = data.draw(NAMES)
    hypothesis.assume(key not in ("type", *OPTIONS))
    blocks = [given, *given["models"], *(given[name] for name in given if name.endswith(("_db", "_source")))]
    data.draw(st.sampled_from(blocks))["X" + key] = 1
    with pytest.raises(ConfigError, match="got an unknown key"):
        read(given)


@hypothesis.given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=4)),
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
        max_leaves=8,
    ),
    st.data(),
)
def test_values_of_any_kind_are_read_or_refused(value, data):
    """Values of any kind are read, or refused with a path; no other error occurs."""
    keys = [("models", 0, key) for key in (*MODEL, *OPTIONS, "embedding_table_names")]
    keys += [("volatile_db", key) for key in VOLATILE_DEFAULTS] + [("persistent_db",), ("update_source",), ("models",)]
    given = copy.deepcopy(whole(volatile_db={"type": "hash_map"}))
    *outer, last = data.draw(st.sampled_from(keys))
    block = given
    for step in outer:
        block = block[step]
    block[last] = value
    try:
        read(given)
    except ConfigError as error:
        assert error.path.startswith(("models", "volatile_db", "persistent_db", "update_source"))
