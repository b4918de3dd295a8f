"""The command line: thin; every command calls the public API."""
