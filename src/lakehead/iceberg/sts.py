"""Short-lived credentials of S3 that open one folder for reading: `AssumeRole` of an STS, with a session policy.

What a role may do, and what the policy of a session allows, the session may do: never more than either.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlencode, urlsplit
from xml.etree import ElementTree

from lakehead.env.https import fetch
from lakehead.errors import InvalidPropertyError, UnavailableError

_ANSWER_BYTES_MAX = 64 << 10
_ANSWER_SECONDS_MAX = 20.0
_ARN = re.compile(r"arn:(?P<partition>[a-z0-9-]+):iam::[^:]*:role/.+")
_REGION_OF_HOST = re.compile(r"sts\.([a-z0-9-]+)\.amazonaws\.com(?:\.cn)?")
_NOT_IN_POLICIES = re.compile(r'[*?"\\]|\$\{')
_FORM = "application/x-www-form-urlencoded; charset=utf-8"


@dataclass(frozen=True)
class S3Keys:
    """What signs requests."""

    key_id: str
    secret: str
    token: str = ""

    def __repr__(self) -> str:
        return f"S3Keys(key_id={self.key_id!r})"


@dataclass(frozen=True)
class Session:
    """Keys that end.

    Attributes:
        expires: when, in seconds since 1970.
    """

    keys: S3Keys
    expires: float


def read_policy(role: str, bucket: str, folder: str) -> str:
    """The session policy that opens the files in a folder of a bucket for reading, and nothing else.

    Args:
        role: its ARN, which says in which partition of AWS it is.

    Raises:
        InvalidPropertyError: the address means more than one folder where a policy has it.
    """
    folder = folder.strip("/")
    if not bucket or not folder or _NOT_IN_POLICIES.search(bucket + folder):
        raise InvalidPropertyError(
            f"readers of s3://{bucket}/{folder} cannot be given credentials for it alone: a folder of its own, without"
            " wildcards in its name, is needed"
        )
    found = _ARN.fullmatch(role)
    arn = f"arn:{found['partition'] if found else 'aws'}:s3:::{bucket}"
    files = {"Effect": "Allow", "Action": ["s3:GetObject"], "Resource": [f"{arn}/{folder}/*"]}
    # A file that is gone is told from one that is forbidden by who may list its folder.
    below = {"StringLike": {"s3:prefix": [f"{folder}/*"]}}
    names = {"Effect": "Allow", "Action": ["s3:ListBucket"], "Resource": [arn], "Condition": below}
    return json.dumps({"Version": "2012-10-17", "Statement": [files, names]}, separators=(",", ":"))


def assume_role(
    endpoint: str, role: str, policy: str, keys: S3Keys, *, name: str, seconds: int, region: str, now: float
) -> Session:
    """A session of a role.

    Args:
        name: of the session, for the logs of the store.
        now: seconds since 1970.

    Raises:
        UnavailableError: STS does not answer, or refuses; the message has no secret.
    """
    asked = {
        "Action": "AssumeRole",
        "Version": "2011-06-15",
        "RoleArn": role,
        "RoleSessionName": name,
        "DurationSeconds": str(seconds),
        "Policy": policy,
    }
    body = urlencode(asked, quote_via=quote).encode()
    in_host = _REGION_OF_HOST.fullmatch(urlsplit(endpoint).hostname or "")
    signed = signed_headers(endpoint, body, keys, region=in_host[1] if in_host else region, service="sts", now=now)
    answer = fetch(
        endpoint,
        bytes_max=_ANSWER_BYTES_MAX,
        seconds_max=_ANSWER_SECONDS_MAX,
        body=body,
        headers={**signed, "Content-Type": _FORM, "Accept": "application/xml"},
    )
    try:
        told = {e.tag.rpartition("}")[2]: (e.text or "").strip() for e in ElementTree.fromstring(answer).iter()}
        given = S3Keys(told["AccessKeyId"], told["SecretAccessKey"], told["SessionToken"])
        expires = dt.datetime.fromisoformat(told["Expiration"]).timestamp()
    except (ElementTree.ParseError, KeyError, ValueError) as e:
        raise UnavailableError(f"{endpoint} answers no credentials: {type(e).__name__}", address=endpoint) from None
    return Session(given, expires)


def signed_headers(
    address: str, body: bytes, keys: S3Keys, *, region: str, service: str, now: float, method: str = "POST"
) -> dict[str, str]:
    """The headers that sign a form, by AWS's signature version 4."""
    parts = urlsplit(address)
    at = dt.datetime.fromtimestamp(now, dt.UTC).strftime("%Y%m%dT%H%M%SZ")
    headers = {"content-type": _FORM, "host": parts.netloc, "x-amz-date": at}
    if keys.token:
        headers["x-amz-security-token"] = keys.token
    names = ";".join(sorted(headers))
    plain = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    request = "\n".join([method, parts.path or "/", parts.query, plain, names, hashlib.sha256(body).hexdigest()])
    scope = f"{at[:8]}/{region}/{service}/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", at, scope, hashlib.sha256(request.encode()).hexdigest()])
    key = b"AWS4" + keys.secret.encode()
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    credential = f"Credential={keys.key_id}/{scope}, SignedHeaders={names}, Signature={signature}"
    sent: Mapping[str, str] = {"X-Amz-Date": at, "Authorization": f"AWS4-HMAC-SHA256 {credential}"}
    return {**sent, **({"X-Amz-Security-Token": keys.token} if keys.token else {})}
