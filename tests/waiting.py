"""Waiting for another thread or process, with a bound that a machine does not reach merely because it is busy."""

import socket
import subprocess
import time


def wait_until(holds, seconds=60.0):
    """Returns once `holds()` is true, checking a hundred times a second. Raises AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"waited {seconds} s in vain"
        time.sleep(0.01)


def free_port():
    """Returns a port of this machine on which no process listens."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def wait_for_end(processes, folder, *, timeout_s):
    """Returns the exit codes; no process remains."""
    deadline = time.monotonic() + timeout_s
    try:
        return [process.wait(timeout=max(0.1, deadline - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired:
        errors = [(folder / f"{number}.err").read_text()[-1500:] for number in range(len(processes))]
        raise AssertionError("\n".join(["still there:", *errors])) from None
    finally:
        for process in processes:
            process.kill()
            process.wait()
