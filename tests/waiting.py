"""Waiting for what another thread or process does, with a bound that no machine reaches which is merely busy."""

import time


def wait_until(holds, seconds=60.0):
    """Returns once `holds()` is true; looks a hundred times a second. AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"waited {seconds} s in vain"
        time.sleep(0.01)
