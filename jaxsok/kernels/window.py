"""Doors of the window noun: exchanges with other shards through memory that their peers write.

Windows are memory of the library, reached by a number. `open_windows` and `reserve` act on the devices at once, while a
program is traced; the rest are calls of a program, on every shard.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Int32, UInt32

from jaxsok.kernels import library
from jaxsok.kernels.call import call, result
from jaxsok.types import Digest


def open_windows(platform: str, number: int, groups: Sequence[Sequence[int]], most_seconds: int) -> None:
    """Names the groups of devices (ordinals by shard) that exchange; RuntimeError: they cannot reach each other."""
    ordinals = np.asarray(groups, np.int32)
    pointer = ordinals.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
    _check("open", library.load_for(platform).JaxsokWindowOpen(number, *ordinals.shape, pointer, most_seconds))


def reserve(platform: str, number: int, num_bytes: int) -> None:
    """Makes sure of windows that receive this many bytes in an exchange. RuntimeError: a device has no room."""
    error = library.load_for(platform).JaxsokWindowReserve(number, num_bytes)
    _check(f"reserve: num_bytes: got {num_bytes}", error)


HANDLE_BYTES = 64
"""Bytes that name a window to other processes (`WindowHandle` in ffi/kernels/window.h)."""


def room(platform: str, number: int) -> int:
    """Returns the bytes that a shard can receive in one exchange."""
    return library.load_for(platform).JaxsokWindowRoom(number)


class Growth:
    """The steps by which several processes add larger windows; they wait for each other after each of them."""

    def __init__(self, platform: str, number: int):
        self._library, self._number = library.load_for(platform), number

    def take(self, num_bytes: int, num_windows: int) -> bytes:
        """Makes the next windows; returns their handles, zeros for those of other processes."""
        handles = ctypes.create_string_buffer(num_windows * HANDLE_BYTES)
        _check(f"reserve: num_bytes: got {num_bytes}", self._library.JaxsokWindowTake(self._number, num_bytes, handles))
        return handles.raw

    def map(self, handles: bytes) -> None:
        """Maps the next windows of all processes for the devices of this one."""
        _check("reserve", self._library.JaxsokWindowMap(self._number, handles))

    def settle(self, *, is_mapped: bool) -> None:
        """Lets exchanges use the next windows, if all processes have mapped them, or unmaps them."""
        self._library.JaxsokWindowSettle(self._number, is_mapped)


def _check(what: str, error: bytes | None) -> None:
    if error is not None:
        raise RuntimeError(f"window: {what}: {error.decode()}; pass ExchangeSpec(wire='dense') to do without windows.")


def after_meeting(number: int, like: Array) -> dict[str, UInt32[Array, "1"]]:
    """Returns the last operand of a call that exchanges: the threads of all devices meet before that call.

    See `MeetThreads`. The array has no content. All meetings have the same operand, so a program has only one.
    """
    met = {"met": result(like, (1,), "uint32")}
    return call("jaxsok_window_meet", {"nothing": np.zeros(1, np.uint32)}, met, window=number)


def exchange(number: int, lines: Array) -> Array:
    """Sends equal parts of `lines` to the shards, and receives theirs. See `LaunchWindowExchange`."""
    received = result(lines, lines.shape, lines.dtype)
    operands = {"lines": lines} | after_meeting(number, lines)
    return call("jaxsok_window_exchange", operands, {"received": received}, window=number)["received"]


class ReceivedLines(NamedTuple):
    """Lines and words that one shard received from all."""

    lines: UInt32[Array, "num_received line_words"]
    """Equal parts by shard; padding after the lines of each."""
    offsets: Int32[Array, "num_shards num_offsets"]
    load: Int32[Array, "1 2"]
    """Most lines from one shard to one, and most to one from all shards; the same everywhere."""
    digest: Digest
    """Digest of the digests of all shards; the same everywhere."""


def send_lines(
    number: int,
    lines: UInt32[Array, "num_lines line_words"],
    starts: Int32[Array, " num_shards_plus_1"],
    digest: Digest,
    offsets: Int32[Array, "num_shards num_offsets"],
    send_capacity: int,
) -> ReceivedLines:
    """Sends each shard its lines of 2 or 4 words, at most `send_capacity`, and offsets. See `LaunchWindowLines`."""
    results = {
        "received": result(lines, (offsets.shape[0] * send_capacity, lines.shape[1]), "uint32"),
        "offsets_received": result(lines, offsets.shape, "int32"),
        "load": result(lines, (1, 2), "int32"),
        "digest_of_all": result(lines, (1, 2), "uint32"),
    }
    operands = {"lines": lines, "starts": starts, "digest": digest, "offsets": offsets} | after_meeting(number, lines)
    return ReceivedLines(*call("jaxsok_window_lines", operands, results, window=number).values())


def sum_words(number: int, words: Int32[Array, " _"], same: Array) -> Int32[Array, " _"]:
    """Adds the words of all shards. See `LaunchWindowSum`; the result is typed as the same everywhere, as `same` is."""
    sums = result(same, words.shape, "int32")
    operands = {"words": words} | after_meeting(number, words)
    return call("jaxsok_window_sum", operands, {"sums": sums}, window=number)["sums"]
