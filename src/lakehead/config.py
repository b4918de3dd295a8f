"""Settings and table properties: each name, default, unit and meaning written once, here.

Server settings may change between starts. Table properties are stored with the table, so they are a format: names are
never reused with another meaning. ``"64MiB"`` and ``"5s"`` are read at the edge; inside there are plain ints with the
unit in the name.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal
from urllib.parse import urlsplit

from lakehead.errors import InvalidPropertyError

_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_UNITS_BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def parse_duration_ms(text: object, name: str = "duration") -> int:
    """Milliseconds of ``"250ms"``, ``"30s"``, ``"5m"``, ``"1h"``, ``"7d"``, or of a number of seconds.

    Raises:
        InvalidPropertyError: the text has no such form, is negative, or more than 1000 years.
    """
    if isinstance(text, int | float) and not isinstance(text, bool) and 0 <= text < float("inf"):
        return _within_limit(text * 1000, text, name)
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d)\s*", text) if isinstance(text, str) else None
    if not found:
        raise InvalidPropertyError(f"{name}={text!r} is not a duration: write for example '500ms', '30s', '5m' or '1h'")
    return _within_limit(float(found[1]) * _UNITS_MS[found[2]], text, name)


def _within_limit(ms: float, text: object, name: str) -> int:
    if ms > DURATION_MS_MAX:
        raise InvalidPropertyError(f"{name}={text!r} is over the limit of 1000 years")
    return int(ms)


def parse_size_bytes(text: object, name: str = "size") -> int:
    """Bytes of ``"64MiB"``, ``"1GB"`` or of an int.

    Raises:
        InvalidPropertyError: the text has no such form or is not positive.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return text
    found = re.fullmatch(r"\s*(\d+)\s*([KMG]i?B|B|)\s*", text) if isinstance(text, str) else None
    if not found or int(found[1]) == 0:
        raise InvalidPropertyError(f"{name}={text!r} is not a size: write for example '64MiB' or a number of bytes")
    return int(found[1]) * _UNITS_BYTES[found[2]]


def unknown_name(kind: str, name: str, known: list[str]) -> InvalidPropertyError:
    """The error for a name that does not exist, with the nearest one that does."""
    near = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"
    return InvalidPropertyError(f"unknown {kind} {name!r}{hint}", name=name)


FILE_BYTES = {"segment_bytes": (128, 1 << 40), "target_file_bytes": (1024, 1 << 40)}
"""Bounds of sizes of files: each file takes a descriptor, or a line in a manifest."""
DURATION_MS_MAX = 1000 * 366 * 86_400_000


