"""Code and data that differ across hosts, with the files that show it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from drumline.doctor.comparison import Comparison, compare
from drumline.doctor.finding import Finding
from drumline.doctor.machine.folder_hashes import hash_of_files, sort_key
from drumline.text import join_names, memory_size

Facts = Mapping[str, Any]
MAX_FINDINGS = 5


def compare_code(facts: Mapping[str, Facts]) -> tuple[list[Finding], list[Comparison]]:
    """One finding for each code that is not that of most hosts, with the first files that differ."""
    known = _known(facts, "code")
    if not known:
        return [], []
    # Up to where the first host stopped reading, if one did.
    until = min((one["until"] for one in known.values() if one["until"]), key=sort_key, default=None)
    files = {host: _up_to(one["files"], until) for host, one in known.items()}
    row = compare("code", {host: hash_of_files(found) for host, found in files.items()})
    usual = row.groups[0][1]
    findings = []
    for _, hosts in row.groups[1 : MAX_FINDINGS + 1]:
        difference = join_names(_changed_files(files[usual[0]], files[hosts[0]]))
        what = (
            f"the code in {known[hosts[0]]['folder']} differs from that on {join_names(usual)}: {difference}"
        )
        fix = "drumline launch --sync copies the code first; or use git pull or rsync"
        findings.append(Finding("problem", "code", join_names(hosts), what, fix))
    return findings, [row]


def compare_data(facts: Mapping[str, Facts]) -> tuple[list[Finding], list[Comparison]]:
    """One finding for each dataset that is not that of most hosts.

    Where a host could not read all of it in time, the files that all hosts have read are compared."""
    known = _known(facts, "data")
    if not known:
        return [], []
    mark = _common_mark(known)
    keys = {host: _data_key(one, mark) for host, one in known.items()}
    row = compare("data", keys, show=lambda key: str(key[0]))
    usual = row.groups[0][1]
    findings = []
    for _, hosts in row.groups[1 : MAX_FINDINGS + 1]:
        changes = list(_changed_data(known[usual[0]], known[hosts[0]]))
        what = f"the data in {known[hosts[0]]['folder']} differs from that on {join_names(usual)}: "
        what += join_names(changes) or "names or sizes of files differ"
        fix = "copy it again, or mount the same volume"
        findings.append(Finding("problem", "data", join_names(hosts), what, fix))
    if mark is not None:
        where = join_names(host for host, one in known.items() if not one["complete"])
        what = f"the data has too many files to read all of them in a second; the first {mark} were compared"
        findings.append(Finding("note", "data", where, what))
    return findings, [row]


def _known(facts: Mapping[str, Facts], name: str) -> dict[str, Facts]:
    """Of the hosts that have the folder; what the others lack is a finding of their own."""
    found = {host: one.get(name) for host, one in facts.items()}
    return {
        host: one
        for host, one in found.items()
        if one and not one.get("missing") and "unreachable" not in one
    }


def _up_to(files: Mapping[str, str], until: str | None) -> dict[str, str]:
    return {name: short for name, short in files.items() if until is None or sort_key(name) < sort_key(until)}


def _changed_files(usual: Mapping[str, str], other: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(usual.keys() | other.keys(), key=sort_key):
        if name not in other:
            yield f"{name} is missing"
        elif name not in usual:
            yield f"{name} is extra"
        elif usual[name] != other[name]:
            yield f"{name} differs"


def _common_mark(known: Mapping[str, Facts]) -> str | None:
    """Up to how many files all hosts have read, where not all have read everything."""
    if all(one["complete"] for one in known.values()):
        return None
    fewest = min(one["files"] for one in known.values())
    return str(1 << (fewest.bit_length() - 1)) if fewest else "0"


def _data_key(data: Facts, mark: str | None) -> Hashable:
    """What is shown, then what else distinguishes it."""
    if mark is not None:
        return f"the first {mark} files: {data['marks'].get(mark, 'none')}", ""
    shown = f"{data['files']} files, {memory_size(data['bytes'])}, {data['hash']}"
    return shown, data["bytes"], tuple(data["samples"].items())


def _changed_data(usual: Facts, other: Facts) -> Iterator[str]:
    if usual["complete"] and other["complete"]:
        for name in ("files", "bytes"):
            if usual[name] != other[name]:
                yield f"{other[name]} {name} instead of {usual[name]}"
    for name, short in usual["samples"].items():
        if other["samples"].get(name, short) != short:
            yield f"{name} has other content"
