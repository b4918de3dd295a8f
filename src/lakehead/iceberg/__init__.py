"""Iceberg: the lake format that Lakehead writes, and the only importer of PyIceberg.

Loading PyIceberg takes a second: import modules of here where they are used.
"""
