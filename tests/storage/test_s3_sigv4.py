"""The signature, against the examples Amazon publishes for S3."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from sapwood.storage.s3.sigv4 import Credentials, payload_hash, signed

KEY = Credentials(
    access_key="AKIAIOSFODNN7EXAMPLE", secret_key="wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
)
CASES = {
    "get a range": (
        ("GET", "/test.txt", [], {"Range": "bytes=0-9"}, b""),
        "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
    ),
    "put": (
        (
            "PUT",
            "/test$file.text",
            [],
            {
                "Date": "Fri, 24 May 2013 00:00:00 GMT",
                "x-amz-storage-class": "REDUCED_REDUNDANCY",
            },
            b"Welcome to Amazon S3.",
        ),
        "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
    ),
    "a query without a value": (
        ("GET", "/", [("lifecycle", "")], {}, b""),
        "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543",
    ),
    "a query, in any order": (
        ("GET", "/", [("prefix", "J"), ("max-keys", "2")], {}, b""),
        "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_published_examples(case: str) -> None:
    (method, path, query, headers, body), expected = CASES[case]
    sent = signed(
        method=method,
        host="examplebucket.s3.amazonaws.com",
        path=path,
        query=query,
        headers=headers,
        body_hash=payload_hash(body),
        credentials=KEY,
        region="us-east-1",
        now=datetime(2013, 5, 24, tzinfo=UTC),
    )
    assert sent["authorization"].endswith(f"Signature={expected}")
    assert "20130524/us-east-1/s3/aws4_request" in sent["authorization"]


def test_a_lent_session_is_signed_with_its_token() -> None:
    lent = Credentials(access_key="a", secret_key="b", token="c")
    sent = signed(
        method="GET",
        host="h",
        path="/",
        headers={},
        body_hash=payload_hash(b""),
        credentials=lent,
        region="r",
    )
    assert sent["x-amz-security-token"] == "c"
    assert "x-amz-security-token" in sent["authorization"]


def test_secrets_are_not_shown() -> None:
    assert "EXAMPLEKEY" not in repr(KEY)
