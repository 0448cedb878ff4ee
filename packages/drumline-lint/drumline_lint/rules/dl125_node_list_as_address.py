"""DL125: a list of nodes is used as an address."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.allocation import started_on_nodes
from drumline_lint.reading.environment import variable
from drumline_lint.reading.launchers import PYTHON, Launch, launches
from drumline_lint.reading.rendezvous import address_flag, least_nodes
from drumline_lint.reading.shell import Script, TextRange
from drumline_lint.reading.shell_parser import Kind, Word

RULE = rule("DL125")
_SUBMIT_HOST = "SLURM_SUBMIT_HOST"
_LISTS = {_SUBMIT_HOST, "SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST"}
_ALL_HOSTS = re.compile(r"\$\(\s*scontrol show hostnames?\b[^|]*\)")
# The first name of `node[07-10]` or `node7,node9`, as if it were always the second.
_CUT_AT_COMMA = re.compile(
    r"\$\{(SLURM_\w*NODELIST)%%,\*\}"
    r"|[$`]\(?\s*echo \"?\$\{?(SLURM_\w*NODELIST)\}?\"?\s*\|\s*"
    r"(?:cut (?:-d *[\"']?,[\"']? *-f *1|-f *1 *-d *[\"']?,[\"']?)|awk -F *[\"']?,[\"']? *'\{ *print \$1 *\}')\s*[)`]"
)


def check_shell(script: Script) -> Iterator[Finding]:
    reported: set[int] = set()
    for launch in launches(script):
        for place, address in _addresses(launch):
            written = _node_list(launch.script, address)
            if written and _has_several_nodes(launch) and place.start not in reported:
                reported.add(place.start)
                what = "a list of nodes such as gpu[07-10], not the address of one"
                if written == f"${_SUBMIT_HOST}":
                    what = "the host on which sbatch was called, and no rank runs there"
                message = f"{written} is {what}"
                yield RULE.at(script, place, message)


def _has_several_nodes(launch: Launch) -> bool:
    """With one node, the list is its name."""
    nodes = least_nodes(launch) if launch.kind != PYTHON else started_on_nodes(launch)
    return (nodes or 1) > 1


def _addresses(launch: Launch) -> Iterator[tuple[TextRange, Word]]:
    flag = address_flag(launch)
    if flag is not None and flag.value is not None:
        yield flag.word, flag.value
    address = variable(launch, "MASTER_ADDR") if launch.kind == PYTHON else None
    if address is not None:
        yield address.assignment, address.assignment.value


def _node_list(script: Script, word: Word, depth: int = 0) -> str:
    """What stands for the list in a word; empty if it has none."""
    if not word.pieces:
        return ""
    piece = word.pieces[0]
    if piece.kind is Kind.UNKNOWN:
        name = re.fullmatch(r"\$\{(\w+)\}", piece.text)
        is_list = _ALL_HOSTS.fullmatch(piece.text) or (name and name[1] in _LISTS)
        is_list = is_list or _CUT_AT_COMMA.fullmatch(piece.text)
        return piece.text if is_list else ""
    if piece.kind is not Kind.VARIABLE:
        return ""
    if piece.text in _LISTS:
        return f"${piece.text}"
    assigned = script.variables.get(piece.text, [])
    # `$NAME` of an array is its first word.
    is_value = len(assigned) == 1 and assigned[0].items is None and depth < 4
    return _node_list(script, assigned[0].value, depth + 1) if is_value else ""
