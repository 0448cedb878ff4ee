"""Actions in workflows, ours and those that docs suggest, are pinned by commit: whoever owns one
can move its tags."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ACTION = re.compile(r"^\s*-?\s*uses:\s*(\S+)", re.MULTILINE)
# A page cannot name the commit that it is in: the reader puts it there.
PINNED = re.compile(r"[\w./-]+@[0-9a-f]{40}|OWNER/drumline/[\w./-]+@COMMIT")


def test_every_action_is_pinned_by_its_commit() -> None:
    files = [
        *ROOT.glob(".github/workflows/*.yml"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("packages/*/README.md"),
        *ROOT.glob("packages/*/action.yml"),
    ]
    actions = [
        action for file in files for action in ACTION.findall(file.read_text(encoding="utf-8"))
    ]
    assert len(actions) >= 4
    assert [action for action in actions if not PINNED.fullmatch(action)] == []
