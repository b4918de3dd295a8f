"""The lake: net change, tiering rounds, Iceberg commits, and reads of what they wrote.

Modules here may load PyIceberg, which takes a second: import them where they are used.
"""
