"""A Redis cluster whose nodes have replicas: one that takes over is written and read."""

import contextlib

import numpy as np
import pytest
import redis
from redis_servers import Server
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
    with contextlib.ExitStack() as running:
        made = []
        for number in range(6):
            options = ["--cluster-enabled", "yes", "--cluster-config-file", f"{number}.conf"]
            made.append(Server(tmp_path, *options, "--cluster-node-timeout", "1500"))
            running.callback(made[-1].kill)
        for server, start, end in zip(made[:3], (0, 5461, 10_923), (5461, 10_923, 16_384), strict=True):
            server.client.execute_command("CLUSTER ADDSLOTS", *range(start, end))
        for server in made[1:]:
            server.client.execute_command("CLUSTER MEET", "127.0.0.1", made[0].port)
        wait_until(lambda: all(server.client.cluster("INFO")["cluster_known_nodes"] == "6" for server in made))
        for node, replica in zip(made[:3], made[3:], strict=True):

            def follows(node=node, replica=replica):
                with contextlib.suppress(redis.ResponseError):  # it does not know the node yet
                    replica.client.execute_command("CLUSTER REPLICATE", node.client.execute_command("CLUSTER MYID"))
                    return True

            wait_until(follows)
        wait_until(lambda: all(server.client.cluster("INFO")["cluster_state"] == "ok" for server in made))
        links = lambda: [server.client.info("replication").get("master_link_status") for server in made[3:]]  # noqa: E731
        wait_until(lambda: links() == ["up"] * 3)
        yield made


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
