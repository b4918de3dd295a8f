"""Requests and replies that client and server share, and how they become bytes."""
