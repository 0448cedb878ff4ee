"""DL142: a script looks at the exit code of another command than its training."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.launchers import launches
from drumline_lint.reading.shell import Script
from drumline_lint.reading.shell_parser import Word

RULE = rule("DL142")
# Each character has one way to match: two would take exponential time.
_REDIRECTS = r"(?:\\\r?\n|>&\d|&>|[^\n|;&\\])*"
_PIPE = re.compile(rf"{_REDIRECTS}\|&?(?!\|)[ \t]*(?P<last>\w+){_REDIRECTS}")
_PRINTS = re.compile(rf"{_REDIRECTS}[;\n]\s*(?P<last>echo|date|printf)\b{_REDIRECTS}")
_COMMENTS = r"(?:\s|#[^\n]*\n)*"
_STATUS = (
    rf"{_COMMENTS}(?:if\b[^\n$]*\$\?|\w+=\"?\$\?|\[+[ \t]+\"?\$\?|exit[ \t]+\"?\$\?|\(\([ \t]*\$\?)"
)
_READS_STATUS = re.compile(rf"[;\n]{_STATUS}")
_READS_PIPE = re.compile(rf"[ \t]*(?:&&|\|\|)|[;\n]{_STATUS}")


def check_shell(script: Script) -> Iterator[Finding]:
    if script.container is not None or re.search("pipefail|PIPESTATUS|pipestatus", script.text):
        return
    for launch in launches(script):
        if launch.script is not script:
            continue
        end = launch.command.end
        for pattern, reader in ((_PIPE, _READS_PIPE), (_PRINTS, _READS_STATUS)):
            after = pattern.match(script.text, end)
            reading = reader.match(script.text, after.end()) if after else None
            if after is not None and reading is not None:
                place = Word(reading.end() - len(reading[0].split()[-1]), reading.end(), ())
                message = f"this is the exit code of {after['last']}: it is 0 when the training fails, too"
                yield RULE.at(script, place, message)
                break
