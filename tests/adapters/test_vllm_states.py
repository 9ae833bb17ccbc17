"""kvx_adapters.vllm on hybrid models: real engines in live_vllm_hybrid.py, refusals here."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvx_adapters import vllm
from kvx_adapters.vllm import states as of_states
from kvx_core import CacheView, InvalidArgumentError, UnsupportedError, migrate
from tests.facts import SAME_MODEL
from tests.native import ROOT, run
from tests.states import GDN_CONFIG as GDN


@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
@pytest.mark.parametrize(
    "family",
    ["Lfm2", *(pytest.param(f, marks=pytest.mark.slow) for f in ("Qwen3Next", "GraniteMoeHybrid"))],
)
def test_states_of_a_running_engine(family: str, tmp_path: Path) -> None:
    if torch.cpu._is_amx_tile_supported():
        pytest.skip("keys in bfloat16 are AMX tiles there, which live_hybrid_span refuses")
    script = ROOT / "tests/adapters/live_vllm_hybrid.py"
    said = run(
        [sys.executable, script, tmp_path, family], env={"PYTHONPATH": str(ROOT)}, timeout=300
    )
    assert "states as HF computed them\n" in said


def pages(layout: str = "SD", columns: int = 3) -> list[torch.Tensor]:
    """The convolution and state of a delta net in 5 blocks; in memory the state is [key, value]."""
    conv = torch.randn(5, columns, 44) if layout == "SD" else torch.randn(5, 44, columns)
    return [conv, torch.randn(5, 4, 5, 6)]


def described(states: list[torch.Tensor], blocks: list[int], **given: Any) -> CacheView:
    known: dict[str, Any] = {"config": GDN, "num_tokens": [7], "conv_layout": "SD", **given}
    return vllm.state_view({2: states}, {2: blocks}, SAME_MODEL, **known)


@pytest.mark.parametrize("there", ["SD", "DS"])
@pytest.mark.parametrize("here", ["SD", "DS"])
def test_layouts_of_convolutions(here: str, there: str) -> None:
    src, dst = pages(here), pages(there)
    ends = described(src, [3], conv_layout=here), described(dst, [1], conv_layout=there)
    others = [tensor[[0, 2, 3, 4]].clone() for tensor in dst]
    migrate(*ends, [7])
    conv = [
        one[block] if kind == "SD" else one[block].T
        for one, block, kind in ((src[0], 3, here), (dst[0], 1, there))
    ]
    assert torch.equal(*conv)
    assert torch.equal(src[1][3], dst[1][1])
    assert all(torch.equal(a, b[[0, 2, 3, 4]]) for a, b in zip(others, dst, strict=True))


def test_on_cpu_a_delta_net_has_its_keys_outermost() -> None:
    conv, state = pages()
    plane = described([conv, state], [3]).planes[1]
    assert plane.shape == (5, 4, 6, 5)
    assert plane.stride == (120, 30, 5, 1)


@pytest.mark.parametrize(
    ("states", "blocks", "given", "sentence"),
    [
        (pages(), [0], {}, r"block_ids of layer 2 are \[0\], expected 1 of 1 or more"),
        (pages(), [1, 2], {}, r"block_ids of layer 2 are \[1, 2\], expected 1 of"),
        (pages(columns=5), [1], {}, r"has 5 columns in layout SD, expected 3.*speculation"),
        (pages(), [1], {"conv_layout": "DS"}, "has 44 columns in layout DS, expected 3"),
        (pages(), [1], {"conv_layout": "NHD"}, "conv_layout is 'NHD', expected 'SD' or 'DS'"),
        (pages()[:1], [1], {}, r"states\[2\] has 1 tensors, expected 2"),
        (pages(), [1], {"num_ranks": 2}, "axis channel of the convolution of gdn has 44 entries"),
        (pages(), [1], {"config": {"model_type": "x"}}, "whose recurrent state is not known"),
    ],
)
def test_refusals(
    states: list[torch.Tensor], blocks: list[int], given: dict[str, Any], sentence: str
) -> None:
    with pytest.raises((InvalidArgumentError, UnsupportedError), match=sentence):
        described(states, blocks, **given)


@pytest.mark.parametrize(
    ("specs", "is_async", "sentence"),
    [
        (["FullAttentionSpec", "MambaSpec"], True, "async_scheduling is True, expected False"),
        (["FullAttentionSpec"], False, "has 1 KV cache groups, 1 of them with keys and values"),
        (["MambaSpec"], False, "has 1 KV cache groups, 0 of them"),
    ],
)
def test_engines_that_are_refused(
    specs: list[str], is_async: bool, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [SimpleNamespace(kv_cache_spec=type(name, (), {})()) for name in specs]
    runner = SimpleNamespace(kv_cache_config=SimpleNamespace(kv_cache_groups=groups))
    monkeypatch.setattr(of_states, "model_runner", lambda llm: runner)
    monkeypatch.setattr(of_states, "engine_core", lambda llm: SimpleNamespace(scheduler=None))
    config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=is_async))
    llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config))
    with pytest.raises(UnsupportedError, match=sentence):
        vllm.live_hybrid_span(llm, ["0"])


def test_the_column_of_a_running_state() -> None:
    spec = SimpleNamespace(mamba_cache_mode="align", block_size=256, num_speculative_blocks=0)
    assert [of_states.state_column(spec, count) for count in (1, 256, 257, 512)] == [0, 0, 1, 1]
    spec.mamba_cache_mode = "none"
    assert of_states.state_column(spec, 257) == 0
    spec.mamba_cache_mode = "all"
    with pytest.raises(UnsupportedError, match="mamba_cache_mode is 'all', expected 'none' or"):
        of_states.state_column(spec, 1)
    spec.num_speculative_blocks = 1
    with pytest.raises(UnsupportedError, match="the engine speculates, expected none"):
        of_states.state_column(spec, 1)
