"""docs/formats.md: its snippets print what it says; its table and plot are those of the data."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks import format_error
from kvx_core import DType
from tests.documents import Document

PAGE = Document("formats.md")
FOUND = json.loads(format_error.RESULTS.read_text())
AGAIN = "run python -m benchmarks.format_error, and commit what it writes"


def test_the_snippets(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    PAGE.run({"__name__": "snippet"})
    assert capsys.readouterr().out.splitlines() == PAGE.prints()


def test_every_format_of_the_table_is_measured() -> None:
    expected = [
        (format_error.name_of(found), format_error.unit_of(found))
        for found in format_error.formats()
    ]
    assert [(row["format"], row["unit"]) for row in FOUND] == expected, AGAIN


def test_table_and_plot_are_those_of_the_data(tmp_path: Path) -> None:
    assert f"<!-- table -->\n{format_error.table(FOUND)}<!-- end" in PAGE.text, AGAIN
    plot = format_error.PLOT.read_text()
    for row in FOUND:
        marked = re.search(rf">[^<]*\b{row['format']}\b[^<]*</text>", plot) is not None
        assert marked is format_error.is_drawn(row), AGAIN
    format_error.draw(FOUND, tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_text() == plot, AGAIN
    assert f"]({format_error.PLOT.name})" in PAGE.text


def rows(seed: int) -> torch.Tensor:
    return torch.randn(64, 2, 128, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("format", format_error.formats(), ids=format_error.name_of)
def test_the_figures_can_be_measured_again(format: DType | str) -> None:
    """On other Gaussian rows: within a fifth."""
    (row,) = (row for row in FOUND if row["format"] == format_error.name_of(format))
    committed = row["rows"]["gaussian"]
    values = torch.cat([rows(seed) for seed in range(16)])
    found = format_error.measured(values, format_error.stored(values, format))
    assert found["bits"] == pytest.approx(committed["bits"], rel=0.01)
    for name in ("relative_mse", "inner_product"):
        assert found[name] == pytest.approx(committed[name], rel=0.2)


def test_exact_formats_are_those_that_hold_every_bfloat16() -> None:
    """Of Gaussian numbers: F16 does not hold the smallest of them."""
    exact = {row["format"] for row in FOUND if not row["rows"]["keys"]["relative_mse"]}
    assert {"BF16", "F32", "lossless_bf16"} <= exact <= {"BF16", "F32", "F16", "lossless_bf16"}


def test_measuring_is_right_on_numbers_that_are_known() -> None:
    """A row is one number and zeros: Q8_0 keeps it; half of the rows are lost on purpose."""
    values = torch.zeros(8, 1, 32).bfloat16()
    values[:, 0, 3] = 127
    kept = format_error.stored(values, DType.Q8_0)
    assert kept.num_bytes == 8 * 34
    assert format_error.measured(values, kept) == {
        "bits": 8.5,
        "relative_mse": 0.0,
        "inner_product": 0.0,
    }
    lost = format_error.Stored(kept.decoded * torch.tensor([1.0, 0.0] * 4).view(8, 1, 1), 8 * 34)
    found = format_error.measured(values, lost)
    assert found["relative_mse"] == 0.5
    assert found["inner_product"] == pytest.approx(0.5**0.5)
