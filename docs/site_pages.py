"""A hook of mkdocs: a page for each rule of the linter; links that leave `docs/` go to such a page or
to the file in the repository; fences have no notes for the tests, which are no part of a fence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
RULES_FILE = "packages/drumline-lint/drumline_lint/rules/rules.md"
LINK_TO_RULE = re.compile(rf"\]\(\.\./{re.escape(RULES_FILE)}#(dl[0-9]+)-[a-z-]+\)")
LINK_OUTSIDE = re.compile(r"\]\(\.\./([^)\s]+)\)")
NOTE_OF_FENCE = re.compile(r"^(```\w+) .+$", re.MULTILINE)


def on_files(files: Files, *, config: Any) -> Files:
    _, *sections = re.split(r"^### ", (ROOT / RULES_FILE).read_text(), flags=re.MULTILINE)
    for section in sections:
        number = section.split()[0].lower()
        page = File.generated(config, f"lint/{number}.md", content=f"# {section}")
        files.append(page)
    return files


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    markdown = NOTE_OF_FENCE.sub(r"\1", markdown)
    markdown = LINK_TO_RULE.sub(r"](lint/\1.md)", markdown)
    return LINK_OUTSIDE.sub(rf"]({config['repo_url']}/blob/main/\1)", markdown)
