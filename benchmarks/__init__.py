"""Lakehead beside other stores, and what was measured; of the repository alone, nothing that is installed."""
