"""Code and data that differ between hosts, by the files that tell it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from drumline.doctor.differences.groups import Row, row_of
from drumline.doctor.finding import Finding
from drumline.doctor.machine.code_hash import hash_of_files
from drumline.doctor.machine.tree import place_of
from drumline.text import join_names, memory_size

Facts = Mapping[str, Mapping[str, Any]]
MOST_FINDINGS = 5


def compare_code(facts: Facts) -> tuple[list[Finding], list[Row]]:
    """A line for each other code than most hosts have, with the first files that differ."""
    known = _known(facts, "code")
    if not known:
        return [], []
    files = {host: _up_to(one, _shortest(known)) for host, one in known.items()}
    row = row_of("code", {host: hash_of_files(found) for host, found in files.items()})
    usual = row.groups[0][1]
    findings = [
        Finding(
            level="problem",
            check="code",
            where=join_names(hosts),
            what=f"other code in {known[hosts[0]]['folder']} than on {join_names(usual)}: "
            + _difference(files[usual[0]], files[hosts[0]]),
            fix="drumline launch --sync copies the code first; or git pull, or rsync it there",
        )
        for _, hosts in row.groups[1 : MOST_FINDINGS + 1]
    ]
    return findings, [row]


def compare_data(facts: Facts) -> tuple[list[Finding], list[Row]]:
    """A line for each other dataset than most hosts have. Where a tree was too large to look at all of it, the files
    that all hosts have looked at are compared."""
    known = _known(facts, "data")
    if not known:
        return [], []
    mark = _common_mark(known)
    row = row_of(
        "data", {host: _data_key(one, mark) for host, one in known.items()}, show=lambda key: str(key[0])
    )
    usual = row.groups[0][1]
    findings = [
        Finding(
            level="problem",
            check="data",
            where=join_names(hosts),
            what=f"other data in {known[hosts[0]]['folder']} than on {join_names(usual)}: "
            + _data_difference(known[usual[0]], known[hosts[0]]),
            fix="copy it there again, or mount the same volume",
        )
        for _, hosts in row.groups[1 : MOST_FINDINGS + 1]
    ]
    if mark is not None:
        findings.append(_looked_at_in_part(known, mark))
    return findings, [row]


def _known(facts: Facts, name: str) -> dict[str, Mapping[str, Any]]:
    """Of the hosts that could tell; what the others lack is told of each by itself."""
    found = {host: one.get(name) for host, one in facts.items()}
    return {
        host: one for host, one in found.items() if one and not one.get("missing") and "silent" not in one
    }


def _shortest(known: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Where the first host stopped looking, if one did."""
    return min((one["until"] for one in known.values() if one["until"]), key=place_of, default=None)


def _up_to(code: Mapping[str, Any], until: str | None) -> dict[str, str]:
    files: dict[str, str] = code["files"]
    if until is None:
        return files
    return {name: short for name, short in files.items() if place_of(name) < place_of(until)}


def _difference(usual: Mapping[str, str], other: Mapping[str, str]) -> str:
    changes = []
    for name in sorted(usual.keys() | other.keys(), key=place_of):
        if name not in other:
            changes.append(f"{name} is missing")
        elif name not in usual:
            changes.append(f"{name} is extra")
        elif usual[name] != other[name]:
            changes.append(f"{name} differs")
    return join_names(changes)


def _common_mark(known: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Up to how many files all hosts have looked, where not all have looked at everything."""
    if all(one["complete"] for one in known.values()):
        return None
    fewest = min(one["files"] for one in known.values())
    return str(1 << (fewest.bit_length() - 1)) if fewest else "0"


def _data_key(data: Mapping[str, Any], mark: str | None) -> Hashable:
    """First what is shown of it, then what tells it from others."""
    if mark is not None:
        return f"the first {mark} files: {data['marks'].get(mark, 'none')}", ""
    shown = f"{data['files']} files, {memory_size(data['bytes'])}, {data['hash']}"
    return shown, data["bytes"], tuple(data["samples"].items())


def _data_difference(usual: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    said = list(_said(usual, other))
    changed = [
        f"{name} has other content"
        for name, short in usual["samples"].items()
        if name in other["samples"] and other["samples"][name] != short
    ]
    return join_names(said + changed) or "names or sizes of files differ"


def _said(usual: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    if not (usual["complete"] and other["complete"]):
        return
    if usual["files"] != other["files"]:
        yield f"{other['files']} files instead of {usual['files']}"
    if usual["bytes"] != other["bytes"]:
        yield f"{other['bytes']} bytes instead of {usual['bytes']}"


def _looked_at_in_part(known: Mapping[str, Mapping[str, Any]], mark: str) -> Finding:
    part = [host for host, one in known.items() if not one["complete"]]
    return Finding(
        level="note",
        check="data",
        where=join_names(part),
        what=f"the data has too many files to look at all of them in a second; the first {mark} were compared",
    )
