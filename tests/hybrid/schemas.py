"""Schemas of DeepSeek-V4's caches: Flash and Pro."""

from __future__ import annotations

# compress_ratios of the published config.json files; the last 0 is the layer that predicts a second
# token.
PRO = [128, 128, *[4, 128] * 29, 4, 0]


FLASH = [0, 0, *[4, 128] * 20, 4, 0]
