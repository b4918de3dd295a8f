"""Settings of a server, four sources in order, and table properties; unknown names and unsafe values are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from lakehead.api.connection import connect
from lakehead.config import (
    TOKEN_LENGTH_MAX,
    LakeConfig,
    ServerConfig,
    TableProperties,
    load,
    parse_duration_ms,
    parse_size_bytes,
    require_token,
)
from lakehead.env.secret_files import SECRETS
from lakehead.errors import InvalidPropertyError

TOML = """
[server]
listen = "127.0.0.1:1000"
token = "file"
[lake]
name = "prod"
catalog = {type = "rest", uri = "http://c", "s3.path-style-access" = true, timeout = 5}
"""


def test_defaults() -> None:
    assert load(None, {}, {}) == ServerConfig(unix=True, host="127.0.0.1", port=9123)


def test_file() -> None:
    catalog = {"type": "rest", "uri": "http://c", "s3.path-style-access": "true", "timeout": "5"}
    lake = LakeConfig(name="prod", catalog=catalog)
    assert load(TOML, {}, {}) == ServerConfig(host="127.0.0.1", port=1000, token="file", lake=lake)


def test_environment_is_above_the_file_and_flags_above_both() -> None:
    environ = {"LAKEHEAD_LISTEN": "127.0.0.1:2000", "LAKEHEAD_TOKEN": "env", "LAKEHEAD_LAKE_NAME": "test", "HOME": "/"}
    config = load(TOML, environ, {"listen": None})
    assert (config.port, config.token, config.lake.name) == (2000, "env", "test")
    assert load(TOML, environ, {"listen": "127.0.0.1:0"}).port == 0
    assert load(TOML, {"LAKEHEAD_TOKEN": ""}, {}).token == "file"


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[sever]\nlisten = 'x'", "unknown configuration section 'sever'; did you mean 'server'?"),
        ("[server]\nlistn = 'x'", "unknown setting in [server] 'listn'; did you mean 'listen'?"),
        ("listen = 'x'", "unknown configuration section 'listen'"),
        ("[server]\nlisten = 9123", "must be a text"),
        ("[server]\ntoken = ''", "must be a text that is not empty"),
        ("[server]\nlisten = '9123'", "write host:port"),
        ("[server]\nlisten = 'h:70000'", "write host:port"),
        ("[server]\ninsecure = 'yes'", "must be true or false"),
        ("[server]\naudit_bytes = 'much'", "audit_bytes"),
        ("[server]\ntls_cert = 'c.pem'", "belong together"),
        ("[server]\ntls_key = 'k.pem'", "belong together"),
        ("[server]\ntls_client_ca = 'a.pem'", "set tls_cert and tls_key, too"),
        ("[lake]\ncatalog = 'rest'", "must be a table of texts"),
        ("[lake]\ncatalog = {a = {b = 1}}", "must be a table of texts"),
        ("[server", "l.toml is not TOML"),
    ],
)
def test_what_cannot_be_is_refused(toml: str, words: str) -> None:
    with pytest.raises(InvalidPropertyError) as e:
        load(toml, {}, {}, "l.toml")
    assert words in str(e.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.2", "example.org", "127.evil.org", "[::]"])
def test_other_machines_need_tls_or_a_word_and_a_token(host: str) -> None:
    listen = {"listen": f"{host}:9123"}
    with pytest.raises(InvalidPropertyError, match="set tls_cert and tls_key"):
        load(None, {"LAKEHEAD_TOKEN": "t"}, listen)
    with pytest.raises(InvalidPropertyError, match="set a token"):
        load(None, {}, {**listen, "insecure": True})
    assert load(None, {"LAKEHEAD_TOKEN": "t"}, {**listen, "insecure": True}).host == host
    assert load("[server]\ninsecure = true", {"LAKEHEAD_TOKEN": "t"}, {**listen, "insecure": None}).host == host
    with pytest.raises(InvalidPropertyError, match="set tls_cert and tls_key"):
        load("[server]\ninsecure = false", {"LAKEHEAD_TOKEN": "t"}, listen)
    config = load(None, {}, {**listen, "tls_cert": "c.pem", "tls_key": "k.pem", "tls_client_ca": "a.pem"})
    assert (config.tls_cert, config.tls_key, config.tls_client_ca) == ("c.pem", "k.pem", "a.pem")
    toml = "[server]\ntls_cert = 'c.pem'\ntls_key = '${env:KEY_FILE}'"
    assert load(toml, {"KEY_FILE": "k.pem"}, listen).tls_key == "k.pem"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "localhost", "[::1]"])
def test_this_machine_needs_none(host: str) -> None:
    assert load(None, {}, {"listen": f"{host}:9123"}).host == host


@pytest.mark.parametrize(
    ("text", "ms"),
    [("250ms", 250), ("30s", 30_000), (" 5 m ", 300_000), ("2min", 120_000), ("1h", 3_600_000), ("7d", 604_800_000),
     ("1.5s", 1500), (2, 2000), (0.25, 250), ("0s", 0)],
)  # fmt: skip
def test_durations(text: object, ms: int) -> None:
    assert parse_duration_ms(text) == ms


@pytest.mark.parametrize(
    "text", ["soon", "", "5", "-1s", "s", "1 week", -1, True, None, [], float("nan"), float("inf")]
)
def test_what_is_no_duration(text: object) -> None:
    with pytest.raises(InvalidPropertyError, match="freshness"):
        parse_duration_ms(text, "freshness")


def test_sizes() -> None:
    sizes = ["1", "10 B", "64MiB", "1GB", "2KiB", 5]
    assert [parse_size_bytes(s) for s in sizes] == [1, 10, 64 << 20, 10**9, 2048, 5]
    for wrong in ("much", "0", 0, -1, True, 1.5, None, "1TB"):
        with pytest.raises(InvalidPropertyError, match="segment_bytes"):
            parse_size_bytes(wrong, "segment_bytes")


def test_table_properties_as_users_write_them() -> None:
    given = {"freshness": "5s", "durability": "os", "compression": "lz4", "log_ttl": None, "auto_maintenance": "false",
             "segment_bytes": "1MiB"}  # fmt: skip
    properties = TableProperties.from_user(given)
    assert (properties.freshness_ms, properties.auto_maintenance, properties.segment_bytes) == (5000, False, 1 << 20)
    assert TableProperties.from_user(properties.to_user()) == properties
    for name, value in [("durabilty", "os"), ("durability", "maybe"), ("auto_maintenance", 1), ("compression", None)]:
        with pytest.raises(InvalidPropertyError, match=name):
            TableProperties.from_user({name: value})


def test_the_token_of_a_principal_is_not_taken_for_the_servers() -> None:
    with pytest.raises(InvalidPropertyError, match="is a principal's"):
        load(None, {"LAKEHEAD_TOKEN": "lh_0123456789abcdef_secret"}, {})


WRONG_TOKENS = {
    "": "is empty",
    "t0ken\n": r"strip\(\)",
    "t0ken\r\n": r"strip\(\)",
    " t0ken": r"strip\(\)",
    "t0k\nen": "character 4",
    "tøken": "character 2",
    "t0ken\x00": "character 6",
    "t0ken\ud800": "character 6",
    "t0ken\x7f": "character 6",
    "t0ken" * 5000: "25,000 characters",
}


@pytest.mark.parametrize("token", WRONG_TOKENS)
def test_what_can_be_no_token(token: str) -> None:
    for take in (
        lambda: ServerConfig(token=token),
        lambda: connect("lakehead://127.0.0.1:1", token=token),
        lambda: load(None, {"LAKEHEAD_TOKEN": token}, {}) if token else require_token(token),
        lambda: load("[server]\ntoken = '${env:T}'", {"T": token}, {}) if token else require_token(token),
    ):
        with pytest.raises(InvalidPropertyError, match=WRONG_TOKENS[token]) as refused:
            take()
        assert not refused.value.retryable and "t0k" not in str(refused.value)


def test_what_can_be_a_token() -> None:
    for token in ("t", "a token of the tests", "~!", "x" * TOKEN_LENGTH_MAX):
        require_token(token)
    with pytest.raises(InvalidPropertyError, match="no bytes"):
        require_token(b"token")


def test_audit() -> None:
    assert load(None, {}, {}).audit is None
    config = load("[server]\naudit = 'a.jsonl'\naudit_bytes = '1MiB'", {}, {"audit": None})
    assert (config.audit, config.audit_bytes) == ("a.jsonl", 1 << 20)
    assert load("[server]\naudit = 'a.jsonl'", {}, {"audit": "b.jsonl"}).audit == "b.jsonl"


def test_secrets_are_named_and_not_written(tmp_path: Path) -> None:
    kept = tmp_path / "password"
    kept.write_text("p4ss\n")
    kept.chmod(0o600)
    toml = f"""
        [server]
        token = "${{env:TOKEN}}"
        [lake]
        catalog = {{ type = "sql", uri = "postgresql://me:${{file:{kept}}}@db/${{env:DB}}" }}
    """
    found = load(toml, {"TOKEN": "s3cret", "DB": "lake"}, {}, secrets=SECRETS)
    assert found.token == "s3cret" and found.lake.catalog["uri"] == "postgresql://me:p4ss@db/lake"
    assert "s3cret" not in repr(found) and "p4ss" not in repr(found)
    for mode in (0o640, 0o604):
        kept.chmod(mode)
        with pytest.raises(InvalidPropertyError, match="chmod 600") as refused:
            load(toml, {"TOKEN": "s3cret", "DB": "lake"}, {}, secrets=SECRETS)
        assert "p4ss" not in str(refused.value)
    for text, why in {
        "${env:NONE}": "no environment variable NONE",
        f"${{file:{tmp_path}/none}}": "No such file",
        "${vault:x}": "is no reference",
    }.items():
        with pytest.raises(InvalidPropertyError, match=why):
            load(f'[server]\ntoken = "{text}"', {}, {}, secrets=SECRETS)


@pytest.mark.parametrize(
    "text",
    ["${env:TOKEN", "${TOKEN}", "${", "a${env:TOKEN}b${", "$${x", "${env:TOKEN}${TOKEN}", "${:TOKEN}", "${file:/x"],
)
@pytest.mark.parametrize(
    ("place", "toml"),
    [
        (r"\[server\] token", "[server]\ntoken = '{}'"),
        (r"\[server\] listen", "[server]\nlisten = '{}'"),
        (r"\[lake\] catalog.uri", "[lake]\ncatalog = {{type = 'sql', uri = '{}'}}"),
    ],
)
def test_what_begins_as_a_reference_is_one(place: str, toml: str, text: str) -> None:
    with pytest.raises(InvalidPropertyError, match=rf"\$\{{ in {place} begins no reference") as refused:
        load(toml.format(text), {"TOKEN": "s3cret"}, {}, secrets=SECRETS)
    assert "TOKEN" not in str(refused.value) and "s3cret" not in str(refused.value)


def test_what_a_reference_stands_for_is_taken_as_it_is() -> None:
    assert load("[server]\ntoken = '${env:TOKEN}'", {"TOKEN": "a${b"}, {}).token == "a${b"


@pytest.mark.parametrize("section", ["server", "oidc", "lake"])
def test_a_section_is_a_table(section: str) -> None:
    with pytest.raises(InvalidPropertyError, match=rf"{section} must be a table.*\[{section}\]"):
        load(f"{section} = 1", {}, {})
    with pytest.raises(InvalidPropertyError, match=f"did you mean '{section}'"):
        load(f"{section}s = 1", {}, {})


def test_readers_of_a_lake_get_a_role() -> None:
    reading = 'reading = {role = "arn:aws:iam::1:role/r", sts = "https://sts.example.org", seconds = 900}'
    found = load(f"[lake]\n{reading}", {}, {}).lake.reading
    assert found == {"role": "arn:aws:iam::1:role/r", "sts": "https://sts.example.org", "seconds": "900"}
    for old, new in (
        ("arn:aws:iam::1:role/r", "readers"),
        ("https://sts", "http://sts"),
        ("https://sts", "https://a:b@sts"),
        ("900", "10"),
        ("900", '"soon"'),
        ("seconds", "minutes"),
        (', sts = "https://sts.example.org"', ""),
    ):
        with pytest.raises(InvalidPropertyError, match="reading"):
            load(f"[lake]\n{reading.replace(old, new)}", {}, {})
