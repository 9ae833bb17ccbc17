"""What only a machine with a GPU can show: `make gpu` runs all of it."""
