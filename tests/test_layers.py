"""Who may include and import whom, and how long a file may be: docs/architecture.md, "The tree".

Data flows down: descriptors are checked by rules, planned, and moved by a backend. An include or an
import that runs up would use what the step above has removed, such as layout names.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
CSRC = ROOT / "csrc"
CPP = (".h", ".cc", ".inl", ".cu", ".cuh")
PACKAGES = ("kvx_core", "kvx_adapters", "kvx_conformance")
PYTHON = (*PACKAGES, "benchmarks", "tests", "examples", "docs")

# A room of csrc (a folder, or a file and its header), and the rooms that it may include beside its
# own. `kvx` is csrc/include/kvx, the headers that callers see; every room may include it.
ROOMS = {
    "kvx": set(),
    "hd": set(),
    "error": set(),
    "extent": set(),
    "formats": {"hd"},
    "desc": {"formats", "hd", "error", "extent"},
    "rules": {"desc", "formats", "error", "extent"},
    "plan": {"desc", "formats", "hd", "error", "extent"},
    "cpu": {"plan", "desc", "formats", "hd", "error"},
    "cuda": {"plan", "desc", "formats", "hd", "error", "extent"},
    "encodings": {"cpu", "formats", "error", "extent"},
    "hybrid": {"cpu", "cuda", "formats", "hd", "error"},
    "backend": {"cpu", "cuda", "hybrid", "plan", "desc", "formats", "error"},
    "abi": {"rules", "plan", "backend", "encodings", "hybrid", "desc", "formats", "error"},
    "python": set(),  # a library of its own, on the headers that callers see
}

# Packages of the engines, as Python imports them.
ENGINES = {
    "vllm": {"vllm"},
    "tensorrt_llm": {"tensorrt_llm", "transformers"},  # reads a model's config with it
    "transformers": {"transformers"},
    "tgi": {"text_generation_server"},
    "sglang": {"sglang", "sgl_kernel"},
    "mlx": {"mlx", "mlx_lm"},
    "llama_cpp": {"llama_cpp"},
    "kvbm": {"kvbm", "dynamo"},
}

# A room of kvx_core (a folder, or a file of its root; see WITHIN), and the rooms that it may import
# beside its own: those below it. `kvx_core` itself shows names of all.
CORE = {
    "errors": set(),
    "abi": {"errors"},
    "formats": {"abi", "errors"},
    "argument_checks": {"errors"},
    "needs_torch": {"errors"},
    "types": {"formats", "argument_checks", "errors"},
    "_c": {"types", "abi", "argument_checks", "errors"},
    "desc": {"_c", "abi", "types", "formats", "argument_checks", "errors"},
    "ops": {"desc", "_c", "abi", "types", "formats", "argument_checks", "errors"},
    "model": {"desc", "_c", "argument_checks", "errors"},
    "encodings": {"desc", "_c", "abi", "types", "argument_checks", "errors"},
    "blocks": {"ops", "desc", "_c", "abi", "types", "argument_checks", "errors"},
    "hybrid": {"ops", "desc", "_c", "abi", "types", "argument_checks", "errors"},
    "caches": {"ops", "desc", "_c", "abi", "types", "formats", "argument_checks", "errors"},
    "snapshot": {"ops", "desc", "_c", "abi", "types", "formats", "argument_checks", "errors"},
    "stores": {"snapshot", "model", "desc", "_c", "types", "argument_checks", "errors"},
    "tiers": {"stores", "_c", "argument_checks", "errors"},
    "connector": {"tiers", "stores", "snapshot", "model", "errors"},
}
# Rooms inside of another one.
WITHIN = {"abi": "kvx_core._c.abi", "tiers": "kvx_core.stores.tiers"}
MOST_FILES = 25  # of a room; one that grows past it is two rooms
GROWN = {"snapshot", "stores"}  # that have more, and get no new ones

# Besides kvx_core._c.
IMPORT_CTYPES = {"kvx_core.stores.beneath"}


def cpp_files() -> Iterator[Path]:
    return (path for path in sorted(CSRC.rglob("*")) if path.suffix in CPP)


def python_files() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


# --- csrc -------------------------------------------------------------------------------------


def room_of(path: str) -> str:
    """`plan` of plan/plan.h, `error` of error.h, `kvx` of include/kvx/kvx_abi.h."""
    first, *rest = path.removeprefix("include/").split("/")
    return first if rest else Path(first).stem


def includes(path: Path) -> list[str]:
    """What a file includes, from csrc on; the angle brackets are for what is not ours."""
    found = re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.MULTILINE)
    beside = path.parent.relative_to(CSRC)
    return [(beside / name).as_posix() if (path.parent / name).exists() else name for name in found]


def test_no_include_runs_up() -> None:
    wrong, seen = [], set()
    for path in cpp_files():
        name = path.relative_to(CSRC).as_posix()
        room = room_of(name)
        for included in includes(path):
            if included == "hostgrid.h":  # tests/hostgrid stands in for the CUDA runtime
                continue
            other = room_of(included)
            seen.add((room, other))
            if other not in ROOMS[room] | {room, "kvx"}:
                wrong.append(f"{name} includes {included}")
    assert not wrong
    assert {("abi", "rules"), ("backend", "cuda"), ("desc", "formats")} <= seen


def test_no_include_runs_in_a_circle() -> None:
    files = {
        path.relative_to(CSRC).as_posix().removeprefix("include/"): path for path in cpp_files()
    }
    done: set[str] = set()

    def follow(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, f"{' -> '.join(above)} -> {name}"
        if name in done or name not in files:
            return
        for included in includes(files[name]):
            follow(included, (*above, name))
        done.add(name)

    for name in files:
        follow(name, ())
    assert len(done) == len(files)


# --- Python -----------------------------------------------------------------------------------


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> set[str]:
    """Modules that a file imports, inside functions and for type checkers too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: {ast.unparse(node)}: imports are absolute"
            # `from a import b`: b may be a module of a.
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


