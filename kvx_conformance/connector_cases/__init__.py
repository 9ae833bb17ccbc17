"""What a connector or store must not get wrong: a module for each theme, a function a promise."""
