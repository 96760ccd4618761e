"""Redis servers and connections to them, for all test modules of this folder."""

import contextlib

import pytest
from database_cases import redis_at
from redis_servers import Cluster, Server, running


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running(Server, tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running(Cluster, tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def redis(server):
    """Yields an empty server, and a function that connects to it."""
    server.client.flushall()
    with contextlib.ExitStack() as opened:
        yield lambda **options: opened.enter_context(contextlib.closing(redis_at(server.address, **options)))
