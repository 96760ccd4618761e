"""Tables, rows and databases for the tests of Redis and RocksDB, and a check of the rows against a dict."""

import numpy as np

from jaxsok.serving.config import PersistentDb, VolatileDb
from jaxsok.serving.databases import DatabaseRows
from jaxsok.serving.frozen import FrozenTable

USER, ITEM = FrozenTable("user", dim=4, default=-1.0), FrozenTable("item", dim=3, default=0.5)
DIMS = {"user": 4, "item": 3}


def redis_at(address, **options):
    from jaxsok.serving.databases.redis import RedisDatabase

    return RedisDatabase(VolatileDb("redis_cluster", address, **{"num_partitions": 8, "timeout_s": 5.0, **options}))


def rocks_at(path, **options):
    from jaxsok.serving.databases.rocksdb import RocksDatabase

    return RocksDatabase(PersistentDb("rocks_db", str(path), **{"num_threads": 2, **options}))


def u64(*keys):
    return np.array(keys, np.uint64)


def rows_for(keys, dim, version=0):
    return np.array([[1000 * version + key % 997 + column for column in range(dim)] for key in keys], np.float32)


def check(rows, table, keys, content):
    found, is_found = rows.fetch(table, np.array(keys, np.uint64))
    assert found.dtype == np.float32 and found.shape == (len(keys), DIMS[table])
    assert is_found.tolist() == [key in content for key in keys]
    for row, key in zip(found, keys, strict=True):
        if key in content:
            np.testing.assert_array_equal(row, content[key])


class Tiers:
    """Two databases, together and each alone."""

    def __init__(self, volatile, persistent):
        self.both = DatabaseRows([volatile, persistent], "dlrm", [USER], lifts=True)
        self.volatile, self.persistent = (
            DatabaseRows([database], "dlrm", [USER]) for database in (volatile, persistent)
        )
        self.background = volatile.background