@dataclass(frozen=True, kw_only=True)
class TableProperties:
    """Properties of one table, as stored with it.

    Attributes:
        freshness_ms: no row older than this should be missing from the lake while a tiering service runs.
        durability: "sync" acknowledges after fdatasync (survives power loss); "os" after the write call (survives a
            killed process).
        compression: of the Arrow buffers in the log: "none", "lz4" or "zstd".
        hot_retention_ms: how long tiered rows stay in the log of a table with a lake.
        log_ttl_ms: after which rows leave the log of a table without a lake, for good; None keeps them for ever.
        auto_maintenance: whether the tiering service compacts the lake table and expires its snapshots.
        lake_changelog: whether the lake of a keyed table keeps its changelog, too, as a table of its own; as it was
            created.
        target_file_bytes: size that lake data files aim at.
        segment_bytes: size at which a log segment is rolled.
    """

    freshness_ms: int = 30_000
    durability: Literal["sync", "os"] = "sync"
    compression: Literal["none", "lz4", "zstd"] = "none"
    hot_retention_ms: int = 3_600_000
    log_ttl_ms: int | None = None
    auto_maintenance: bool = True
    lake_changelog: bool = False
    target_file_bytes: int = 128 << 20
    segment_bytes: int = 128 << 20

    @classmethod
    def from_user(cls, properties: dict[str, Any]) -> TableProperties:
        """Read the names and texts that users write (``freshness="30s"``, ``durability="os"``).

        Raises:
            InvalidPropertyError: a name is unknown or a value cannot be read.
        """
        values: dict[str, Any] = {}
        fields = {f.name: f for f in dataclasses.fields(cls)}
        edge = {n.removesuffix("_ms"): n for n in fields}
        for name, value in properties.items():
            if name not in edge:
                raise unknown_name("table property", name, list(edge))
            inner = edge[name]
            if inner.endswith("_ms"):
                values[inner] = None if value is None and inner == "log_ttl_ms" else parse_duration_ms(value, name)
            elif inner.endswith("_bytes"):
                values[inner] = parse_size_bytes(value, name)
                low, high = FILE_BYTES[inner]
                if not low <= values[inner] <= high:
                    raise InvalidPropertyError(f"{name}={value!r} must lie between {low:,} and {high:,} bytes")
            elif inner in ("auto_maintenance", "lake_changelog"):
                if str(value).lower() not in ("true", "false"):
                    raise InvalidPropertyError(f"{name}={value!r} must be true or false")
                values[inner] = str(value).lower() == "true"
            else:
                allowed = ("sync", "os") if inner == "durability" else ("none", "lz4", "zstd")
                if not isinstance(value, str) or value not in allowed:
                    raise InvalidPropertyError(f"{name}={value!r} must be one of {', '.join(allowed)}")
                values[inner] = value
        return cls(**values)

    def changed(self, properties: dict[str, Any]) -> TableProperties:
        """These, but for some that are as users write them; raises as `from_user`."""
        given = TableProperties.from_user(properties)
        if given.lake_changelog != self.lake_changelog and "lake_changelog" in properties:
            raise InvalidPropertyError(
                "lake_changelog is as the table was created, or its lake would lack what changed before: copy the rows"
                " to a new table"
            )
        inner = {f.name for f in dataclasses.fields(self) if f.name.removesuffix("_ms") in properties}
        return dataclasses.replace(self, **{name: getattr(given, name) for name in inner})

    def to_user(self) -> dict[str, Any]:
        """The same values under the names users write, durations as ``"<n>ms"``."""
        out: dict[str, Any] = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            out[f.name.removesuffix("_ms")] = f"{value}ms" if f.name.endswith("_ms") and value is not None else value
        return out


LEASE_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits that keep every queue and request bounded.

    Attributes:
        batch_bytes_max: largest Arrow batch of one write to one tablet.
        buckets_max: buckets of one table.
        columns_max: columns of one table.
        exchanges_max: conversations that clients of one server hold open at once.
        grants_max: privileges and roles that principals and roles of one server were granted.
        joined_bytes_max: rows of small batches that one server keeps in memory, joined to large ones; others are joined
            when they are read. 0 keeps none.
        lease_seconds: how long a pinned read that its process neither uses nor renews keeps what it holds from being
            deleted; a live process renews it four times in this time.
        leases_max: pinned reads of one server.
        lookup_keys_max: keys of one lookup request; clients cut larger ones.
        named_writers_max: named writers that one table ever had.
        partition_name_max: characters of the name that a partition has of its values.
        partitions_max: partitions of one table.
        planned_lease_seconds: the same for a read that Spark has planned and does not carry out.
        quotas_max: quotas of principals of one server.
        reads_max: bulk reads that one server carries out at once.
        schema_bytes_max: the definition of the columns of one table.
        staged_bytes_max: bytes that Spark's tasks have staged on one server and their jobs have not published yet.
        subscriptions_max: open subscriptions of one server.
        tables_max: tables of one server.
        tablets_max: tablets of all tables of one server; no more than three quarters of the files that its process may
            hold open.
        tokens_max: tokens of principals of one server that were not revoked.
        write_bytes_max: bytes of writes that one server works on at once; more are told to try again.
        writer_batches_max: batches that a writer holds until they are acknowledged; more must wait.
        writer_bytes_max: bytes of such batches.
    """

    batch_bytes_max: int = 256 << 20
    buckets_max: int = 1024
    columns_max: int = 2000
    exchanges_max: int = 4000
    grants_max: int = 100_000
    joined_bytes_max: int = 128 << 20
    lease_seconds: float = LEASE_SECONDS
    leases_max: int = 10_000
    lookup_keys_max: int = 1 << 18
    named_writers_max: int = 10_000
    partition_name_max: int = 16_384
    partitions_max: int = 1000
    planned_lease_seconds: float = 600.0
    quotas_max: int = 10_000
    reads_max: int = 1000
    schema_bytes_max: int = 4 << 20
    staged_bytes_max: int = 64 << 30
    subscriptions_max: int = 1000
    tables_max: int = 10_000
    tablets_max: int = 100_000
    tokens_max: int = 10_000
    write_bytes_max: int = 1 << 30
    writer_batches_max: int = 256
    writer_bytes_max: int = 64 << 20


READING_SECONDS = (900, 43_200)
"""How long the credentials of a reader may last, at least and at most."""
STORAGE_EXPIRES = "s3.session-token-expires-at-ms"
"""The storage property that says when its credentials end, as in Iceberg's REST protocol."""


