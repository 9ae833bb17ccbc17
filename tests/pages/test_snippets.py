"""Every code block of the README and of the pages is run or checked by a test that is named here.

A block that is added, or gets another language, fails this test until it has one.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

import kvx_core
from tests.cli.test_commands import PAGES
from tests.documents import blocks
from tests.native import ROOT

DRAWING = ""  # a drawing in letters, or a list: nothing to run
COMMANDS = "tests/cli/test_commands.py"
VLLM_COMMANDS = "tests/vllm_plugin/test_commands.py"
# Of each page, by language: how many blocks there are, and the tests that run them.
TESTS: dict[str, dict[str, tuple[int, tuple[str, ...]]]] = {
    "README.md": {
        "": (2, (COMMANDS, "tests/pages/test_first_screens.py")),
        "python": (1, ("tests/pages/test_readme.py",)),
    },
    "CONTRIBUTING.md": {"": (4, (COMMANDS,))},
    "benchmarks/README.md": {"": (4, (COMMANDS,))},
    "docs/architecture.md": {"": (2, (DRAWING,))},
    "docs/blocks.md": {
        "": (1, (DRAWING,)),
        "python": (5, ("tests/pages/test_blocks_doc.py",)),
        "c": (1, ("tests/pages/test_blocks_doc.py",)),
    },
    "docs/c.md": {
        "": (2, ("tests/test_c_package.py", COMMANDS)),
        "sh": (1, ("tests/test_c_package.py",)),
        "text": (2, ("tests/test_c_package.py",)),
        "cmake": (1, ("tests/pages/test_snippets.py",)),
    },
    "docs/conformance.md": {
        language: (
            count,
            tuple(
                f"tests/conformance/test_{kind}.py"
                for kind in ("engines", "stores", "connectors", "soak")
            ),
        )
        for language, count in {"python": 3, "bash": 5, "yaml": 2}.items()
    },
    "docs/deepseek_v4.md": {
        "": (1, (DRAWING,)),
        "python": (2, ("tests/pages/test_deepseek_v4_doc.py",)),
    },
    "docs/demo.md": {"text": (3, ("tests/pages/test_snippets.py",))},
    "docs/describe.md": {"python": (12, ("tests/pages/test_describe_doc.py",))},
    "docs/formats.md": {"python": (3, ("tests/pages/test_formats_doc.py",))},
    "docs/install.md": {"": (1, (COMMANDS,))},
    "docs/key_rotation.md": {
        "": (1, (COMMANDS,)),
        "bash": (2, ("tests/pages/test_how_to.py",)),
        "python": (1, ("tests/pages/test_how_to.py",)),
    },
    "docs/layouts.md": {"": (1, (DRAWING,))},
    "docs/live_migration.md": {
        "python": (2, ("tests/engines/test_live_engines.py", "tests/pages/test_examples.py")),
        "json": (1, (COMMANDS,)),
        "text": (
            3,
            ("tests/pages/test_examples.py", "tests/vllm_plugin/test_handover.py", DRAWING),
        ),
    },
    "docs/llama_cpp.md": {"python": (3, ("tests/adapters/test_llama_cpp_docs.py",))},
    "docs/merge_prefixes.md": {
        "": (2, (COMMANDS,)),
        "python": (3, ("tests/pages/test_how_to.py",)),
    },
    "docs/mlx.md": {"python": (1, ("tests/adapters/test_mlx.py",))},
    "docs/onnxruntime.md": {"python": (1, ("tests/adapters/test_onnxruntime.py",))},
    "docs/openvino.md": {"python": (1, ("tests/adapters/test_openvino.py",))},
    "docs/operations.md": {
        "": (1, ("tests/pages/test_snippets.py",)),
        "python": (1, ("tests/cli/test_store_settings.py",)),
        "yaml": (3, ("tests/cli/test_store_settings.py",)),
        "bash": (4, ("tests/cli/test_store_settings.py", "tests/cli/test_store_explain.py")),
        "text": (1, ("tests/cli/test_store_explain.py",)),
    },
    "docs/own_engine.md": {"text": (1, ("tests/pages/test_how_to.py",))},
    "docs/plans.md": {
        "": (1, ("tests/pages/test_plans_doc.py",)),
        "python": (4, ("tests/pages/test_plans_doc.py",)),
        "c": (1, ("tests/pages/test_plans_doc.py",)),
    },
    "docs/hybrid.md": {"python": (2, ("tests/adapters/test_transformers_states.py",))},
    "docs/sglang.md": {
        "python": (
            5,
            ("tests/adapters/test_sglang_host.py", "tests/adapters/test_sglang_states.py"),
        ),
    },
    "docs/snapshots.md": {"python": (2, ("tests/pages/test_snapshots_doc.py",))},
    "docs/store_format.md": {"": (3, ("tests/snapshot/store_reader.py",))},
    "docs/stores.md": {"python": (10, ("tests/pages/test_stores_doc.py",))},
    "docs/tensorrt_llm.md": {
        "": (1, (COMMANDS,)),
        "sh": (3, (COMMANDS,)),  # they need a GPU and NVIDIA's container
        "python": (1, ("tests/tensorrt_llm_plugin/test_engines.py",)),
    },
    "docs/tgi.md": {
        "python": (4, ("tests/adapters/test_tgi_docs.py",)),
        "text": (1, ("tests/adapters/test_tgi_docs.py",)),
    },
    "docs/tiers.md": {
        "json": (1, ("tests/tiers/test_levels.py",)),
        "python": (1, ("tests/tiers/test_levels.py",)),
        "sh": (1, (COMMANDS,)),
    },
    "docs/transformers.md": {"python": (10, ("tests/adapters/test_transformers_docs.py",))},
    "docs/vllm.md": {
        "": (5, (COMMANDS,)),
        "text": (7, (COMMANDS, VLLM_COMMANDS, "tests/pages/test_vllm_docs.py")),
        "sh": (2, (VLLM_COMMANDS,)),
        "python": (1, (VLLM_COMMANDS,)),
    },
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_block_has_a_test(page: Path) -> None:
    name = str(page.relative_to(ROOT))
    tests = TESTS.get(name, {})
    assert Counter(block.language for block in blocks(page)) == {
        language: count for language, (count, _) in tests.items()
    }
    named = {file for _, files in tests.values() for file in files} - {DRAWING}
    for file in named - {COMMANDS, "tests/pages/test_snippets.py"}:  # these are about all pages
        assert page.stem in (ROOT / file).read_text(), (name, file)


def test_the_demos_page() -> None:
    """Each line that begins with a tick has a name that the demo gives to a step."""
    shown = "".join(b.text for b in blocks(ROOT / "docs/demo.md"))
    names = re.findall(r"^✓ (\w+) ", shown, re.M)
    assert len(names) > 15
    sources = "".join(path.read_text() for path in (ROOT / "kvx_adapters/cli").glob("demo*.py"))
    assert [name for name in names if f'"{name}"' not in sources] == []


def test_the_cmake_lines_are_those_of_the_example() -> None:
    (block,) = (block for block in blocks(ROOT / "docs/c.md") if block.language == "cmake")
    example = (ROOT / "examples/c/CMakeLists.txt").read_text()
    found, link = block.text.splitlines()
    assert found in example
    assert link.replace("your_program", "move_tokens") in example


def test_the_options_of_cmake_exist() -> None:
    known = (ROOT / "CMakeLists.txt").read_text()
    for page in ("docs/c.md", "CONTRIBUTING.md", "tests/sass/README.md"):
        for option in re.findall(r"-D(KVX_\w+)=", (ROOT / page).read_text()):
            assert option in known, (page, option)


def test_the_line_of_a_start() -> None:
    """As kvx_core.connector.settings makes it: docs/operations.md."""
    (block,) = (b for b in blocks(ROOT / "docs/operations.md") if not b.language)
    assert re.fullmatch(
        r"KVX keeps prefixes in /srv/kvx: model [0-9a-f]{12}, chunks of 128 tokens, "
        r"at most [0-9.]+ GB, free there: [0-9.]+ GB\n",
        block.text,
    )
    assert kvx_core.__version__ in (ROOT / "docs/vllm.md").read_text()
