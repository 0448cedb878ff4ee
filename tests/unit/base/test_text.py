"""Text for messages."""

from __future__ import annotations

import pytest

from drumline.base.text import without_credentials

SECRETS = {
    'Could not connect to the endpoint URL: "https://s3.example/b?sig=SECRET"': (
        'Could not connect to the endpoint URL: "https://s3.example/b?***"'
    ),
    'Could not connect to the endpoint URL: "https://me:SECRET@s3.example/b": ask admin@example.com': (
        'Could not connect to the endpoint URL: "https://***@s3.example/b": ask admin@example.com'
    ),
    "Custom endpoint `ftp://me:SECRET@10.0.0.1:9` was not a valid URI": (
        "Custom endpoint `ftp://***@10.0.0.1:9` was not a valid URI"
    ),
    "s3://KEY:123/SECRET@bucket/runs is not there": "s3://***@bucket/runs is not there",
    "https://me:SECRET@a/x?sig=SECRET and https://b/y": "https://***@a/x?*** and https://b/y",
    "`https://me:SECRET SECRET@a/x`": "`https://***@a/x`",
    "'https://me:SEC'RET@a/x'": "'https://***@a/x'",
    # An `@` in options, or a question mark in a password: where the host begins is unknown.
    "https://a/x?user=me@b&sig=SECRET refused": "https://*** refused",
    "https://me:SEC?RET@a/x refused": "https://*** refused",
    'Could not connect to "https://s3.example/", mail admin@example.com?': (
        'Could not connect to "https://s3.example/", mail admin@example.com?'
    ),
}


@pytest.mark.parametrize(("text", "shown"), SECRETS.items())
def test_an_address_keeps_its_host_and_loses_its_secrets(text: str, shown: str) -> None:
    assert without_credentials(text) == shown
