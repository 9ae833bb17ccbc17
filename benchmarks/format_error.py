"""`python -m benchmarks.format_error`: bytes and errors of every number format of the table.

Rows are encoded and decoded by `migrate`. Writes benchmarks/results/format_error.json, draws
docs/format_error.svg from it and rewrites the table of docs/formats.md. The figures do not depend
on the machine; the rows of the trained model may differ in their last bits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks import chart
from kvx_core import CacheDesc, CacheFacts, CacheView, DType, ScaleDesc, describe, migrate
from kvx_core.encodings import turboquant
from kvx_core.snapshot.coding import CODINGS

_ROOT = Path(__file__).resolve().parent.parent
RESULTS = _ROOT / "benchmarks" / "results" / "format_error.json"
PAGE = _ROOT / "docs" / "formats.md"
PLOT = _ROOT / "docs" / "format_error.svg"

_TOKENS, _HEADS, _DIM = 1024, 4, 128  # of rows that are drawn
_QUERIES = 64
_LEAST = 1e-12  # error that is drawn
# Formats whose scales lie beside them, one for a group of numbers: the group, the scales' dtype.
_GROUPS = {"F4_E2M1": (16, torch.float8_e4m3fn)}  # as NVFP4 has them
_COLOURS = {
    "gaussian": chart.BLUE,
    "outliers": chart.ORANGE,
    "keys": chart.GREEN,
    "values": chart.RED,
}

# What each format is for. Formats that are not here have an empty cell.
_USED_BY = {
    "F16": "most engines",
    "BF16": "most engines",
    "F32": "engines on CPU",
    "F8_E4M3": "vLLM, TensorRT-LLM, SGLang: `fp8`",
    "F8_E5M2": "vLLM, SGLang: `fp8_e5m2`",
    "F8_E4M3FNUZ": "ROCm on gfx94x",
    "S8": "TensorRT-LLM: INT8; vLLM: `int8_per_token_head`",
    "Q8_0": "llama.cpp: `-ctk q8_0`",
    "Q4_0": "llama.cpp: `-ctk q4_0`",
    "Q4_1": "llama.cpp: `-ctk q4_1`",
    "IQ4_NL": "llama.cpp: `-ctk iq4_nl`",
    "Q5_0": "llama.cpp: `-ctk q5_0`",
    "Q5_1": "llama.cpp: `-ctk q5_1`",
    "Q4_K": "GGUF files: rows of 256 numbers",
    "Q5_K": "GGUF files: rows of 256 numbers",
    "Q6_K": "GGUF files: rows of 256 numbers",
    "MXFP4": "OCP microscaling",
    "F4_E2M1": "NVFP4 of vLLM, on Blackwell",
    "TQ2": "stores and snapshots of KVX",
    "TQ3": "stores and snapshots of KVX",
    "TQ4": "stores and snapshots of KVX",
    "lossless_bf16": "stores and snapshots of KVX",
    "turboquant_2bit": "`kvx_core.encodings.turboquant`",
    "turboquant_3bit": "`kvx_core.encodings.turboquant`; vLLM's presets",
    "turboquant_4bit": "`kvx_core.encodings.turboquant`; vLLM's presets",
    "U8_ZERO": "OpenVINO: `u8`",
    "U8_BIAS": "MLX: 8-bit cache",
}


class Stored(NamedTuple):
    """What a format makes of rows."""

    decoded: Tensor  # as the rows, float32
    num_bytes: int  # with scales and zero points


class Encoding(NamedTuple):
    """A way to keep numbers that is no format of tensors."""

    unit: str  # in words
    stored: Callable[[Tensor], Stored]


def _coded(name: str, values: Tensor) -> Stored:
    data = values.contiguous().view(torch.uint8).numpy().reshape(-1)
    encoded, again = CODINGS[name].encode(data), np.empty_like(data)
    assert CODINGS[name].decode(again, encoded)
    decoded = torch.from_numpy(again).view(values.dtype).view(values.shape)
    return Stored(decoded.float(), len(encoded))


def _turboquant(bits: int, values: Tensor) -> Stored:
    units = turboquant.encode(values.contiguous(), bits)
    return Stored(turboquant.decode(units, values.shape[-1], bits), units.nbytes)


_ENCODINGS = {name: Encoding("varies", partial(_coded, name)) for name in CODINGS} | {
    f"turboquant_{bits}bit": Encoding("a head", partial(_turboquant, bits)) for bits in (2, 3, 4)
}


def formats() -> list[DType | str]:
    """The formats of the table whose elements are numbers that K and V can be, then encodings."""
    numbers = [d for d in DType if d.format.rounding or d.numbers > 1 or d.format.affine]
    return [*numbers, *_ENCODINGS]


def name_of(format: DType | str) -> str:
    """The name of a format in results."""
    return format if isinstance(format, str) else format.name


def unit_of(format: DType | str) -> str:
    """The unit of a format in words."""
    if isinstance(format, str):
        return _ENCODINGS[format].unit
    if format.name in _GROUPS:
        group, scale = _GROUPS[format.name]
        return f"{group} in {group // format.numbers * format.itemsize + scale.itemsize} B"
    return "1" if format.numbers == 1 else f"{format.numbers} in {format.itemsize} B"


def rows() -> dict[str, Tensor]:
    """Rows by name, (tokens, heads, dim) bfloat16, the same in every run."""
    from tests.trained import trained

    generator = torch.Generator().manual_seed(0)
    gaussian = torch.randn(_TOKENS, _HEADS, _DIM, generator=generator)
    # A few channels of K are an order of magnitude larger than the rest.
    # Source: KIVI (arXiv 2402.02750), section 3
    large = torch.ones(_HEADS, _DIM)
    for head in range(_HEADS):
        large[head, torch.randperm(_DIM, generator=generator)[:4]] = 12
    model = trained()
    return {
        "gaussian": gaussian.bfloat16(),
        "outliers": (gaussian * large).bfloat16(),
        "keys": torch.cat([k.transpose(0, 1) for k in model.keys]),
        "values": torch.cat([v.transpose(0, 1) for v in model.values]),
    }


def stored(values: Tensor, dtype: DType | str) -> Stored:
    """Encodes and decodes rows.

    values: (tokens, heads, dim) bfloat16. Where dim is no multiple of a unit, units run on over
            heads and tokens; numbers behind the last whole unit are left out
    FP8, S8 and formats with zero points have a scale for each token and head, F4_E2M1 for each
    group.
    """
    if isinstance(dtype, str):
        return _ENCODINGS[dtype].stored(values)
    if values.shape[2] % dtype.numbers:
        flat = values.reshape(-1)
        values = flat[: len(flat) // dtype.numbers * dtype.numbers].view(-1, 1, dtype.numbers)
    tokens, heads, dim = values.shape
    raw = torch.zeros(1, tokens, heads, dim // dtype.numbers * dtype.itemsize, dtype=torch.uint8)
    if dtype.format.rounding:
        raw = raw.view(getattr(torch, dtype.array_name))
    beside: dict[str, Any] = {}
    num_bytes = raw.nbytes
    if dtype.name in _GROUPS:
        group, of = _GROUPS[dtype.name]
        scale = torch.zeros(1, tokens, heads, dim // group, dtype=of)
        num_bytes += scale.nbytes
        beside["k_scales"] = (ScaleDesc.of(scale, "PER_GROUP"),)
    elif dtype.format.scaled or dtype.format.affine:
        for kind in ("k_scales", "k_zeros")[: 1 + dtype.format.affine]:
            scale = torch.ones(1, tokens, heads)
            num_bytes += scale.nbytes
            beside[kind] = (ScaleDesc.of(scale, "PER_TOKEN_HEAD"),)
    cache = _view(raw, dtype, **beside)
    migrate(_view(values[None].clone()), cache, [tokens], find_scales=dtype.format.scaled)
    decoded = torch.zeros(1, tokens, heads, dim)
    migrate(cache, _view(decoded), [tokens])
    return Stored(decoded[0], num_bytes)


def measured(values: Tensor, found: Stored) -> dict[str, float]:
    """Bits per number, and the errors of decoded rows against the rows.

    relative_mse: sum of squared errors by the sum of squares
    inner_product: root mean square of the errors of inner products with other rows of the same
                   head, by that of the inner products
    """
    exact = values.reshape(-1)[: found.decoded.numel()].view(found.decoded.shape).double()
    error = found.decoded.double() - exact
    if found.decoded.shape != values.shape:  # back to rows
        whole = found.decoded.numel() // values[0].numel()
        exact, error = (t.reshape(-1)[: whole * values[0].numel()] for t in (exact, error))
        exact, error = (t.view(whole, *values.shape[1:]) for t in (exact, error))
    generator = torch.Generator().manual_seed(1)
    queries = exact[torch.randperm(len(exact), generator=generator)[:_QUERIES]]
    products = torch.einsum("qhd,thd->qth", queries, exact).square().mean()
    errors = torch.einsum("qhd,thd->qth", queries, error).square().mean()
    return {
        "bits": 8 * found.num_bytes / found.decoded.numel(),
        "relative_mse": float(error.square().sum() / exact.square().sum()),
        "inner_product": float((errors / products).sqrt()),
    }


def results() -> list[dict[str, Any]]:
    """All formats on all rows."""
    chosen = rows()
    return [
        {
            "format": name_of(format),
            "unit": unit_of(format),
            "rows": {
                name: measured(values, stored(values, format)) for name, values in chosen.items()
            },
        }
        for format in formats()
    ]


def table(found: list[dict[str, Any]]) -> str:
    """The table of the page."""
    head = "| format | unit | bits | used by | Gaussian | outliers | keys | values | q.k of keys |"
    lines = [head, "| --- | --- | --: | --- " + "| --: " * 5 + "|"]
    for row in found:
        of = row["rows"]
        errors = [_error(of[name]["relative_mse"]) for name in _COLOURS]
        errors.append(_error(of["keys"]["inner_product"]))
        cells = [
            f"`{row['format'].lower()}`",
            row["unit"],
            " to ".join(f"{bits:.4g}" for bits in _bits(row)),
            _USED_BY.get(row["format"], ""),
            *errors,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _bits(row: dict[str, Any]) -> list[float]:
    """Bits per number on Gaussian rows; the least and the most if they depend on the numbers."""
    found = [row["rows"][name]["bits"] for name in _COLOURS]
    return [min(found), max(found)] if row["unit"] == "varies" else found[:1]


def is_drawn(row: dict[str, Any]) -> bool:
    """Whether a format rounds Gaussian numbers so much that the plot has room for it."""
    return bool(row["rows"]["gaussian"]["relative_mse"] > _LEAST)


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Draws size against error."""
    lossy = [row for row in found if is_drawn(row)]
    bits = [row["rows"]["gaussian"]["bits"] for row in lossy]
    bound = [(x, 4.0**-x) for x in (min(bits), max(bits))]
    panels = [
        chart.Panel(
            title,
            [
                chart.Point(row["rows"][name]["bits"], row["rows"][name][key], colour)
                for name, colour in _COLOURS.items()
                for row in lossy
            ],
            _labels(lossy, key),
            line,
        )
        for key, title, line in (
            ("relative_mse", "relative mean squared error", bound),
            ("inner_product", "error of inner products, relative", ()),
        )
    ]
    note = "benchmarks/results/format_error.json; dashed: the least for Gaussian numbers"
    x_title = "bits per number, scales included"
    title = "Size against error of number formats; names are at the Gaussian points"
    chart.points(path, title, note, panels, legend=_COLOURS, x_title=x_title)


