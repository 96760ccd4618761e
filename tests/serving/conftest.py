"""Fixtures of several test modules of this folder: Redis servers, and an HTTP server over a stand-in for a session."""

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


@pytest.fixture(scope="module")
def session():
    import server_cases  # needs packages that other tests do without

    return server_cases.Session()


@pytest.fixture(scope="module")
def address(session):
    import server_cases

    with server_cases.serving(session, max_body_bytes=1 << 20, max_keys=5000, body_timeout_s=1.0) as found:
        yield found.address


@pytest.fixture(scope="module")
def client(address):
    import httpx

    with httpx.Client(base_url=address, timeout=20) as made:
        yield made
