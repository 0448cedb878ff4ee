"""What is wrong with the folders of a run on one machine: where it would be kept, its code and its data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from drumline.doctor.finding import Finding, Level
from drumline.text import GIB, memory_size

DISK_FULL = GIB
DISK_LOW = 10 * GIB
FEWEST_NAMES = 1000
NOT_KEPT = {
    "tmpfs": "in memory, and gone with the machine",
    "overlay": "in the container's own layer, and gone with it",
}


def folder_findings(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Of one host's facts."""
    yield from _disk(facts)
    yield from _named_folders(facts)


def _disk(facts: Mapping[str, Any]) -> Iterator[Finding]:
    disk, host = facts["disk"], facts["host"]
    if "silent" in disk:
        yield _of_disk(
            host,
            "problem",
            f"the file system of {disk['folder']} does not answer: {disk['silent']}",
            "see whether its server is there (mount, dmesg)",
        )
        return
    if disk["error"]:
        yield _of_disk(
            host,
            "problem",
            f"nothing can be written to {disk['parent']}, where the run would be kept: {disk['error']}",
            "give a folder that is yours, as in --run PATH",
        )
    elif disk["free_bytes"] < DISK_LOW:
        yield _of_disk(
            host,
            "problem" if disk["free_bytes"] < DISK_FULL else "warning",
            f"{memory_size(disk['free_bytes'])} are free at {disk['parent']}, where the run would be kept",
            "make room, or give a folder elsewhere, as in --run PATH",
        )
    if disk["free_files"] is not None and disk["free_files"] < FEWEST_NAMES:
        yield _of_disk(
            host,
            "problem",
            f"the disk of {disk['parent']} has room for {disk['free_files']} more files only",
            "delete what is not needed (df -i shows it)",
        )
    if disk["file_system"] in NOT_KEPT:
        yield _of_disk(
            host,
            "note",
            f"the run would be kept {NOT_KEPT[disk['file_system']]} ({disk['parent']} is {disk['file_system']})",
            "give a folder on a disk or a volume, as in --run PATH",
        )


def _of_disk(host: str, level: Level, what: str, fix: str) -> Finding:
    return Finding(level=level, check="disk", where=host, what=what, fix=fix)


def _named_folders(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """The code and the data that were named."""
    for name, flag in (("code", "--code"), ("data", "--data")):
        found = facts[name]
        reason = (
            "" if found is None else found.get("silent") or ("it is not there" if found["missing"] else "")
        )
        if reason:
            yield Finding(
                level="problem",
                check=name,
                where=facts["host"],
                what=f"the {name} in {found['folder']} cannot be looked at: {reason}",
                fix=f"copy or mount it there, or name another folder with {flag}",
            )
        elif name == "data" and found is not None and not found["files"]:
            yield Finding(
                level="problem",
                check=name,
                where=facts["host"],
                what=f"the data folder {found['folder']} holds no files",
                fix="copy the data there, or see whether its volume is mounted",
            )
