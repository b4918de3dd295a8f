"""Shipped fakes and the suites that real implementations and fakes both pass."""
