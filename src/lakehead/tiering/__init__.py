"""Tiering: what a round moves from the log to the lake, and how its commit ends. Knows no lake format."""
