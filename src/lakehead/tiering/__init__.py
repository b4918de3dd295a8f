"""Tiering: when a table gets a round, what that moves from log to lake, and how its commit ends. Knows no format."""
