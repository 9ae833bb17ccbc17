"""Which model keys and values belong to: its files, their digests, its configuration, its rope."""
