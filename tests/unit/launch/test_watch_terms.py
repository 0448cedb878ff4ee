"""What ranks are told of the watch."""

from __future__ import annotations

from pathlib import Path

import pytest

from drumline.errors import UsageError
from drumline.launch import watch_terms
from drumline.launch.watch_terms import ScriptWatch, WatchTerms, watch_terms_from
from drumline.net import secrets
from drumline.net.secrets import new_secret


def test_under_another_launcher_nothing_is_told() -> None:
    terms = watch_terms_from({})
    assert terms == WatchTerms()
    assert (terms.folder, terms.secret, terms.nodes, terms.run) == (None, None, (), None)
    assert (terms.on_hang, terms.hang_s) == ("restart", None)


def test_what_is_told_is_read_and_the_secret_is_not_shown() -> None:
    secret = new_secret()
    terms = watch_terms_from(
        {
            watch_terms.FOLDER: "/dev/shm/x",
            secrets.VARIABLE: secret,
            watch_terms.NODES: "10.0.0.1:4000,fe80::1:4001",
            **ScriptWatch(run="/runs/a", on_hang="stop", hang_s=7.5).variables(),
        }
    )
    assert terms == WatchTerms(
        folder=Path("/dev/shm/x"),
        secret=secrets.derived(secret, "sidecars"),
        nodes=(("10.0.0.1", 4000), ("fe80::1", 4001)),
        run=Path("/runs/a"),
        on_hang="stop",
        hang_s=7.5,
    )
    assert terms.secret is not None
    assert terms.secret not in repr(terms)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (watch_terms.NODES, "a", "DRUMLINE_WATCH_NODES has 'a', which is not ADDRESS:PORT"),
        (watch_terms.NODES, "a:1,b:70000", "DRUMLINE_WATCH_NODES has 'b:70000', which is not ADDRESS:PORT"),
        (watch_terms.ON_HANG, "wait", "DRUMLINE_WATCH_ON_HANG is 'wait', not one of restart, stop, report"),
        (watch_terms.HANG_S, "long", "DRUMLINE_WATCH_HANG_S is 'long', which is not a number of seconds"),
        (watch_terms.HANG_S, "-1", "DRUMLINE_WATCH_HANG_S is '-1', which is not a number of seconds"),
    ],
)
def test_what_cannot_be_read_is_said(name: str, value: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        watch_terms_from({name: value})
    assert str(caught.value) == message
