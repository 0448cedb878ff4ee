"""A hook of mkdocs: links that leave `docs/` go to the file in the repository."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    return re.sub(r"\]\(\.\./([^)\s]+)\)", rf"]({config['repo_url']}/blob/main/\1)", markdown)
