"""The `kvx` command, run as a user runs it; the demo and an example on the real engines."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import kvx_core
from kvx_adapters.cli import demo_hops, demo_packages, demo_route
from kvx_adapters.cli.commands import app
from kvx_adapters.cli.demo_hops import Stop, hop, tgi_cache, trtllm_pool
from kvx_adapters.cli.demo_model import ANSWER, QUESTION
from kvx_adapters.cli.engines import Model
from kvx_core import CacheDesc, CacheView, Layout, SeqLens, describe
from tests.facts import SAME_MODEL

ROOT = Path(__file__).parents[2]
KVX = "from kvx_adapters.cli import main; main()"
PACKAGES = ["vllm", "transformers", "tokenizers", "openvino", "mlx", "onnx", "onnxruntime", "gguf"]
TITLES = ["vLLM", "llama.cpp", "OpenVINO", "MLX", "ONNX Runtime", "HF transformers"]
needs_engines = pytest.mark.skipif(
    find_spec("vllm") is None or find_spec("transformers") is None,
    reason="vllm and transformers are not installed",
)


def python(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs Python in a new process: vLLM changes the process that it runs in."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def told(result: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """What each line of the demo says, by its name; a line that is wrapped is joined."""
    return lines_of(result.stdout)


def lines_of(text: str) -> dict[str, str]:
    text = re.sub(r" *\n {11}", " ", text)
    return {name: mark + rest for mark, name, rest in re.findall(r"^([✓✗]) (\w+)(.*)$", text, re.M)}


def rows_of(result: subprocess.CompletedProcess[str], width: int) -> list[list[str]]:
    """The rows of the table that has `width` columns."""
    rows = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in result.stdout.splitlines()
        if line.startswith("│")
    ]
    return [row for row in rows if len(row) == width]


def hops(result: subprocess.CompletedProcess[str]) -> list[list[str]]:
    """The table of hops without its times, which are numbers."""
    rows = rows_of(result, 10)
    for row in rows[1:]:
        assert all(float(cell) > 0 for cell in row[6:9])
    return [[*row[:6], row[9]] for row in rows]


@needs_engines
def test_vllm_prefills_and_transformers_goes_on() -> None:
    result = python("-c", KVX, "demo")
    assert result.returncode == 0, result.stdout + result.stderr
    lines = told(result)
    assert all(line.startswith("✓") for line in lines.values())
    lengths = [int(n) for n in re.findall(r"\d+", lines["prefill"].partition("prompts of")[2])][:5]
    assert all(length % 2 for length in lengths)
    num_values = sum(lengths) * 4 * 2 * 2 * 64
    assert f"equal: {sum(lengths)} tokens, {num_values} values" in lines["verify"]
    mb = f"{num_values * 4 / 1e6:.2f}"
    assert hops(result) == [
        ["vLLM", "[H, D, T]", "[H, T, D]", "32", "block table", "", "source"],
        ["TensorRT-LLM *", "[H, T, D]", "[H, T, D]", "64", "KV_OFFSETS", mb, "equal"],
        ["TGI *", "[H, D/4, T, 4]", "[H, D, T]", "16", "slots", mb, "equal"],
        ["HF transformers", "[H, T, D]", "[H, T, D]", str(max(lengths)), "row, start", mb, "equal"],
    ]
    assert "the engine itself is not running" in result.stdout
    assert "5 of 5 continuations equal" in lines["tokens"]
    assert "5 of 5" not in lines["control"]
    assert "remembered.<eos>" in result.stdout  # vLLM said what the model has learnt

    route = rows_of(result, 9)  # a text of two lines continues in a row without a name
    assert [row[0] for row in route if row[0]] == TITLES
    assert " ".join(row[1] for row in route) == f"{ANSWER}<eos>"
    assert [row[8] for row in route if row[0]] == ["start", *["equal"] * 5]
    assert all(float(row[3]) > 0 for row in route if row[0])
    assert all(float(cell) > 0 for row in route[1:] if row[0] for cell in row[5:8])
    num_tokens = sum(int(row[2]) for row in route if row[0])
    assert f"{num_tokens} of {num_tokens} tokens are those that vLLM says" in lines["answer"]
    assert "5 of 5 are found; the last one differs at layer" in lines["flipped"]
    assert "0 of 5 engines say their words" in lines["zeros"]
    assert "left out" not in result.stdout
    assert "INFO" not in result.stdout + result.stderr  # its logs stay out of the way


def test_every_hop_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [70, 1, 17]
    k, v = torch.randn(2, 3, 70, 2, 16)  # three sequences of up to 70 tokens, two heads
    layer = CacheDesc.from_kv(describe(k, Layout.BLOCK_NHD), describe(v, Layout.BLOCK_NHD))
    view = CacheView(layers=(layer,), facts=SAME_MODEL, dense=True)
    chance = random.Random(0)
    dense = Stop("dense", "row", view.at())
    pool = trtllm_pool(view, lengths, chance)
    for dst in (pool, tgi_cache(view, lengths, chance)):
        assert hop(dense, dst, SeqLens.of(lengths)).arrived.ok
    nowhere = tgi_cache(view, lengths, chance)
    monkeypatch.setattr(demo_hops, "migrate", lambda *_: 0)
    arrived = hop(pool, nowhere, SeqLens.of(lengths)).arrived
    assert str(arrived).startswith("differs at layer 0 K, sequence 0, token 0, head 0, dim 0")


def test_engines_that_are_not_here_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def live(name: str, *_: Any) -> None:
        if name == "mlx":
            raise ModuleNotFoundError("No module named 'mlx'")
        if name == "llama_cpp":
            raise FileNotFoundError("libllama is missing")

    monkeypatch.setattr(demo_route, "live", live)
    here, absent = demo_route.installed(Model(None, ""), 8)
    assert [station.title for station in here] == ["OpenVINO", "ONNX Runtime", "HF transformers"]
    assert {station.title: why for station, why in absent.items()} == {
        "llama.cpp": "libllama is missing",
        "MLX": "No module named 'mlx'",
    }


@pytest.mark.parametrize("num_tokens", range(1, 30))
def test_a_bit_is_flipped_and_flipped_back(num_tokens: int) -> None:
    halves = torch.randn(2, 2, 1, 30, 2, 16)  # two layers of one sequence
    layers = [[describe(half, Layout.BLOCK_NHD) for half in layer] for layer in halves]
    cache = tuple(CacheDesc.from_kv(*layer) for layer in layers)
    dst = CacheView(layers=cache, facts=SAME_MODEL, dense=True)
    copies = [[describe(half.clone(), Layout.BLOCK_NHD) for half in layer] for layer in halves]
    src = replace(dst, layers=tuple(CacheDesc.from_kv(*layer) for layer in copies))
    before = halves.clone()
    flip = demo_route._flip(src.at(), dst.at(), num_tokens)
    assert flip.is_found
    place = flip.found.difference
    assert place is not None
    assert place.token < num_tokens
    assert place.src_value != place.dst_value
    assert torch.equal(before, halves)
    assert not replace(flip, layer=1 - flip.layer).is_found
    assert not replace(flip, mended=flip.found).is_found
    assert not replace(flip, found=flip.mended).is_found


def test_each_engine_says_as_many_words() -> None:
    def words(text: str) -> dict[str, list[str]]:
        return {"input_ids": text.split()}

    total = len(ANSWER.split()) + 1  # the end of the text, too
    for count in range(2, 7):
        found = demo_route.shares(words, count)
        assert sum(found) == total
        assert max(found) - min(found) <= 2


@pytest.mark.parametrize("station", demo_route.STATIONS, ids=lambda station: station.title)
def test_the_line_that_installs_an_engine(station: demo_route.Station) -> None:
    """It names what these tests run."""
    for name, wanted in re.findall(r"(\S+)==(\S+)", station.install):
        assert version(name) == wanted
    for module in re.findall(r"-m ([\w.]+)", station.install):
        assert find_spec(module) is not None
    assert station.version


@pytest.mark.slow
@needs_engines
def test_a_flipped_bit_is_found() -> None:
    options = ("--corrupt", "--dtype", "bfloat16", "--seed", "5", "--json")
    result = python("-c", KVX, "demo", *options)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout)
    assert found["good"]
    assert found["corrupt"]
    assert "route" not in found
    assert [hop["to"] for hop in found["hops"]] == ["TensorRT-LLM *", "TGI *", "HF transformers"]
    assert all(hop["verified"] for hop in found["hops"])
    steps = {check["name"]: check for check in found["checks"]}
    assert steps["model"]["seconds"] > 0

    result.stdout = result.stderr  # where the lines are
    lines = told(result)
    assert " ".join(steps["mended"]["text"].split()) in " ".join(lines["mended"].split())
    flipped = re.search(
        r"bit \d+ of ([KV]), layer (\d+), (sequence \d+, token \d+, head \d+, dim \d+) of the",
        lines["corrupt"],
    )
    assert flipped is not None
    kv, layer, place = flipped.groups()
    assert f"differs at layer {layer} {kv}, {place}:" in lines["verify"]
    assert "the bit is flipped back: equal" in lines["mended"]


@needs_engines
@pytest.mark.slow
def test_a_wrong_description_fails_the_demo() -> None:
    """K read as if CPU_ATTN did not transpose it: verify cannot know, but the tokens tell.

    MLX is not here."""
    sabotage = """
