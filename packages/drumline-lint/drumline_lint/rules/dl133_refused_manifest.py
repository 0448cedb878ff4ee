"""DL133: a manifest that Kubernetes or an operator refuses."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.shell import Script

RULE = rule("DL133")


def check_shell(script: Script) -> Iterator[Finding]:
    """What the reader of manifests has marked: `restartPolicy: Always` in a Job."""
    for refusal in script.container.refused if script.container else ():
        yield RULE.at(script, refusal.place, refusal.message, fix=refusal.fix)
