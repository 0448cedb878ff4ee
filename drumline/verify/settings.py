"""The files that say what a run is and where it runs: config.toml and environment.json can be read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drumline.engine.run_folder import RunFolder
from drumline.untrusted import DOCUMENT_BYTES, TEXT_BYTES, parse_json, parse_toml, read_regular
from drumline.verify.findings import Part


def check_settings(folder: RunFolder, part: Part) -> tuple[dict[int, str], list[str]]:
    """Returns the host of each rank of the latest start, and the files that are not there, of which nothing is told."""
    paths = (folder.config_file, folder.environment_file)
    missing = [path.name for path in paths if not os.path.lexists(path)]
    settings = _load(folder.config_file, parse_toml, part)
    environment = _load(folder.environment_file, parse_json, part)
    part.counts = {"readable": (settings is not None) + (environment is not None)}
    part.summary = (
        "config.toml and environment.json can be read"
        if part.counts["readable"] == 2
        else "cannot all be read"
    )
    try:
        return {int(entry["rank"]): str(entry["host"]) for entry in (environment or {})["ranks"]}, missing
    except (KeyError, TypeError, ValueError, OverflowError):
        if environment is not None:
            part.problem(folder.environment_file.name, "does not say which ranks ran where")
        return {}, missing


def tell_missing(missing: list[str], part: Part, *, expected: set[str], is_at_work: bool) -> None:
    """environment.json is written before a job reports its start, config.toml after its first step."""
    for name in missing:
        if is_at_work:
            part.note(name, "is not there yet: a job is starting")
        elif name in expected:
            part.problem(name, "is missing")
        else:
            part.note(name, "is not there: the job ended, or was killed, before its first step")
    if missing and not part.problems:
        part.summary = "not written yet" if is_at_work else "not written"


def _load(path: Path, parse: Callable[[str], Any], part: Part) -> dict[str, Any] | None:
    try:
        most = TEXT_BYTES if path.suffix == ".toml" else DOCUMENT_BYTES
        content = parse(read_regular(path, most=most).decode())
    except FileNotFoundError:
        return None
    except OSError as error:
        part.problem(path.name, f"cannot be read: {error.strerror}")
    except ValueError as error:
        part.problem(path.name, f"is damaged: {error}")
    else:
        if isinstance(content, dict):
            return content
        part.problem(path.name, "is damaged: it holds no settings")
    return None
