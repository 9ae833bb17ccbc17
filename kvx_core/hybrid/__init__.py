"""DeepSeek-V4's cache: compressed entries in blocks, and a window and tails per request."""
