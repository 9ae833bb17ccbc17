"""Runs the suite with a libkvx built with AddressSanitizer and UBSan; its threads under TSan."""

from __future__ import annotations

import re
import sys

import pytest

from tests.native import CXX, run, sanitized_library, sanitized_program

# What moves bytes and what is refused, by a libkvx without kernels. Random calls: tests/c/fuzz.
SUITE = [
    f"tests/test_{name}.py"
    for name in (
        *("conformance", "validation", "write_gather", "migrate"),
        *("pointers", "planes_apart", "plans_public"),
    )
]
# Every kind of test, and each layout with two others where all of them meet: 676 pairs.
SOME = (
    "not hostgrid and (not every_pair_of_layouts or custom or tgi-packed16)"
    " and (conformance or validation or odd or custom or (every_pair_of_ends and packed))"
)


@pytest.mark.slow
@pytest.mark.of_csrc
def test_suite_with_address_sanitizer() -> None:
    """PyTorch and numpy allocate through the sanitizer's malloc: their buffers have red zones."""
    library = sanitized_library("ON")
    preload = [
        run([CXX, f"-print-file-name={name}.so"]).strip() for name in ("libasan", "libubsan")
    ]
    output = run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-k",
            SOME,
            *SUITE,
        ],
        env={
            "KVX_LIBRARY": str(library),
            "LD_PRELOAD": " ".join(preload),
            "ASAN_OPTIONS": "detect_leaks=0",  # Python's own are many
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "PYTHONMALLOC": "malloc",
        },
    )
    assert int(re.findall(r"(\d+) passed", output)[-1]) > 100


@pytest.mark.slow
@pytest.mark.of_csrc
def test_threads_with_thread_sanitizer() -> None:
    output = run([sanitized_program("fuzz/fuzz.cc", "THREAD"), "threads", "8"], timeout=300)
    assert int(re.findall(r"(\d+) calls from 4 threads", output)[0]) > 20


@pytest.mark.parametrize(
    ("sanitize", "lie", "report"),
    [
        ("ON", "overflow", "heap-buffer-overflow"),
        ("THREAD", "race", "data race"),
    ],
)
@pytest.mark.slow
@pytest.mark.of_csrc
def test_sanitizers_report(sanitize: str, lie: str, report: str) -> None:
    """What the tests above would see if there were something to see."""
    program = sanitized_program("lie.cc", sanitize)
    with pytest.raises(AssertionError, match=rf"(?s){report}.*csrc/"):
        run([program, lie])
