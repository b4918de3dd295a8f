"""Whoever signs tokens but the issuer, or has one for another, is nobody here, however the token asks to be checked."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.server
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jwt
import pyarrow as pa
import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from tests.waiting import WAIT_SECONDS

import lakehead as lh
from lakehead.api.connection import reopened
from lakehead.api.embedded import serve
from lakehead.config import OidcConfig, ServerConfig, load
from lakehead.env import Env
from lakehead.env.clock import SystemClock
from lakehead.env.https import fetch
from lakehead.server import signatures
from lakehead.server.host import ServerHost
from lakehead.server.signatures import Signatures

ISSUER, AUDIENCE = "https://id.example.org/realm", "lake.example.org"


def jwk_of(key: Any, **more: Any) -> dict[str, Any]:
    kind = jwt.algorithms.RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else jwt.algorithms.ECAlgorithm
    return {**kind.to_jwk(key.public_key(), as_dict=True), **more}


RSA = rsa.generate_private_key(65537, 2048)
SHORT = rsa.generate_private_key(65537, 1024)
EC = ec.generate_private_key(ec.SECP256R1())
STRANGER = rsa.generate_private_key(65537, 2048)
KEYS: list[Any] = [
    jwk_of(RSA, kid="rsa", use="sig", alg="RS256"),
    jwk_of(EC, kid="ec"),
    {"kty": "oct", "k": "c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0", "kid": "oct", "alg": "HS256"},
    jwk_of(STRANGER, kid="enc", use="enc"),
    jwk_of(SHORT, kid="short"),
    {"kty": "RSA", "kid": "broken", "n": "!", "e": 3},
    "no key",
]


class Issuer:
    """An HTTP server on loopback that has keys."""

    def __init__(self) -> None:
        self.answer: Callable[[Any], None] | None = None
        self.keys: list[Any] = KEYS
        self.asked = 0
        issuer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.asked += 1
                if issuer.answer is not None:
                    issuer.answer(self)
                    return
                data = json.dumps({"keys": issuer.keys}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                return

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.jwks = f"http://127.0.0.1:{self._server.server_port}/keys"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    made = Issuer()
    yield made
    made.close()


class Clock(SystemClock):
    """The machine's, and as much later as a test says."""

    later = 0.0

    def now_us(self) -> int:
        return super().now_us() + int(self.later * 1e6)

    def monotonic(self) -> float:
        return super().monotonic() + self.later


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def checked(issuer: Issuer, clock: Clock) -> Signatures:
    env = Env.system()
    world = Env(clock, env.storage, env.randomness, env.threads)
    return Signatures(OidcConfig(issuer=ISSUER, audience=AUDIENCE, jwks=issuer.jwks), world, fetch)


def claims(**more: Any) -> dict[str, Any]:
    now = int(time.time())
    given = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "iat": now, "exp": now + 600, **more}
    return {k: v for k, v in given.items() if v is not None}


def signed(key: Any = RSA, alg: str = "RS256", kid: str | None = "rsa", header: Any = None, **more: Any) -> str:
    return jwt.encode(claims(**more), key, alg, {**({} if kid is None else {"kid": kid}), **(header or {})})


def part(value: Any) -> str:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def by_hand(header: dict[str, Any], sign: Callable[[bytes], bytes], **more: Any) -> str:
    text = f"{part(header)}.{part(claims(**more))}"
    return f"{text}.{part(sign(text.encode()))}"


def refused(checked: Signatures, *tokens: str) -> None:
    for token in tokens:
        with pytest.raises(lh.AuthenticationError) as raised:
            checked.signed(token)
        assert token.rpartition(".")[2][:20] not in raised.value.message or token.endswith(".")


def test_who_the_issuer_says_is_let_in(checked: Signatures, issuer: Issuer) -> None:
    name, until = checked.signed(signed())
    assert name == "oidc:alice" and until / 1e6 == pytest.approx(time.time() + 630, abs=30)
    for token in (
        signed(EC, "ES256", "ec"),
        signed(aud=["another", AUDIENCE]),
        signed(header={"typ": "at+jwt"}),
        signed(sub="auth0|5f", nbf=int(time.time()) + 10),
    ):
        assert checked.signed(token)[0].startswith("oidc:")
    assert issuer.asked == 1


def test_no_signature_is_none(checked: Signatures) -> None:
    for alg in ("none", "None", "NONE", "nOnE", "", None):
        refused(
            checked,
            by_hand({"alg": alg, "kid": "rsa"}, lambda _: b""),
            by_hand({"alg": alg, "kid": "none"}, lambda _: b""),
            by_hand({"alg": alg}, lambda _: b"x"),
        )
    head, body, _ = signed().split(".")
    refused(checked, f"{head}.{body}.", f"{head}.{part(claims(sub='root'))}.{signed().split('.')[2]}")


