"""Requests in JSON by themselves: what is refused before it is parsed, and messages of single parts."""

import json

import numpy as np
import pytest

from jaxsok.serving.errors import RequestError, RequestTooLargeError
from jaxsok.serving.http import wire


@pytest.mark.parametrize("levels", range(1, 9))
def test_any_levels_that_lists_may_have(levels):
    """A request of as many numbers as are taken passes, however its axes of one nest them."""
    keys = np.arange(3000, dtype=np.uint64).reshape(-1, *[1] * (levels - 1))
    body = json.dumps({"keys": {"user": keys.tolist()}}).encode()
    wire.check_json(body, keys.size, ["user"], "lookup")
    found = wire.read_keys(wire.read_json(body, "lookup", "keys")["user"], "lookup")
    np.testing.assert_array_equal(found, keys)


@pytest.mark.parametrize(("text", "sign"), [("[" * 30_000, "["), ("0," * 9_000, ","), ("::" * 2_000, ":")])
def test_more_than_a_request_can_need(text, sign):
    with pytest.raises(RequestTooLargeError, match=rf'got JSON with "\{sign}" [0-9]+ times, at most'):
        wire.check_json(f'{{"keys": {{"user": {text}'.encode(), 3000, ["user"], "lookup")


def test_weights_of_another_number():
    parts = {"values": [1, 2], "lengths": [2], "weights": [0.5]}
    with pytest.raises(RequestError, match=r"bags: weights: got 1, wanted one for each of 2 values\."):
        wire.read_bags(parts, True, "bags")
    with pytest.raises(RequestError, match=r"must be lists of numbers, got shapes \[\[2\], \[2\], \[1, 2\]\]"):
        wire.read_bags(parts | {"weights": [[0.5, 1.0]], "lengths": [1, 1]}, True, "bags")
    with pytest.raises(RequestError, match=r"must be lists of numbers, got shapes \[\[2\], \[1, 2\], \[2\]\]"):
        wire.read_bags(parts | {"weights": [0.5, 1.0], "lengths": [[1, 1]]}, True, "bags")
