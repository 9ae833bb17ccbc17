"""Where the tensors, scales, tables and lengths of a cache lie, and what they mean."""