@dataclass(frozen=True, kw_only=True)
class LakeConfig:
    """Where lake tables live.

    Attributes:
        catalog: PyIceberg catalog properties (``type``, ``uri``, ``warehouse``, ...); empty means an SQLite catalog
            and a ``lake`` folder beside the data.
        name: the catalog's name, as JDBC and SQL catalogs store it with each table.
        reading: ``role`` (an ARN), ``sts`` (an address) and ``seconds``: who may only read a table gets S3 credentials
            of that role, which end, and open the folder of that table alone; empty means those of the storage.
    """

    catalog: dict[str, str] = dataclasses.field(default_factory=dict, repr=False)
    name: str = "lakehead"
    reading: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises: InvalidPropertyError: the catalog, or what is for readers, is given in another form."""
        if not isinstance(self.catalog, Mapping):
            raise InvalidPropertyError("a lake's catalog is given by its properties: {'type': 'sql', 'uri': '...'}")
        if self.reading:
            _require_reading(self.reading)


def _require_reading(given: object) -> None:
    if not isinstance(given, Mapping) or not {"role", "sts"} <= given.keys() <= {"role", "sts", "seconds"}:
        raise InvalidPropertyError(
            "[lake] reading needs a role and an sts: reading = {role = 'arn:aws:iam::...:role/...', sts ="
            " 'https://sts.eu-north-1.amazonaws.com'}, and may have seconds"
        )
    if not re.fullmatch(r"arn:[a-z0-9-]+:iam::[^:]*:role/\S+", given["role"]):
        raise InvalidPropertyError(
            f"[lake] reading.role = {given['role']!r} is no role: write arn:aws:iam::...:role/..."
        )
    if not _is_address(given["sts"]):
        raise InvalidPropertyError(f"[lake] reading.sts = {given['sts']!r} is no address: write https://host")
    seconds = str(given.get("seconds", 3600))
    if not seconds.isdecimal() or not READING_SECONDS[0] <= int(seconds) <= READING_SECONDS[1]:
        low, high = READING_SECONDS
        raise InvalidPropertyError(f"[lake] reading.seconds = {seconds!r}: a number from {low} to {high}")


def _is_address(text: str) -> bool:
    """Whether it is of https, or of http on loopback, without a password."""
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return False
    safe = parts.scheme == "https" or (parts.scheme == "http" and is_loopback(host or ""))
    return bool(host) and parts.username is None and safe


@dataclass(frozen=True, kw_only=True)
class OidcConfig:
    """Whose signed tokens (OpenID Connect, OAuth 2) callers may come by.

    Attributes:
        issuer: who signs them, as their ``iss`` says, letter by letter.
        audience: what they must be for, as their ``aud`` says: a name of this server alone.
        jwks: address of the issuer's keys; https, or http on loopback.
        claim: which of their claims names the caller; that of ``oidc:`` and its text is the principal. ``email`` counts
            where ``email_verified`` is true.
    """

    issuer: str = ""
    audience: str = ""
    jwks: str = ""
    claim: str = "sub"

    def __post_init__(self) -> None:
        """Raises: InvalidPropertyError: something is missing, or the keys would come by a network in the clear."""
        missing = [f.name for f in dataclasses.fields(self) if not getattr(self, f.name)]
        if missing and len(missing) < 3:
            raise InvalidPropertyError(f"[oidc] needs {' and '.join(missing)}, too: issuer, audience and jwks")
        if missing:
            return
        try:
            parts = urlsplit(self.jwks)
            host, _ = parts.hostname, parts.port
        except ValueError:
            host = None
        if not host or parts.username is not None or parts.scheme not in ("https", "http"):
            raise InvalidPropertyError(f"[oidc] jwks = {self.jwks!r} is no address: write https://host/path")
        if parts.scheme == "http" and not is_loopback(host):
            raise InvalidPropertyError(f"[oidc] jwks = {self.jwks!r} could be changed on its way: write https://")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of one server process.

    Attributes:
        unix: listen on a Unix socket in a folder of this user alone; where there can be none, and without, on the
            address below.
        host: address to listen on.
        port: port to listen on; 0 takes a free one.
        token: what clients must present; None makes a random one.
        tls_cert: PEM file of the server's certificate, and those between it and its authority; makes it speak TLS.
        tls_key: PEM file of that certificate's key, which this user alone can read.
        tls_client_ca: PEM file of the authority whose certificates clients must have; None asks for none.
        audit: file to which each request is written, as a line of JSON; None writes none.
        audit_bytes: size at which that file is put aside; ten such files are kept.
        oidc: whose signed tokens callers may come by.
        lake: where lake tables live.
        limits: bounds on requests.
    """

    unix: bool = False
    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = dataclasses.field(default=None, repr=False)
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    audit: str | None = None
    audit_bytes: int = 64 << 20
    oidc: OidcConfig = dataclasses.field(default_factory=OidcConfig)
    lake: LakeConfig = dataclasses.field(default_factory=LakeConfig)
    limits: Limits = dataclasses.field(default_factory=Limits)

    def __post_init__(self) -> None:
        """Raises: InvalidPropertyError: the token cannot be one."""
        if self.token is not None:
            require_token(self.token)


