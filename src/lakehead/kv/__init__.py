"""The kv tablet: live rows by primary key, on top of a log tablet. A pure core."""

from lakehead.kv.tablet import Change, KvTablet

__all__ = ["Change", "KvTablet"]
