"""Rows in databases: Redis and RocksDB, as HPS lays them out; rows.py says how, and in which order they are asked."""

import contextlib

from jaxsok.serving.config import Config
from jaxsok.serving.databases.rows import Database, DatabaseRows

__all__ = ["Connected", "Database", "DatabaseRows", "connect"]

Connected = tuple[Database | None, Database | None]
"""`volatile_db` and `persistent_db`; None: the block is missing, or is no database."""


def connect(config: Config) -> Connected:
    """Connects to the databases of a configuration. DatabaseError: one cannot be reached."""
    volatile = persistent = None
    with contextlib.ExitStack() as after_an_error:
        if config.volatile_db.type == "redis_cluster":
            from jaxsok.serving.databases.redis import RedisDatabase

            volatile = RedisDatabase(config.volatile_db)
            after_an_error.callback(volatile.close)
        if config.persistent_db.type == "rocks_db":
            from jaxsok.serving.databases.rocksdb import RocksDatabase

            persistent = RocksDatabase(config.persistent_db)
        after_an_error.pop_all()
    return volatile, persistent