_TLS = ("tls_cert", "tls_key", "tls_client_ca")
_SETTINGS: dict[str, tuple[str, ...]] = {
    "server": ("listen", "token", *_TLS, "insecure", "audit", "audit_bytes"),
    "oidc": ("issuer", "audience", "jwks", "claim"),
    "lake": ("name", "catalog", "reading"),
}
_TABLES = {"catalog": 'type = "rest", uri = "http://..."', "reading": 'role = "arn:...", sts = "https://..."'}
_ENVIRONMENT = {
    ("server", "listen"): "LAKEHEAD_LISTEN",
    ("server", "token"): "LAKEHEAD_TOKEN",
    ("lake", "name"): "LAKEHEAD_LAKE_NAME",
}
ENVIRONMENT = frozenset(_ENVIRONMENT.values())
DEFAULT_LISTEN = "127.0.0.1:9123"
TOKEN_PREFIX = "lh_"
"""With which a principal's token begins, ``lh_<id>_<secret>``, and a server's own never."""


TOKEN_LENGTH_MAX = 7 << 10
"""Headers of 8 KiB, all together, gRPC refuses at random."""


def require_token(token: object) -> None:
    """Return if this can be a token, which travels in a header.

    Raises:
        InvalidPropertyError: it cannot; the message says why, and no more of it.
    """
    if not isinstance(token, str):
        raise InvalidPropertyError(f"a token is a text, and no {type(token).__name__}")
    if not token:
        raise InvalidPropertyError("the token is empty: give one, or none at all (unset LAKEHEAD_TOKEN)")
    if token != token.strip():
        raise InvalidPropertyError(
            "the token begins or ends with a space or a newline, as what is read from a file does: strip() it"
        )
    wrong = next((i for i, c in enumerate(token) if not " " <= c <= "~"), None)
    if wrong is not None:
        raise InvalidPropertyError(
            f"character {wrong + 1} of the token is no printable letter of ASCII, as all of a token's are: look whether"
            " it was copied whole, and alone"
        )
    if len(token) > TOKEN_LENGTH_MAX:
        raise InvalidPropertyError(
            f"the token has {len(token):,} characters, more than the {TOKEN_LENGTH_MAX:,} that it may have"
        )


def is_signed(token: str) -> bool:
    """Whether it has the form of a JSON Web Token, which says itself whose it is."""
    return token.startswith("eyJ") and token.count(".") == 2


def names_principal(token: str) -> bool:
    """Whether it is a principal's token by its form, and so never a server's own: it is worth as much at another
    server of the folder, and who is refused with it is not to try another."""
    return token.startswith(TOKEN_PREFIX) or is_signed(token)