def _labels(found: list[dict[str, Any]], key: str) -> list[tuple[str, float, float]]:
    """Texts beside the points of Gaussian rows; one for points that lie so close that texts would
    lie over each other.
    """
    points = sorted(
        (
            (row["rows"]["gaussian"]["bits"], row["rows"]["gaussian"][key], row["format"])
            for row in found
        ),
        key=lambda point: (round(point[0] * 2), point[1]),
    )
    labels: list[tuple[str, float, float]] = []
    for x, y, name in points:
        if labels and abs(labels[-1][1] - x) < 0.3 and 0.8 < y / labels[-1][2] < 1.25:
            text, x_, y_ = labels.pop()
            labels.append((f"{text}, {name}", x_, y_))
        else:
            labels.append((name, x, y))
    return labels


def write_page(found: list[dict[str, Any]]) -> None:
    """Rewrites the table of the page."""
    begin, end = "<!-- table -->\n", "<!-- end of table -->"
    text = PAGE.read_text()
    PAGE.write_text(
        re.sub(f"{begin}.*{end}", lambda _: f"{begin}{table(found)}{end}", text, flags=re.S)
    )


def main() -> None:
    torch.set_num_threads(1)  # the model is so small that more threads only wait for each other
    found = results()
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    draw(found, PLOT)
    write_page(found)
    print(table(found))


def _view(tensor: Tensor, dtype: DType | None = None, **beside: Any) -> CacheView:
    """K of one sequence."""
    k = describe(tensor, "BLOCK_NHD", **({} if dtype is None else {"dtype": dtype}))
    facts = CacheFacts(fingerprint="rows", rotary="none", rotary_dim=0, rope_applied=False)
    return CacheView((CacheDesc.from_kv(k),), facts, dense=True, **beside)


def _error(error: float) -> str:
    return "exact" if error == 0 else f"{error:.1e}"


if __name__ == "__main__":
    main()
