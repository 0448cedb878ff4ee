"""Both sides prove that they have the secret: a proof fits one role, one pair of nodes and one
connection."""

from __future__ import annotations

from typing import Any

import pytest

from drumline.net.frames import FrameError, Message
from drumline.net.handshake import (
    NOT_TAKEN,
    UNKNOWN_NODE,
    WRONG_SECRET,
    Agreed,
    Handshake,
    RefusedError,
    answer,
    dial,
)

SECRET = b"a secret of these tests"


def shake(dialler: Handshake, listener: Handshake, **changes: Any) -> tuple[Agreed, Agreed]:
    """`changes`: to the first message, on its way."""
    next(listener)
    challenge = listener.send({**_sent(next(dialler)), **changes})
    proof = dialler.send(_sent(challenge))
    with pytest.raises(StopIteration) as listened:
        listener.send(_sent(proof))
    heard: Agreed = listened.value.value
    with pytest.raises(StopIteration) as dialled:
        dialler.send(_sent(heard.last))
    return dialled.value.value, heard


def _sent(message: Message | None) -> Message:
    assert message is not None
    return message


def test_both_sides_agree_on_who_is_there_and_on_keys() -> None:
    dialled, heard = shake(dial(SECRET, "watch", 1, 0, nodes=2), answer(SECRET, "watch", 0, {1}))
    assert (dialled.node, heard.node) == (0, 1)
    line = dialled.session.encode({"number": 1}).removesuffix(b"\n")
    assert heard.session.decode(line) == {"number": 1}
    second_dial, _ = shake(dial(SECRET, "watch", 1, 0), answer(SECRET, "watch", 0, {1}))
    with pytest.raises(FrameError, match="wrong seal"):
        heard.session.decode(second_dial.session.encode({"number": 2}).removesuffix(b"\n"))


def test_without_a_secret_lines_are_plain() -> None:
    dialled, heard = shake(dial(None, "doctor", 1, 0), answer(None, "doctor", 0, {1}))
    assert dialled.session.encode({"number": 1}) == b'{"number":1}\n'
    assert heard.last == {"proof": None}


@pytest.mark.parametrize("changes", [{"node": 2}, {"nodes": 3}, {"more": 1}, {"nonce": "0" * 32}])
def test_a_proof_is_over_all_of_the_first_message(changes: dict[str, Any]) -> None:
    with pytest.raises(
        RefusedError, match=r"DRUMLINE_SECRET of node \d differs from that of node 0"
    ):
        shake(dial(SECRET, "watch", 1, 0, nodes=2), answer(SECRET, "watch", 0, {1, 2}), **changes)


@pytest.mark.parametrize(
    ("dialler", "listener", "kind"),
    [
        ((b"other", "watch", 1, 0), (SECRET, "watch", 0, {1}), WRONG_SECRET),
        ((None, "watch", 1, 0), (SECRET, "watch", 0, {1}), WRONG_SECRET),
        ((SECRET, "watch", 1, 0), (None, "watch", 0, {1}), WRONG_SECRET),
        ((SECRET, "doctor", 1, 0), (SECRET, "watch", 0, {1}), UNKNOWN_NODE),
        ((SECRET, "watch", 1, 2), (SECRET, "watch", 0, {1}), UNKNOWN_NODE),
        ((SECRET, "watch", 3, 0), (SECRET, "watch", 0, {1}), UNKNOWN_NODE),
    ],
)
def test_who_does_not_fit_is_refused(dialler: Any, listener: Any, kind: str) -> None:
    with pytest.raises(FrameError) as caught:
        shake(dial(*dialler), answer(*listener))
    assert caught.value.kind == kind


def test_a_proof_that_is_sent_back_proves_nothing() -> None:
    dialler = dial(SECRET, "watch", 1, 0)
    next(dialler)
    proof = dialler.send({"nonce": "0" * 32})
    with pytest.raises(FrameError) as caught:
        dialler.send(_sent(proof))
    assert caught.value.kind == WRONG_SECRET


def test_who_is_refused_learns_why() -> None:
    dialler = dial(SECRET, "watch", 1, 0)
    next(dialler)
    with pytest.raises(RefusedError, match="there is a node 1 already") as caught:
        dialler.send({"refused": "there is a node 1 already", "next": ["no text"]})
    assert (caught.value.kind, caught.value.next_step) == (NOT_TAKEN, None)