def load(
    toml: str | None,
    environ: Mapping[str, str],
    flags: Mapping[str, str | bool | None],
    source: str = "",
    secrets: Mapping[str, Callable[[str], str]] = MappingProxyType({}),
    shared: bool = False,
) -> ServerConfig:
    """Settings of a server: defaults, overridden by TOML text, by the environment, by flags (None: not given).

    TOML has ``[server] listen, token, tls_cert, tls_key, tls_client_ca, insecure, audit, audit_bytes``, ``[oidc]
    issuer, audience, jwks, claim`` and ``[lake] name, catalog, reading``, in whose texts ``${env:NAME}`` stands for a
    variable,
    ``${file:/path}`` for what a file says that only this user, or root, can read, and ``${keyring:service/name}`` for
    what the system's keyring keeps; the environment
    ``LAKEHEAD_LISTEN``, ``LAKEHEAD_TOKEN`` and ``LAKEHEAD_LAKE_NAME``; flags all of ``[server]`` but the token.
    ``insecure`` lets a server be reached from other machines without TLS.

    Args:
        source: where the TOML comes from, for messages.
        secrets: reads those of a kind, ``file`` or ``keyring``; raises InvalidPropertyError.
        shared: other users can read the file that the TOML comes from.

    Raises:
        InvalidPropertyError: a name is unknown, a value has the wrong form, a secret is not where it should be or is
            open to others, as it is when it stands in a file that they can read, or the address can be reached from
            other machines, and what goes over the network would be open to them.
        MissingDependencyError: what reads a keyring is not installed.
    """
    values = _from_toml(toml, source, {"env": _variables(environ), **secrets}, shared) if toml is not None else {}
    values |= {key: environ[name] for key, name in _ENVIRONMENT.items() if environ.get(name)}
    values |= {("server", name): value for name, value in flags.items() if value is not None}
    host, port = parse_listen(values.get(("server", "listen"), DEFAULT_LISTEN))
    token = values.get(("server", "token"))
    if token is not None and names_principal(token):
        raise InvalidPropertyError(
            f"a token that begins with {TOKEN_PREFIX}, or is signed, is a principal's, and this one would be the"
            " server's own, which may do all: set another, or unset LAKEHEAD_TOKEN"
        )
    tls: dict[str, Any] = {name: values.get(("server", name)) for name in _TLS}
    _require_whole(tls)
    unix = ("server", "listen") not in values and tls["tls_cert"] is None
    if tls["tls_cert"] is None and not is_loopback(host):
        _require_insecure(f"listen={host}:{port} can be reached from other machines", token, values)
    lake, oidc = (
        {name: values[section, name] for name in _SETTINGS[section] if (section, name) in values}
        for section in ("lake", "oidc")
    )
    if oidc and "issuer" not in oidc:
        raise InvalidPropertyError("[oidc] needs an issuer, an audience and jwks")
    size = parse_size_bytes(values.get(("server", "audit_bytes"), ServerConfig.audit_bytes), "audit_bytes")
    audit = values.get(("server", "audit"))
    return ServerConfig(
        unix=unix, host=host, port=port, token=token, lake=LakeConfig(**lake), oidc=OidcConfig(**oidc), audit=audit,
        audit_bytes=size, **tls,
    )  # fmt: skip


def _require_whole(tls: Mapping[str, str | None]) -> None:
    if (tls["tls_cert"] is None) != (tls["tls_key"] is None):
        raise InvalidPropertyError("a certificate and its key belong together: set tls_cert and tls_key")
    if tls["tls_client_ca"] is not None and tls["tls_cert"] is None:
        raise InvalidPropertyError("tls_client_ca asks clients for certificates: set tls_cert and tls_key, too")


def _require_insecure(why: str, token: str | None, values: Mapping[tuple[str, str], Any]) -> None:
    """That whoever starts a server without TLS on a network means it."""
    if not values.get(("server", "insecure")):
        raise InvalidPropertyError(
            f"{why}, who could read and change all that goes over the network: set tls_cert and tls_key, listen on"
            " 127.0.0.1, or, where something else encrypts the network, set insecure = true (--insecure)"
        )
    if token is None:
        raise InvalidPropertyError(
            f"{why}: set a token ([server] token in the configuration file, or LAKEHEAD_TOKEN), or listen on 127.0.0.1"
        )


_REFERENCE = re.compile(r"\$\{(?:(\w*):([^}]*)\})?")
"""One reference; of what begins as one and is none, its beginning."""


_SECRET = re.compile(r"(?i)passw|secret|token$|credential|authorization|(^|[-_.])key$|connection[-_.]string")
_PASSWORDS = re.compile(r"(?i)://[^/\s:@]*:([^/\s]+)@|[?&][^=&]*(?:passw|secret|token)[^=&]*=([^&]+)")
_KEPT = "\0"


