"""What an engine's cache must not get wrong: a module for each theme, a function a promise."""
