"""Requests are signed as AWS says, policies open one folder, answers that are none are typed errors without secrets."""

from __future__ import annotations

import datetime as dt
import http.server
import json
import threading
from collections.abc import Iterator
from urllib.parse import parse_qs

import pytest

from lakehead.errors import InvalidPropertyError, UnavailableError
from lakehead.iceberg.sts import S3Keys, assume_role, read_policy, signed_headers

ROLE = "arn:aws:iam::1:role/readers"
KEYS = S3Keys("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY")


def test_the_signature_is_that_of_the_example_in_the_specification() -> None:
    at = dt.datetime(2015, 8, 30, 12, 36, tzinfo=dt.UTC).timestamp()
    address = "https://iam.amazonaws.com/?Action=ListUsers&Version=2010-05-08"
    got = signed_headers(address, b"", KEYS, region="us-east-1", service="iam", now=at, method="GET")
    assert got["X-Amz-Date"] == "20150830T123600Z"
    assert got["Authorization"] == (
        "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/us-east-1/iam/aws4_request,"
        " SignedHeaders=content-type;host;x-amz-date,"
        " Signature=5d672d79c15b13162d9279b0855cfba6789a8edb4c82c400e06b5924a6f2b5d7"
    )
    with_token = signed_headers(address, b"", S3Keys("a", "b", "t"), region="r", service="s", now=at)
    assert with_token["X-Amz-Security-Token"] == "t" and "x-amz-security-token" in with_token["Authorization"]


def test_a_policy_opens_one_folder_for_reading() -> None:
    files, names = json.loads(read_policy("arn:aws-cn:iam::1:role/r", "lake", "w/shop/t$changelog-1"))["Statement"]
    assert files["Action"] == ["s3:GetObject"] and files["Resource"] == ["arn:aws-cn:s3:::lake/w/shop/t$changelog-1/*"]
    assert names["Action"] == ["s3:ListBucket"] and names["Resource"] == ["arn:aws-cn:s3:::lake"]
    assert names["Condition"] == {"StringLike": {"s3:prefix": ["w/shop/t$changelog-1/*"]}}
    for bucket, folder in (("lake", ""), ("", "t"), ("lake", "a*"), ("lake", "a?b"), ("lake", "${aws:username}")):
        with pytest.raises(InvalidPropertyError):
            read_policy(ROLE, bucket, folder)


class Sts(http.server.BaseHTTPRequestHandler):
    """Answers what it is told to."""

    status, answer, asked = 200, b"", b""

    def do_POST(self) -> None:
        Sts.asked = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(Sts.status)
        self.send_header("Content-Length", str(len(Sts.answer)))
        self.end_headers()
        self.wfile.write(Sts.answer)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def sts() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Sts) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def assumed(sts: str, status: int, answer: bytes) -> tuple[str, float]:
    Sts.status, Sts.answer = status, answer
    got = assume_role(sts, ROLE, "{}", KEYS, name="n", seconds=900, region="us-east-1", now=1e9)
    return got.keys.token, got.expires


def test_a_session_is_asked_for_and_read(sts: str) -> None:
    given = b"<AccessKeyId>a</AccessKeyId><SecretAccessKey>b</SecretAccessKey><SessionToken>c</SessionToken>"
    end = b"<Expiration>2001-09-09T02:46:40Z</Expiration>"
    made = b"<R xmlns='https://sts.amazonaws.com/doc/2011-06-15/'><Credentials>" + given + end + b"</Credentials></R>"
    assert assumed(sts, 200, made) == ("c", 1e9 + 3600)
    asked = {k: v[0] for k, v in parse_qs(Sts.asked.decode()).items()}
    assert asked["Action"] == "AssumeRole" and asked["RoleArn"] == ROLE and asked["DurationSeconds"] == "900"
    for status, answer in (
        (403, made),
        (200, b""),
        (200, b"<R/>"),
        (200, made.replace(b"2001-", b"soon")),
        (200, b"<"),
    ):
        with pytest.raises(UnavailableError) as refused:
            assumed(sts, status, answer)
        assert KEYS.secret not in str(refused.value)
    assert KEYS.secret not in repr(KEYS)
