"""Settings of a server: four sources in order, unknown names and unsafe addresses refused."""

from __future__ import annotations

import pytest

from lakehead.config import LakeConfig, ServerConfig, load
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
    assert load(None, {}, {}) == ServerConfig(host="127.0.0.1", port=9123)


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
def test_other_machines_need_a_token(host: str) -> None:
    with pytest.raises(InvalidPropertyError, match="set a token"):
        load(None, {}, {"listen": f"{host}:9123"})
    assert load(None, {"LAKEHEAD_TOKEN": "t"}, {"listen": f"{host}:9123"}).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "localhost", "[::1]"])
def test_this_machine_needs_none(host: str) -> None:
    assert load(None, {}, {"listen": f"{host}:9123"}).host == host
