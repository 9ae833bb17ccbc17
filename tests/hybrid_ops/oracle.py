"""What the calls of a hybrid cache compute, in torch, slow and obvious. Spec: E.22"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX, NVFP4_GROUP, MXFP4_GROUP = 448.0, 16, 32


def e4m3_value(x: Tensor) -> Tensor:
    """The nearest E4M3 number, ties to even; past 448 it is 448."""
    size = x.double().abs().clamp(max=E4M3_MAX)
    exponent = torch.floor(torch.log2(size.clamp(min=1e-300))).clamp(-6, 8)
    step = torch.exp2(exponent - 3)
    return torch.copysign((torch.round(size / step) * step).clamp(max=E4M3_MAX), x.double()).float()


def e4m3_decode(codes: Tensor) -> Tensor:
    """Codes 0 to 255; 0x7f and 0xff are NaN."""
    code = codes.to(torch.int64)
    exponent, mantissa = (code >> 3) & 15, (code & 7).double()
    normal = torch.exp2(exponent.double() - 7) * (1 + mantissa / 8)
    value = torch.where(exponent == 0, mantissa * 2.0**-9, normal)
    value = torch.where(code & 127 == 127, torch.nan, value)
    return torch.where(code >> 7 == 1, -value, value).float()


def row_inverse_scale(x: Tensor) -> Tensor:
    """The largest magnitude of each row / 448, or 1 if that is 0."""
    inverse = x.float().abs().amax(-1) / E4M3_MAX
    return torch.where(inverse > 0, inverse, torch.ones_like(inverse))


def quantized(row: Tensor, nope: int) -> tuple[Tensor, Tensor, Tensor]:
    """The E4M3 values and the bfloat16 numbers of rows, and their inverse scales."""
    inverse = row_inverse_scale(row[..., :nope])
    values = e4m3_value(row[..., :nope].float() / inverse[..., None])
    return values, row[..., nope:].to(torch.bfloat16), inverse


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def e2m1_code(x: Tensor) -> Tensor:
    """The nearest of eight magnitudes, ties to even codes, and the sign in bit 3."""
    size = x.abs().clamp(max=6.0)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    nearest = torch.round(size / step) * step
    code = (nearest[..., None] == E2M1).to(torch.uint8).argmax(-1).to(torch.uint8)
    return code | torch.signbit(x).to(torch.uint8) << 3


def e2m1_code_by_thresholds(x: Tensor) -> Tensor:
    """How many of seven numbers the magnitude is past, so that a tie goes down; 0 has no sign.

    Source: sglang 0.5.23 kernels/ops/quantization/fp4_indexer_quant.py, _fp4_e2m1_code
    """
    past = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    code = (x.abs()[..., None] > past).sum(-1).to(torch.uint8)
    return code | ((x < 0) & (code > 0)).to(torch.uint8) << 3


def in_halves(codes: Tensor) -> Tensor:
    """Bytes of two codes, the even one in the low half."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


_CODES = {"nearest_even": e2m1_code, "thresholds": e2m1_code_by_thresholds}


def nvfp4(key: Tensor, rounding: str = "nearest_even") -> tuple[Tensor, Tensor]:
    """Bytes of codes, and bytes of E4M3 scales of 16 numbers."""
    groups = key.float().unflatten(-1, (-1, NVFP4_GROUP))
    sixth = groups.abs().amax(-1) * torch.tensor(1 / 6, dtype=torch.float32)
    scale = sixth.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    inverse = torch.where(scale.float() > 0, 1 / scale.float(), 0.0)
    codes = _CODES[rounding](groups * inverse[..., None])
    return in_halves(codes.flatten(-2)), scale.view(torch.uint8)


def mxfp4(key: Tensor, rounding: str = "nearest_even") -> tuple[Tensor, Tensor]:
    """Bytes of codes, and bytes of E8M0 scales of 32 numbers.

    Source: for thresholds sglang 0.5.23, the same file, quantize_fp4_indexer_row
    """
    groups = key.float().unflatten(-1, (-1, MXFP4_GROUP))
    sixth = groups.abs().amax(-1) * torch.tensor(1 / 6, dtype=torch.float32)
    least = 1e-4 if rounding == "thresholds" else 2.0**-126
    fraction, exponent = torch.frexp(sixth.clamp(min=least))
    exponent = torch.where(fraction > 0.5, exponent, exponent - 1)
    codes = _CODES[rounding](groups * torch.exp2(-exponent.float())[..., None])
    return in_halves(codes.flatten(-2)), (exponent + 127).to(torch.uint8)


def fp8_key(key: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 codes and a float32 scale of each key, the power of two at or above amax / 448."""
    scale = key.float().abs().amax(-1).clamp(min=1e-4) / E4M3_MAX
    scale = torch.exp2(torch.ceil(torch.log2(scale)))
    return e4m3_value(key.float() / scale[..., None]).to(torch.float8_e4m3fn).view(
        torch.uint8
    ), scale


def csa_entry(
    ka: Tensor, za: Tensor, kb: Tensor, zb: Tensor, ape_a: Tensor, ape_b: Tensor
) -> Tensor:
    """Equations 11 and 12 for tails of wide rows [b | a]."""
    half = ka.shape[-1] // 2
    scores = torch.cat([za[..., half:] + ape_a, zb[..., :half] + ape_b], -2).double()
    values = torch.cat([ka[..., half:], kb[..., :half]], -2).double()
    return (torch.softmax(scores, -2) * values).sum(-2)


def hca_entry(ka: Tensor, za: Tensor, ape: Tensor) -> Tensor:
    """Equations 22 and 23."""
    return (torch.softmax((za + ape).double(), -2) * ka.double()).sum(-2)


def normed_and_rotated(
    entry: Tensor, weight: Tensor, eps: float, cos_sin: Tensor, positions: Tensor
) -> Tensor:
    """RMSNorm, and the rotation of neighbours among the last numbers of (rows, dim)."""
    norm = torch.rsqrt(entry.double().square().mean(-1, keepdim=True) + eps)
    out = entry.double() * norm * weight
    rope = cos_sin.shape[1]
    cosine, sine = cos_sin[positions.long()].double().chunk(2, -1)
    even, odd = out[:, -rope::2].clone(), out[:, -rope + 1 :: 2].clone()
    out[:, -rope::2] = even * cosine - odd * sine
    out[:, -rope + 1 :: 2] = odd * cosine + even * sine
    return out


def page_record(row: Tensor) -> tuple[Tensor, Tensor]:
    """576 and 8 bytes of a row of 512 numbers in an engine's page."""
    groups = row[:448].float().view(7, 64)
    scale = groups.abs().amax(-1).clamp(min=1e-4) / E4M3_MAX
    exponent = torch.ceil(torch.log2(scale))
    codes = (groups / torch.exp2(exponent)[:, None]).to(torch.float8_e4m3fn).view(torch.uint8)
    rope = row[448:].to(torch.bfloat16).view(torch.uint8)
    scales = torch.cat([(exponent + 127).to(torch.uint8), torch.zeros(1, dtype=torch.uint8)])
    return torch.cat([codes.flatten(), rope]), scales
