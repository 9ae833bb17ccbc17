"""Headers that are filled into a text made once are those that are made whole."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvx_core import CacheFacts, Snapshot, StoreError
from kvx_core.snapshot import layout as layout_module
from kvx_core.snapshot.header import header_body
from kvx_core.snapshot.layout import Layout
from kvx_core.snapshot.seal import sealed
from kvx_core.snapshot.signing import Key
from tests.core.test_header_cache import CHUNK, FACTS, KEY, section

PREFIXES = [
    "",
    "0" * 64,
    '"',
    "\\",
    "\n\t\x00\x1f\x7f",
    "é 漢 \U0001f600",
    '","start":1,"x":"',
    "1" * 17,
]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """No layout is known before or after."""
    layout_module._layouts.clear()
    yield
    layout_module._layouts.clear()


def chunk(facts: CacheFacts = FACTS) -> Snapshot:
    found = Snapshot.capture(range(CHUNK), [section(facts=facts)])
    assert found is not None
    return found


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("key", [None, Key(KEY)])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_each_is_the_one_that_is_made_whole(prefix: str, key: Key | None, seed: int) -> None:
    numbers = random.Random(seed)
    one = chunk()
    layout = Layout.of(one.header, one.tensors, is_signed=key is not None)
    for start in (0, 9, 10**17, (1 << 62) - 1, numbers.randrange(1 << 40)):
        sums = [f"{numbers.getrandbits(128):032x}" for _ in layout.names]
        body, num_bytes = header_body(
            replace(one.header, start=start, prefix=prefix),
            one.tensors,
            dict(zip(layout.names, sums, strict=True)),
            is_signed=key is not None,
        )
        assert num_bytes == layout.num_bytes == one.num_bytes
        tokens = one.array("tokens").tobytes()
        whole = sealed(body.encode(), tokens, num_bytes, key)
        assert layout.header(start, prefix, sums, tokens, key) == whole


def test_files_with_other_content_have_other_layouts(tmp_path: Path) -> None:
    facts = [FACTS, replace(FACTS, engine="0" * 32), replace(FACTS, engine='"start":7'), FACTS]
    for i, each in enumerate(facts):
        one = chunk(each)
        one.save(tmp_path / f"{i}")
        with Snapshot.open(tmp_path / f"{i}") as found:
            assert found.header == one.header
            assert found.read(found.header.layers).digest() == one.digest()
    assert len(layout_module._layouts) == 3


def test_a_prefix_that_is_no_text_is_refused(tmp_path: Path) -> None:
    one = replace(chunk(), header=replace(chunk().header, prefix="\ud800"))
    with pytest.raises(StoreError, match="cannot be written"):
        one.save(tmp_path / "file")


def test_only_so_many_are_remembered() -> None:
    for i in range(3 * layout_module._MAX_LAYOUTS):
        one = chunk(replace(FACTS, engine=f"engine {i}"))
        Layout.of(one.header, one.tensors, is_signed=False)
        assert 0 < len(layout_module._layouts) <= layout_module._MAX_LAYOUTS
