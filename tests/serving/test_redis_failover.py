"""A Redis cluster whose nodes have replicas: one that takes over is written and read."""

import contextlib

import numpy as np
import pytest
from redis_servers import Cluster, running
from waiting import wait_until

from jaxsok.serving.config import VolatileDb
from jaxsok.serving.databases import DatabaseRows
from jaxsok.serving.databases.redis import RedisDatabase
from jaxsok.serving.errors import DatabaseError
from jaxsok.serving.frozen import FrozenTable

KEYS = np.arange(64, dtype=np.uint64)


@pytest.fixture
def servers(tmp_path):
    """Yields three nodes, and then the replica of each."""
    with running(Cluster, tmp_path, True) as cluster:
        yield cluster.servers


def test_writes_go_on_after_a_replica_took_over(servers):
    """A write that failed as its node died is done again without a read in between."""
    address = ",".join(server.address for server in servers[:3])
    database = RedisDatabase(VolatileDb("redis_cluster", address, num_partitions=8, timeout_s=1.0))
    with contextlib.closing(database):
        rows = DatabaseRows([database], "dlrm", [FrozenTable("user", dim=2, default=-1.0)])
        first = np.repeat(KEYS[:, None], 2, 1).astype(np.float32)
        rows.insert("user", KEYS, first)
        for server in servers[:3]:
            server.client.execute_command("WAIT", 1, 2000)
        servers[0].process.kill()
        servers[0].process.wait()
        with pytest.raises(DatabaseError):
            rows.insert("user", KEYS, first + 1)

        def is_written():
            with contextlib.suppress(DatabaseError):
                rows.insert("user", KEYS, first + 2)
                return True

        wait_until(is_written)
        found, is_found = rows.fetch("user", KEYS)
        assert is_found.all()
        np.testing.assert_array_equal(found, first + 2)
