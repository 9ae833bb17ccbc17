"""The items of running requests: their ids once a thread has digested them."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from kvx_core.connector.items import Item, RequestItems, TokensWithItems
from kvx_core.model.items import item_ids

SECONDS = 5.0


def request(name: str = "r", num_tokens: int = 20) -> Any:
    return SimpleNamespace(request_id=name, all_token_ids=list(range(num_tokens)))


def waited(items: RequestItems, of: Any, found: list[Item]) -> TokensWithItems | None:
    """What is known once nothing is pending."""
    end = time.monotonic() + SECONDS
    source = items.of(of, len(found), lambda: found)
    while items.are_pending(of.request_id) and time.monotonic() < end:
        time.sleep(0.001)
    return source or items.of(of, len(found), lambda: found)


def test_positions_of_items_have_ids_of_their_own() -> None:
    one = request()
    source = waited(RequestItems(), one, [Item(3, 4, lambda: b"a"), Item(9, 5, lambda: b"b")])
    assert source is not None
    expected = list(range(20))
    expected[3:7], expected[9:14] = item_ids(b"a", 4).tolist(), item_ids(b"b", 5).tolist()
    for start in range(21):
        for stop in range(start, 22):
            assert source[start:stop].tolist() == expected[start:stop]
    one.all_token_ids += [7, 8]
    assert len(source) == 22
    assert source[18:22].tolist() == [18, 19, 7, 8]


@pytest.mark.parametrize("length", [3, 4])
def test_an_item_that_is_too_short(length: int) -> None:
    found = waited(RequestItems(), request(), [Item(3, length, lambda: b"a")])
    assert (found is not None) == (length == 4)


def test_an_item_that_is_not_known() -> None:
    def fail() -> bytes:
        raise ValueError("as a test says")

    items = RequestItems()
    for name, digest in (("a", lambda: None), ("b", fail)):
        found = [Item(0, 5, lambda: b"a"), Item(6, 5, digest)]
        assert waited(items, request(name), found) is None
        assert not items.are_pending(name)


def test_a_request_waits_for_its_digests() -> None:
    items, begin = RequestItems(seconds=0.05), threading.Event()

    def digest() -> bytes:
        begin.wait(SECONDS)
        return b"a"

    one, found = request(), [Item(3, 4, digest)]
    assert items.of(one, 1, lambda: found) is None
    assert items.are_pending("r")
    time.sleep(0.06)
    assert not items.are_pending("r")  # long enough
    begin.set()
    end = time.monotonic() + SECONDS
    while items.of(one, 1, lambda: found) is None:
        assert time.monotonic() < end
    assert not items.are_pending("unknown")


def test_more_items_and_other_requests_are_judged_anew() -> None:
    items, one = RequestItems(), request()
    first = waited(items, one, [Item(3, 4, lambda: b"a")])
    assert waited(items, one, [Item(3, 4, lambda: b"b")]) is first
    more = waited(items, one, [Item(3, 4, lambda: b"a"), Item(9, 4, lambda: b"b")])
    assert more is not first
    other = waited(items, request(), [Item(3, 4, lambda: b"c"), Item(9, 4, lambda: b"b")])
    assert other is not None
    assert other[3:7].tolist() == item_ids(b"c", 4).tolist()
    items.forget("r")
    items.shutdown()
