"""Programs to read, and to run from this repository."""
