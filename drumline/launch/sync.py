from __future__ import annotations

from typing import Any


def sync_folder(*a: Any, **k: Any) -> None: ...
