"""Tests how a server reads HTTP from its connections: heads, bodies, requests sent at once, and clients that leave."""

import logging
import re
import socket
import struct
import time

import httpx
import pytest
import server_cases as cases
from server_cases import head, is_well, num_taken, talk
from waiting import wait_until

from jaxsok.serving.http import running

# Bodies --------------------------------------------------------------------------------------------------------------


def test_a_body_without_end_is_cut_off(address, client):
    """A body without end is cut off: its bytes are counted while they are read."""
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    got = talk(address, head(Transfer_Encoding="chunked"), *[chunk] * 100)
    assert got.startswith(b"HTTP/1.1 413") and b'"too_large"' in got and b"connection: close" in got.lower()
    assert is_well(client)


def test_a_length_that_is_too_long_is_refused_before_the_body(address, client):
    """A client that asks before it sends a body gets the refusal of its length at once."""
    got = talk(address, head(Content_Length=1 << 40, Expect="100-continue"))
    assert got.startswith(b"HTTP/1.1 413") and b"100 Continue" not in got
    assert is_well(client)


def test_a_slow_body_is_given_up(address, client):
    begin = time.monotonic()
    got = talk(address, head(Content_Length=100), b"{", pause_s=1.2)
    assert got.startswith(b"HTTP/1.1 408") and time.monotonic() - begin < 20
    assert is_well(client)


def test_a_damaged_chunk_ends_its_request(address, client, caplog):
    """A damaged chunk gets one refusal, and the rest of the body is not read as a request."""
    got = talk(address, head(Transfer_Encoding="chunked"), b"2\r\n{}\r\n", b"zz\r\n", pause_s=0.1)
    assert re.findall(rb"HTTP/1.1 (\d+)", got) == [b"400"]
    wait_until(lambda: num_taken(client) == 0)
    assert is_well(client) and not [record for record in caplog.records if record.exc_info]


def test_a_body_that_is_also_compressed_on_the_way_is_refused(address):
    got = talk(
        address, head(Transfer_Encoding="gzip, chunked", Connection="close"), b"2\r\n{}\r\n0\r\n\r\n", pause_s=0.1
    )
    assert got.startswith(b"HTTP/1.1 415 ") and b"got Transfer-Encoding 'gzip, chunked', wanted chunked" in got
    body = b'{"keys": {"user": [1]}}'
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    got = talk(address, head(Transfer_Encoding="Chunked", Connection="close"), chunks, pause_s=0.1)
    assert got.startswith(b"HTTP/1.1 200 ")


def test_a_refused_body_does_not_spoil_the_connection(address):
    """A body that is refused by its head is not read as the next request."""
    body = b"POST " * 5000
    request = f"POST /v1/models/no/lookup HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    got = talk(address, request, b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", pause_s=0.2)
    assert re.findall(rb"HTTP/1.1 (\d+)", got) == [b"404", b"200"]


# Heads ---------------------------------------------------------------------------------------------------------------


def long_head(num_bytes, end="close"):
    """Returns a request whose head has this many bytes, including the empty line."""
    begin = f"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: {end}\r\nX-Filler: ".encode()
    return begin + b"b" * (num_bytes - len(begin) - 4) + b"\r\n\r\n"


@pytest.mark.parametrize("num_bytes, status", [(1 << 16, b"200"), ((1 << 16) + 1, b"431"), (100_000, b"431")])
@pytest.mark.parametrize("how", ["at once", "in parts", "behind another"])
def test_a_head_has_a_limit(address, client, num_bytes, status, how):
    """A head of more than 64 KiB is refused, however it arrives, and the client can read the refusal."""
    sent = long_head(num_bytes)
    parts = {
        "at once": [sent],
        "in parts": [sent[begin : begin + 30_000] for begin in range(0, num_bytes, 30_000)],
        "behind another": [long_head(200, "keep-alive") + sent],
    }[how]
    got = talk(address, *parts, pause_s=0.02)
    assert re.findall(rb"HTTP/1.1 (\d+)", got) == ([b"200"] if how == "behind another" else []) + [status]
    if status == b"431":
        assert got.endswith(b'at most so many are taken."}}') and b'"head_too_large"' in got
        assert b"connection: close" in got.lower()
    assert is_well(client)


def test_a_head_that_goes_on_is_refused_once(address, client):
    """Bytes after a refusal are ignored, and the connection ends."""
    got = talk(address, b"GET / HTTP/1.1\r\na: ", *[b"b" * (1 << 16)] * 20, pause_s=0.01)
    assert re.findall(rb"HTTP/1.1 (\d+)", got) == [b"431"]
    assert is_well(client)