import sys
sys.modules["mlx"] = None
from dataclasses import replace
from kvx_adapters.vllm.pages import PAGES
page = PAGES["CPU_ATTN"][29]
def not_transposed(cache, num_kv_heads, rows):
    k, v = page.split(cache, num_kv_heads, rows)
    return k.transpose(2, 3).flatten(2).unflatten(2, v.shape[2:]), v
PAGES["CPU_ATTN"][29] = replace(page, split=not_transposed)
"""
    result = python("-c", sabotage + KVX, "demo", "--json")
    assert result.returncode == 1, result.stdout + result.stderr
    found = json.loads(result.stdout)
    assert (found["good"], found["dtype"], found["seed"]) == (False, "float32", 0)
    route = found["route"]
    assert [engine["engine"] for engine in route["engines"]] == [t for t in TITLES if t != "MLX"]
    assert [left["engine"] for left in route["left_out"]] == ["MLX"]
    assert all(engine["verified"] for engine in route["engines"][1:])
    assert all(engine["flipped_bit_found"] for engine in route["engines"][1:])
    assert "".join(engine["says"] for engine in route["engines"]) == route["said"]
    assert f"{route['question']}{route['vllm_alone']}" == f"{QUESTION} {ANSWER}<eos>"
    assert route["said"] != route["vllm_alone"]
    assert not all(prompt["equal"] for prompt in found["prompts"])

    result.stdout = result.stderr  # where the lines are
    lines = told(result)
    assert [check["name"] for check in found["checks"] if not check["good"]] == [
        name for name, line in lines.items() if line.startswith("✗")
    ]
    assert lines["verify"].startswith("✓")
    assert re.match(r"✗ *[0-4] of 5 continuations equal", lines["tokens"])
    assert lines["arrived"].startswith("✓")
    assert lines["answer"].startswith("✗")
    assert [row[0] for row in rows_of(result, 9) if row[0]] == [t for t in TITLES if t != "MLX"]
    assert "MLX is left out: " in result.stdout
    assert "\n    pip install mlx==" in result.stdout


@needs_engines
@pytest.mark.slow
def test_example_vllm_to_transformers(tmp_path: Path) -> None:
    made = python(
        "-c",
        "import sys; from pathlib import Path; from kvx_adapters.cli.demo import make_model;"
        "make_model(Path(sys.argv[1]), 'float32', 0)",
        tmp_path,
    )
    assert made.returncode == 0, made.stderr
    result = python("examples/vllm_to_transformers.py", tmp_path, "Odd lengths leave the")
    assert result.returncode == 0, result.stderr
    assert re.search(r"^migrated \d+ bytes of 9 tokens; equal: 9 tokens", result.stdout, re.M)
    ours = re.search(r"^HF: +(.*)$", result.stdout, re.M)
    theirs = re.search(r"^vLLM: +(.*)$", result.stdout, re.M)
    assert ours is not None
    assert theirs is not None
    assert ours[1] == theirs[1]
    assert ours[1].startswith("' last block half filled")


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("vllm_to_transformers", [], "Give a model and a prompt: python examples/"),
        ("vllm_to_transformers", ["model"], "Give a model and a prompt: python examples/"),
        ("hf_prefill_vllm_decode", ["model"], "Give a model and a prompt, or nothing: "),
    ],
)
def test_examples_say_what_they_are_given(name: str, arguments: list[str], sentence: str) -> None:
    result = python(f"examples/{name}.py", *arguments)
    assert (result.returncode, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(sentence)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["doctor", "--dtype", "int8"], "'int8' is not one of 'auto', 'float32', 'bfloat16'"),
        (["doctor", "--stor", "x"], "No such option: --stor"),
        (["demo", "--dtyp", "float32"], "No such option: --dtyp"),
        (["demo", "--dtype", "int8"], "'int8' is not one of 'float32', 'bfloat16'"),
        (["demo", "--max-new-tokens", "1"], "Invalid value for '--max-new-tokens'"),
        (["demo", "--seed", "-1"], "Invalid value for '--seed'"),
        (["dema"], "No such command 'dema'"),
    ],
)
def test_wrong_flags(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert message in " ".join(re.sub("[│╭╮╰╯─]", " ", result.output).split())


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.startswith(f"kvx {kvx_core.__version__} (libkvx ")


def test_info() -> None:
    backend = kvx_core.backend_info()
    result = CliRunner().invoke(app, ["info"])
    assert result.exit_code == 0
    lines = [line.split(maxsplit=1) for line in result.output.splitlines()]
    assert ["threads", str(backend.num_threads)] in [[w.strip() for w in line] for line in lines]
    assert backend.cpu_isa in result.output


def test_a_missing_engine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_no_vllm(name: str) -> Any:
        return None if name == "vllm" else find_spec(name)

    monkeypatch.setattr(demo_packages, "find_spec", find_no_vllm)
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 1
    message = " ".join(result.output.split())
    assert "vllm is not installed" in message
    assert "`make demo` in a clone of KVX sets them up" in message
    result = CliRunner().invoke(app, ["demo", "--json"])
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert (found["good"], found["kvx"]) == (False, kvx_core.__version__)
    assert found["error"].startswith("vllm is not installed")


def test_adapters_import_no_engine() -> None:
    code = (
        "import sys, kvx_adapters.vllm, kvx_adapters.transformers, kvx_adapters.cli.demo;"
        f"print([name for name in {PACKAGES} if name in sys.modules])"
    )
    result = python("-c", code)
    assert result.stdout == "[]\n", result.stderr