def test_a_public_key_is_no_secret(checked: Signatures) -> None:
    public = RSA.public_key()
    forms = [
        public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo),
        public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.PKCS1),
        public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo),
        json.dumps(KEYS[0]).encode(),
        b"",
    ]
    for secret in forms:
        for kid in ("rsa", "ec", "oct", None):
            header = {"alg": "HS256", **({} if kid is None else {"kid": kid})}
            refused(checked, by_hand(header, lambda text, s=secret: hmac.new(s, text, hashlib.sha256).digest()))
    shared = base64.urlsafe_b64decode(KEYS[2]["k"])
    refused(
        checked, by_hand({"alg": "HS256", "kid": "oct"}, lambda text: hmac.new(shared, text, hashlib.sha256).digest())
    )


@pytest.mark.filterwarnings("ignore:The RSA key is 1024 bits")
def test_an_algorithm_is_that_of_its_key(checked: Signatures) -> None:
    refused(
        checked,
        signed(RSA, "RS512"),
        signed(RSA, "RS384"),
        signed(RSA, "PS256"),
        signed(RSA, "RS256", "ec"),
        signed(EC, "ES256", "rsa"),
        signed(ec.generate_private_key(ec.SECP384R1()), "ES384", "ec"),
        signed(SHORT, kid="short"),
        signed(STRANGER, kid="enc"),
        by_hand({"alg": "ES256", "kid": "ec"}, lambda _: bytes(64)),  # r = s = 0
    )


def test_a_token_brings_no_keys(checked: Signatures, issuer: Issuer) -> None:
    jwk = jwk_of(STRANGER, kid="mine")

    def strangers(text: bytes) -> bytes:  # by hand, as a library refuses to sign some of these
        return STRANGER.sign(text, padding.PKCS1v15(), hashes.SHA256())

    headers: tuple[dict[str, Any], ...] = (
        {"jwk": jwk},
        {"jku": f"{issuer.jwks}/mine"},
        {"x5u": f"{issuer.jwks}/mine"},
        {"x5c": ["MII"]},
        {"crit": ["exp"], "exp": 1},
        {"b64": False, "crit": ["b64"]},
        {"typ": "logout+jwt"},
        {"kid": ["rsa"]},
        {"kid": ""},
    )
    for header in headers:
        for kid in ("rsa", "mine"):
            refused(checked, by_hand({"alg": "RS256", "kid": kid, **header}, strangers))
    refused(
        checked,
        by_hand({"alg": "RS256", "kid": {"a": 1}}, lambda _: b"x"),
        by_hand({"alg": "RS256", "kid": "../../etc/passwd"}, lambda _: b"x"),
        signed(RSA, header={"crit": ["x"], "x": 1}),
        signed(RSA, header={"typ": "logout+jwt"}),
        signed(STRANGER),
        signed(STRANGER, kid=None),
    )


def test_what_is_for_another_or_from_another(checked: Signatures) -> None:
    refused(
        checked,
        signed(aud="another"),
        signed(aud=[]),
        signed(aud=None),
        signed(aud=AUDIENCE + "/"),
        signed(aud=AUDIENCE[:5]),
        signed(iss=ISSUER + "/"),
        signed(iss=ISSUER[:-1]),
        signed(iss=None),
        by_hand({"alg": "RS256", "kid": "rsa"}, lambda _: b"x", iss=[ISSUER]),
    )


def test_times(checked: Signatures, clock: Clock) -> None:
    now = int(time.time())
    refused(
        checked,
        signed(exp=None),
        signed(exp=now - 31),
        signed(exp=True),
        signed(exp="tomorrow"),
        signed(exp=1e300),
        signed(exp=-5),
        signed(nbf=now + 120),
        signed(iat=now + 120),
        signed(nbf="now"),
        by_hand({"alg": "RS256", "kid": "rsa"}, lambda _: b"x", exp=float("inf")),
    )
    token = signed()
    assert checked.signed(token)
    clock.later = 631
    refused(checked, token)


def test_names(checked: Signatures, issuer: Issuer, clock: Clock) -> None:
    refused(
        checked,
        signed(sub=None),
        signed(sub=""),
        by_hand({"alg": "RS256", "kid": "rsa"}, lambda _: b"x", sub=5),
        signed(sub="a b"),
        signed(sub="a\n"),
        signed(sub="x" * 300),
        signed(sub="é"),
    )
    config = OidcConfig(issuer=ISSUER, audience=AUDIENCE, jwks=issuer.jwks, claim="email")
    by_email = Signatures(config, Env.system(), fetch)
    assert by_email.signed(signed(email="a@x.org", email_verified=True))[0] == "oidc:a@x.org"
    refused(
        by_email, signed(email="a@x.org"), signed(email="a@x.org", email_verified="true"), signed(email_verified=True)
    )