def _variables(environ: Mapping[str, str]) -> Callable[[str], str]:
    def value(name: str) -> str:
        if not environ.get(name):
            raise InvalidPropertyError(f"${{env:{name}}}: there is no environment variable {name}, or it is empty")
        return environ[name]

    return value


def _resolved(place: str, text: str, secrets: Mapping[str, Callable[[str], str]]) -> str:
    """The text with what its references stand for."""

    def value(reference: re.Match[str]) -> str:
        kind, name = reference.groups()
        if kind not in secrets:
            # What follows an open reference may be a secret, and is not said.
            what = f"{reference[0]} in {place} is no reference" if kind else f"a ${{ in {place} begins no reference"
            raise InvalidPropertyError(
                f"{what}: write ${{env:NAME}}, ${{file:/path}} or ${{keyring:service/name}}, with all braces"
            )
        return secrets[kind](name)

    return _REFERENCE.sub(value, text)


def _is_secret(name: str, text: str) -> bool:
    """Whether a secret stands in a text itself, as far as its name or an address tells."""
    text = _REFERENCE.sub(_KEPT, text)
    if _SECRET.search(name) and _KEPT not in text and text.lower() not in ("", "true", "false"):
        return True
    return any(_KEPT not in "".join(found) for found in _PASSWORDS.findall(text))


def _require_none_open(found: list[str], source: str) -> None:
    if found:
        raise InvalidPropertyError(
            f"other users can read {source or 'the configuration'}, where secrets stand ({', '.join(sorted(found))}):"
            f" chmod 600 {source or 'it'}, or write references instead, ${{env:NAME}}, ${{file:/path}} or"
            " ${keyring:service/name}",
            path=source,
        )


def _from_toml(
    text: str, source: str, secrets: Mapping[str, Callable[[str], str]], shared: bool
) -> dict[tuple[str, str], Any]:
    import tomllib

    try:
        sections = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise InvalidPropertyError(f"{source or 'the configuration'} is not TOML: {e}") from e
    values: dict[tuple[str, str], Any] = {}
    plain: dict[tuple[str, str], dict[str, str]] = {}
    for section, settings in sections.items():
        if section not in _SETTINGS:
            raise unknown_name("configuration section", section, list(_SETTINGS))
        if not isinstance(settings, dict):
            names = ", ".join(_SETTINGS[section])
            raise InvalidPropertyError(f"{section} must be a table: write a line [{section}], and below it {names}")
        for name, value in settings.items():
            if name not in _SETTINGS[section]:
                raise unknown_name(f"setting in [{section}]", name, list(_SETTINGS[section]))
            if name == "insecure":
                if not isinstance(value, bool):
                    raise InvalidPropertyError(f"[{section}] {name} = {value!r} must be true or false")
                values[section, name] = value
                continue
            if name not in _TABLES and not (isinstance(value, str) and value):
                raise InvalidPropertyError(f"[{section}] {name} = {value!r} must be a text that is not empty")
            plain[section, name] = _texts(name, value) if name in _TABLES else {name: value}
    if shared:
        # A path of a key is none: `tls_key` names a file, which is looked at when it is read.
        texts = [(s, k, v) for (s, name), found in plain.items() if name not in _TLS for k, v in found.items()]
        _require_none_open([f"[{s}] {k}" for s, k, v in texts if _is_secret(k, v)], source)
    for (section, name), found in plain.items():
        place = f"[{section}] {name}"
        resolved = {k: _resolved(f"{place}.{k}" if k != name else place, v, secrets) for k, v in found.items()}
        values[section, name] = resolved if name in _TABLES else resolved[name]
    return values


def _texts(name: str, value: object) -> dict[str, str]:
    if not isinstance(value, dict) or any(isinstance(v, dict | list) for v in value.values()):
        raise InvalidPropertyError(f"[lake] {name} must be a table of texts: {name} = {{{_TABLES[name]}}}")
    return {k: str(v).lower() if isinstance(v, bool) else str(v) for k, v in value.items()}


def parse_listen(text: str) -> tuple[str, int]:
    """Host and port of ``"127.0.0.1:9123"``; port 0 takes a free one.

    Raises:
        InvalidPropertyError: the text has another form.
    """
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise InvalidPropertyError(f"listen={text!r} is not an address: write host:port, for example {DEFAULT_LISTEN}")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """True when only this machine can reach the host."""
    return host in ("localhost", "::1", "[::1]") or bool(re.fullmatch(r"127(\.\d{1,3}){3}", host))