def is_within(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


IMPORTS = [(module_of(path), sorted(imports(path))) for path in python_files()]


def test_kvx_core_knows_no_engine() -> None:
    engines = set().union(*ENGINES.values()) | {"kvx_adapters"}
    wrong = [
        (module, name)
        for module, names in IMPORTS
        for name in names
        if is_within(module, "kvx_core") and name.split(".")[0] in engines
    ]
    assert not wrong
    assert sum(is_within(module, "kvx_core") for module, _ in IMPORTS) > 30, "nothing was read"


def core_room(module: str) -> str:
    """`desc` of kvx_core.desc.view, `types` of kvx_core.types, "" of kvx_core itself."""
    for room, package in WITHIN.items():
        if is_within(module, package):
            return room
    return f"{module}.".split(".")[1]


def test_no_import_of_kvx_core_runs_up() -> None:
    wrong, seen = [], set()
    for module, names in IMPORTS:
        if not is_within(module, "kvx_core") or module == "kvx_core":
            continue
        room = core_room(module)
        for name in names:
            if is_within(name, "kvx_core") and (other := core_room(name)) != room:
                seen.add((room, other))
                if other not in CORE[room]:
                    wrong.append((module, name))
    assert not wrong
    assert seen == {(room, other) for room, others in CORE.items() for other in others}


def test_ctypes_stays_below() -> None:
    users = {
        module
        for module, names in IMPORTS
        if is_within(module, "kvx_core") and any(is_within(name, "ctypes") for name in names)
    }
    assert {user for user in users if core_room(user) not in ("_c", "abi")} == IMPORT_CTYPES
    assert "kvx_core._c.abi" in users


def test_rooms_are_small() -> None:
    rooms = Counter(core_room(module) for module, _ in IMPORTS if is_within(module, "kvx_core"))
    assert {room for room, count in rooms.items() if count > MOST_FILES} == GROWN


def test_no_import_runs_in_a_circle() -> None:
    """Not for type checkers either, and not inside functions."""
    files = {module_of(path): path for top in PYTHON for path in (ROOT / top).rglob("*.py")}
    names = {module: imports(path) for module, path in files.items()}
    modules = {
        module: {name if name in files else name.rpartition(".")[0] for name in found} & set(files)
        for module, found in names.items()
    }
    order = TopologicalSorter({m: others - {m} for m, others in modules.items()})
    order.prepare()  # raises CycleError, which names the modules
    assert len(modules) > 700, "little was read"


def may_import(module: str, name: str) -> bool:
    """Whether a module of kvx_adapters may import another, or an engine."""
    room = module.split(".")[1] if "." in module else ""
    if room == "cli":
        return True
    engine = room.removesuffix("_plugin")
    top, *rest = name.split(".")
    if top == "kvx_adapters":
        return bool(rest) and rest[0] in {room, engine}
    if any(top in packages for packages in ENGINES.values()):
        return room.endswith("_plugin") and top in ENGINES[engine]
    return True


def test_adapters_know_one_engine_and_import_none() -> None:
    wrong = [
        (module, name)
        for module, names in IMPORTS
        for name in names
        if is_within(module, "kvx_adapters") and not may_import(module, name)
    ]
    assert not wrong
    assert may_import("kvx_adapters.vllm_plugin.worker", "vllm.config")
    assert not may_import("kvx_adapters.vllm.describe", "vllm.config")
    assert not may_import("kvx_adapters.vllm.describe", "kvx_adapters.tgi.cache_desc")
    assert not may_import("kvx_adapters.vllm.describe", "kvx_adapters.vllm_plugin.worker")
    assert not may_import("kvx_adapters.vllm_plugin.worker", "kvx_adapters.tensorrt_llm.facts")


def test_no_package_imports_one_above_it() -> None:
    order = ["kvx_core", "kvx_adapters", "kvx_conformance", "tests", "benchmarks", "examples"]
    wrong = [
        (module, name)
        for module, names in IMPORTS
        for name in names
        if name.split(".")[0] in order[order.index(module.split(".")[0]) + 1 :]
    ]
    assert not wrong
    assert any(is_within(module, "kvx_conformance") for module, _ in IMPORTS)


# --- how long a file may be -------------------------------------------------------------------


def test_no_file_is_longer_than_500_lines() -> None:
    lines = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines())
        for path in (*cpp_files(), *python_files())
    }
    assert not {name: count for name, count in lines.items() if count > 500}
    assert len(lines) > 100, "nothing was read"