def test_what_is_no_token(checked: Signatures) -> None:
    refused(
        checked,
        "eyJ..",
        "eyJ.eyJ.eyJ",
        f"{part({'alg': 'RS256', 'kid': 'rsa'})}.{part(b'[' * 3000)}.{part(b'x')}",
        f"{part(b'[]')}.{part(claims())}.{part(b'x')}",
        f"{part(b'null')}.{part(claims())}.{part(b'x')}",
        signed(sub="x" * 9000),
        "eyJ\x00.é.",
    )


@pytest.mark.parametrize("seed", range(4))
def test_damaged_tokens_say_nothing_else_and_raise_nothing_else(checked: Signatures, seed: int) -> None:
    draws = random.Random(seed)
    good = [signed(), signed(EC, "ES256", "ec")]
    claimed = {checked.signed(token)[0] for token in good}
    letters = "ABCxyz019-_.=+/ \x00é"
    for _ in range(300):
        token = draws.choice(good)
        at = draws.randrange(len(token))
        token = (
            token[:at] + draws.choice([draws.choice(letters), "", token[at:] * 2]) + token[at + draws.randrange(4) :]
        )
        with contextlib.suppress(lh.AuthenticationError):
            assert checked.signed(token)[0] in claimed


def test_unknown_keys_are_asked_for_now_and_then(checked: Signatures, issuer: Issuer, clock: Clock) -> None:
    checked.signed(signed())
    for n in range(20):
        refused(checked, signed(STRANGER, kid=f"guess-{n}"))
    assert issuer.asked == 1
    clock.later += signatures.RETRY_SECONDS + 1
    for n in range(20):
        refused(checked, signed(STRANGER, kid=f"guess-{n}"))
    assert issuer.asked == 2
    issuer.keys = [*KEYS, jwk_of(STRANGER, kid="new")]
    clock.later += signatures.RETRY_SECONDS + 1
    assert checked.signed(signed(STRANGER, kid="new"))[0] == "oidc:alice" and issuer.asked == 3


def test_a_key_that_was_taken_back_ends_soon(checked: Signatures, issuer: Issuer, clock: Clock) -> None:
    checked.signed(signed())
    issuer.keys = [k for k in KEYS if k is not KEYS[0]]
    clock.later += signatures.FRESH_SECONDS + 1
    refused(checked, signed())


def test_keys_outlive_their_issuer_for_a_while(checked: Signatures, issuer: Issuer, clock: Clock) -> None:
    checked.signed(signed())
    issuer.answer = lambda handler: handler.send_error(500)
    clock.later += signatures.FRESH_SECONDS + 1
    assert checked.signed(signed())
    clock.later += signatures.KEPT_SECONDS
    refused(checked, signed(exp=int(time.time() + clock.later + 600)))
    issuer.answer = None
    clock.later += signatures.RETRY_SECONDS
    assert checked.signed(signed(exp=int(time.time() + clock.later + 600)))


