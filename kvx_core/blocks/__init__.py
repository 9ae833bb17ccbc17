"""Blocks as KVBM keeps them: their three layouts, described; and copies between them."""

from kvx_core.blocks.layouts import block_stack, operational_blocks, universal_blocks

__all__ = ["block_stack", "operational_blocks", "universal_blocks"]
