"""The catalogue of messages: every one has a line as a program prints it, and is found in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from drumline.tools.tune.known_messages import (
    KnownMessage,
    MessageCatalogue,
    ReadMessage,
    known_messages,
)
from drumline.tools.tune.nccl_log import PREFIX

LINES = Path(__file__).parents[3] / "data" / "nccl" / "messages.txt"


def recorded_lines() -> list[tuple[str, str]]:
    """Kind and line."""
    lines = [
        line
        for line in LINES.read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    return [(kind, line) for kind, _, line in (text.partition(" | ") for text in lines)]


def read_line(line: str) -> ReadMessage | None:
    prefix = PREFIX.search(line)
    if prefix is None:
        return known_messages().read(line)
    text = line[prefix.end() :]
    if prefix["level"] == "INFO":
        return known_messages().read(text, is_info=True)
    return known_messages().read(f"{prefix['source']}NCCL WARN {text}")


@pytest.mark.parametrize(("kind", "line"), recorded_lines())
def test_a_line_is_known_with_what_to_do(kind: str, line: str) -> None:
    read = read_line(line)
    assert read is not None
    assert read.message.kind == kind
    assert read.what
    assert read.fix
    assert "{" not in read.what + read.fix
    assert "  " not in read.what


def test_every_message_has_a_line() -> None:
    messages = [
        read.message for _, line in recorded_lines() if (read := read_line(line)) is not None
    ]
    missing = [
        message.texts
        for message in known_messages().messages
        if message.role != "harmless" and message not in messages
    ]
    assert missing == []


def test_a_message_uses_only_groups_of_its_pattern() -> None:
    for message in known_messages().messages:
        patterns = [*message.details, *([message.pattern] if message.pattern else [])]
        groups = {name for pattern in patterns for name in pattern.groupindex}
        used = set(re.findall(r"\{(\w+)\}", message.what + message.fix))
        assert used <= groups | {"setting"}, message.kind
        assert set(message.defaults) <= groups, message.kind


def test_texts_are_in_lower_case() -> None:
    """As the line that they are compared with."""
    for message in known_messages().messages:
        assert [text for text in message.texts if text != text.lower()] == []


def test_only_a_condition_explains_others() -> None:
    kinds = {message.kind for message in known_messages().messages}
    for message in known_messages().messages:
        assert not message.explains or message.role == "condition"
        assert set(message.explains) <= kinds | {
            "collective timeout",
            "first collective",
            "exception",
        }, message.kind


def test_the_first_message_of_a_line_is_its_meaning() -> None:
    first = KnownMessage(kind="a", texts=("zebra (x)",), what="", fix="")
    second = KnownMessage(kind="b", texts=("zebra", "ze"), what="", fix="")
    catalogue = MessageCatalogue((first, second))
    kinds = [
        read.message.kind if (read := catalogue.read(line)) else None
        for line in ("a Zebra (x)", "a zebra x", "zebu", "zoo")
    ]
    assert kinds == ["a", "b", "b", None]


def test_an_info_line_of_nccl_is_only_a_condition() -> None:
    text = "Call to connect returned Connection refused, retrying"
    assert known_messages().read(text, is_info=True) is None
    condition = known_messages().read("NCCL_P2P_DISABLE set by environment to 1.", is_info=True)
    assert condition is not None
    assert condition.message.role == "condition"


@pytest.mark.parametrize(
    "line",
    [
        "step 100 loss 0.31 validation error: 0.12",
        "Training:   1%|          | 1/5208 [00:05<8:14:22,  5.70s/batch]",
        "saved the best model, send to device cuda:0",
        "{'timeout': 1800, 'error_handling': 'raise', 'rank': 3}",
        "tokens 1234 memory 70 GB, no gradient overflow",
        "Using network interface eth0 for logging",
    ],
)
def test_an_ordinary_line_is_no_message(line: str) -> None:
    read = known_messages().read(line)
    assert read is None or read.message.role == "harmless"