def test_an_answer_is_bounded_and_not_redirected(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert json.loads(fetch(issuer.jwks, bytes_max=1 << 20, seconds_max=5))["keys"]

    def redirect(handler: Any) -> None:
        handler.send_response(302)
        handler.send_header("Location", "/elsewhere")
        handler.end_headers()

    def large(handler: Any) -> None:
        handler.send_response(200)
        handler.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(1000):
                handler.wfile.write(bytes(4096))

    def slow(handler: Any) -> None:
        with contextlib.suppress(OSError):
            for _ in range(600):
                handler.wfile.write(b"H")
                handler.wfile.flush()
                pause.wait(0.05)

    pause = threading.Event()
    for answer, why in ((redirect, "302"), (large, "more than"), (slow, "within")):
        issuer.answer = answer
        began = time.monotonic()
        with pytest.raises(lh.UnavailableError, match=why):
            fetch(issuer.jwks, bytes_max=10_000, seconds_max=0.5)
        assert time.monotonic() - began < 5
    pause.set()
    assert issuer.asked == 4
    with pytest.raises(lh.UnavailableError):
        fetch("https" + issuer.jwks.removeprefix("http"), bytes_max=10, seconds_max=5)  # it speaks no TLS


def test_no_keys_let_nobody_in(checked: Signatures, issuer: Issuer, clock: Clock) -> None:
    for keys in ([], None, {}, ["x"], [jwk_of(RSA, kid="rsa", alg="HS256")], [{**jwk_of(RSA, kid="rsa"), "d": "AQAB"}]):
        issuer.keys = keys  # type: ignore[assignment]
        clock.later += signatures.RETRY_SECONDS + 1
        refused(checked, signed(exp=int(time.time() + clock.later + 600)))
    assert issuer.asked == 6


def test_one_key_needs_no_name(checked: Signatures, issuer: Issuer) -> None:
    issuer.keys = [jwk_of(RSA)]
    assert checked.signed(signed(kid=None))
    refused(checked, signed(STRANGER, kid=None), signed())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("issuer = 'i'\naudience = 'a'", "jwks"),
        ("audience = 'a'", "issuer"),
        ("claim = 'sub'", "issuer"),
        ("issuer = 'i'\naudience = 'a'\njwks = 'http://id.example.org/keys'", "https"),
        ("issuer = 'i'\naudience = 'a'\njwks = 'http://127.0.0.1.evil.org/keys'", "https"),
        ("issuer = 'i'\naudience = 'a'\njwks = 'http://127.0.0.1@evil.org/keys'", "no address"),
        ("issuer = 'i'\naudience = 'a'\njwks = 'file:///etc/passwd'", "no address"),
        ("issuer = 'i'\naudience = 'a'\njwks = 'https://'", "no address"),
        ("issuer = 'i'\naudience = 'a'\njwks = 'https://h/k'\nalgorithms = 'HS256'", "algorithms"),
        ("issuer = 'i'\naudience = 'a'\njwks = 'https://h/k'\nclaim = ''", "claim"),
    ],
)
def test_settings_that_would_let_others_in(text: str, why: str) -> None:
    with pytest.raises(lh.InvalidPropertyError, match=why):
        load(f"[oidc]\n{text}", {}, {})


@pytest.fixture
def host(tmp_path: Path, issuer: Issuer) -> Iterator[ServerHost]:
    toml = f"[oidc]\nissuer = '{ISSUER}'\naudience = '{AUDIENCE}'\njwks = '{issuer.jwks}'"
    made = serve(tmp_path / "data", load(toml, {"LAKEHEAD_TOKEN": "the owner's"}, {"listen": "127.0.0.1:0"}))
    yield made
    made.close()
    assert made.wait_stopped(10)


def test_a_signed_caller_does_what_was_granted(host: ServerHost) -> None:
    with contextlib.ExitStack() as stack:
        owner = stack.enter_context(lh.connect(host.uri, token="the owner's"))
        owner.create_table("shop.orders", pa.schema([("k", pa.int64())])).append([{"k": 1}])
        con = stack.enter_context(lh.connect(host.uri, token=signed()))
        assert con.whoami().principal == "oidc:alice" and con.tables() == []
        owner.grant("read", "shop", to="oidc:alice")
        assert con.table("shop.orders").scan().count() == 1
        with pytest.raises(lh.PermissionDeniedError):
            con.table("shop.orders").append([{"k": 2}])
        again = stack.enter_context(reopened(con))
        assert again.whoami().principal == "oidc:alice"
        for token in (signed(STRANGER), signed(aud="x"), "eyJ.eyJ.x", signed(exp=int(time.time()) - 100)):
            with pytest.raises(lh.AuthenticationError):
                lh.connect(host.uri, token=token)


def test_nobody_else_has_such_a_name(host: ServerHost) -> None:
    with lh.connect(host.uri, token="the owner's") as owner:
        with pytest.raises(lh.InvalidRequestError, match="signed"):
            owner.create_token("oidc:alice")
        owner.create_token("alice")
        with lh.connect(host.uri, token=signed(sub="alice")) as con:
            assert con.whoami().principal == "oidc:alice"


def test_a_token_that_expires_ends_what_it_opened(host: ServerHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signatures, "LEEWAY_SECONDS", 0)
    with lh.connect(host.uri, token=signed(exp=int(time.time()) + 3)) as con:
        assert con.tables() == []
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            try:
                con.tables()
            except lh.AuthenticationError as e:
                assert "expired" in e.message
                return
    raise AssertionError("it still does")


def test_a_server_without_an_issuer_knows_no_signed_tokens(tmp_path: Path) -> None:
    host = serve(tmp_path / "data", ServerConfig(token="the owner's"))
    with pytest.raises(lh.AuthenticationError):
        lh.connect(host.uri, token=signed())
    host.close()
    with pytest.raises(lh.InvalidPropertyError, match="principal's"):
        load(None, {"LAKEHEAD_TOKEN": signed()}, {})