def test_a_trailer_that_goes_on_is_refused_once(address, client):
    """Trailers have the limit of a head: they are stored until they end."""
    parts = [b"2\r\n{}\r\n0\r\nX-Filler: ", *[b"b" * (1 << 16)] * 20]
    got = talk(address, head(Transfer_Encoding="chunked"), *parts, pause_s=0.01)
    assert re.findall(rb"HTTP/1.1 (\d+)", got) == [b"431"]
    wait_until(lambda: num_taken(client) == 0)
    assert is_well(client)


@pytest.mark.parametrize("parts", [1, 2])
def test_upgrades_are_not_taken(address, parts):
    """A request that offers another protocol, as Java's client does, is answered; its body is no request."""
    body = b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"
    begin = head(Content_Length=len(body), Connection="Upgrade, HTTP2-Settings", Upgrade="h2c", HTTP2_Settings="AAMA")
    last = b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    got = talk(address, *([begin + body] if parts == 1 else [begin, body]), last, pause_s=0.2)
    assert re.findall(rb"HTTP/1.1 (\d+)", got) == [b"400", b"200"] and b"no JSON" in got
    body = b'{"keys":{"user":[4]}}'
    begin = head(Content_Length=len(body), Connection="Upgrade, HTTP2-Settings", Upgrade="h2c", HTTP2_Settings="AAMA")
    lookup = head(Content_Length=len(body)) + body
    got = talk(address, *([begin + body + lookup] if parts == 1 else [begin, body + lookup]), last, pause_s=0.2)
    assert re.findall(rb"HTTP/1.1 (\d+)", got) == [b"200", b"200", b"200"]


# Requests that are sent at once --------------------------------------------------------------------------------------


def test_requests_that_are_sent_at_once_are_answered_in_order(address):
    """Pipelined requests get their responses in order, then what follows them its refusal."""
    body = b'{"keys":{"user":[4]}}'
    lookup = head(Content_Length=len(body)) + body
    sent = lookup + head("/nowhere", Content_Length=0) + lookup + b"\x00\xff garbage\r\n\r\n"
    assert re.findall(rb"HTTP/1.1 (\d+)", talk(address, sent)) == [b"200", b"404", b"200", b"400"]


def test_a_damaged_request_behind_others_loses_none_of_them(address):
    body = b'{"keys":{"user":[4]}}'
    sent = head(Content_Length=len(body)) + body + head(Transfer_Encoding="chunked") + b"zz\r\n"
    assert re.findall(rb"HTTP/1.1 (\d+)", talk(address, sent)) == [b"200", b"400"]


def test_pipelined_requests_are_bounded(address):
    """All that have come are parsed: without a bound, one connection would fill the memory."""
    sent = b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n" * 1000
    assert re.findall(rb"HTTP/1.1 (\d+)", talk(address, sent)) == [b"200"] * 17 + [b"400"]


# Clients that leave --------------------------------------------------------------------------------------------------


def test_clients_that_leave_and_noise(address, client):
    """Clients that leave and bytes that are no HTTP get no response and do no harm."""
    host, port = address.removeprefix("http://").split(":")
    for sent in (b"", b"GET", head(Content_Length=100) + b"{", b"\x16\x03\x01\x02\x00", head() + b"{}"):
        with socket.create_connection((host, int(port))) as line:
            line.sendall(sent)
    assert talk(address, b"\x00\xff garbage\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert talk(address, head(Content_Length="-1")).startswith(b"HTTP/1.1 400")
    assert talk(address, head(Content_Length=2, Transfer_Encoding="chunked") + b"{}").count(b"HTTP/1.1 2") == 0
    assert is_well(client)


@pytest.mark.parametrize("is_reset", [False, True], ids=["closed", "reset"])
def test_clients_that_leave_with_requests_that_wait_are_quiet(address, client, caplog, is_reset):
    """The first of several requests is answered when its client has left."""
    body = b'{"keys": {"user": [4]}}'
    host, port = address.removeprefix("http://").split(":")
    for _ in range(20):
        with socket.create_connection((host, int(port))) as line:
            line.sendall((head(Content_Length=len(body)) + body) * 5)
            if is_reset:
                line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_until(lambda: num_taken(client) == 0)
    assert is_well(client)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# Responses -----------------------------------------------------------------------------------------------------------


def test_small_responses_are_not_held_back(monkeypatch):
    """Connections have TCP_NODELAY: the kernel would hold a response back until the client acknowledges the last."""
    seen, made = [], running._Protocol.connection_made

    def connection_made(self, transport):
        made(self, transport)
        seen.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(running._Protocol, "connection_made", connection_made)
    with cases.serving(cases.Session()) as found, httpx.Client(base_url=found.address, timeout=20) as client:
        assert is_well(client)
    assert seen and all(seen)
