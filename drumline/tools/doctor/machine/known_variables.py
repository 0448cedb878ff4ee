"""The variables of NCCL, gloo, torch, CUDA and libfabric: what they do (`variables.toml`), and
which are set wrong.

warning: NCCL_DEBUG=TRACE: writes a line per call, if it is compiled in at all
warning: NCCL_SOCKET_IFNAM is not a known variable; did you mean NCCL_SOCKET_IFNAME?
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from drumline.tools.doctor.finding import Fault, Level, VariableFix

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUDA_", "FI_", "OMP_", "TP_SOCKET_")
NOT_SHOWN = "(set; not shown)"
MAX_SHOWN = 200
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)

_TABLES = tomllib.loads(Path(__file__).with_name("variables.toml").read_text(encoding="utf-8"))
MEANING: Mapping[str, str] = _TABLES["meaning"]
RENAMED: Mapping[str, str] = _TABLES["renamed"]
REMOVED: Mapping[str, str] = _TABLES["removed"]
RULES: Mapping[Level, Mapping[str, str]] = _TABLES["rules"]
MUST_AGREE = frozenset(_TABLES["must_agree"])
MAY_DIFFER = tuple(_TABLES["may_differ"])
FIXES = {"NCCL_DEBUG": VariableFix("NCCL_DEBUG", "WARN")}
# Prefixes for which we know all relevant names; CUDA_ and FI_ have hundreds more.
SPELL_CHECKED = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "CUDA_VISIBLE", "OMP_NUM")
SIMILARITY = 0.85


def shown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that are set, by name; the value only of variables that we know, since others may
    be secrets: `{'NCCL_DEBUG': 'INFO', 'CUDA_X_TOKEN': '(set; not shown)'}`."""
    shown = {}
    for name, value in sorted(environment.items()):
        if not name.startswith(PREFIXES):
            continue

        is_known = name in MEANING or name in RENAMED or name in REMOVED
        if is_known and not SECRET.search(name):
            printable = "".join(letter if letter.isprintable() else "?" for letter in value)
            shown[name] = printable[:MAX_SHOWN]
        else:
            shown[name] = NOT_SHOWN

    return shown


def meaning(name: str) -> str:
    """What a variable does, for the report."""
    if name in RENAMED:
        return f"an old name; see {RENAMED[name]}"
    if name in REMOVED:
        return "has no effect any more"

    return MEANING.get(name, "not known to drumline")


def variable_faults(facts: Mapping[str, Any]) -> Iterator[Fault]:
    """Variables that slow or break a run, old names and misspelt ones:

    NCCL_ASYNC_ERROR_HANDLING=1 is a deprecated name; it is now TORCH_NCCL_ASYNC_ERROR_HANDLING
    """
    for name, value in facts["variables"].items():
        if broken := _broken_rule(RENAMED.get(name, name), value):
            level, reason = broken
            fix = FIXES.get(name, VariableFix(name))
            yield Fault(level, f"{name}={value}: {reason}", fix)

        elif new_name := RENAMED.get(name):
            what = f"{name}={value} is a deprecated name; it is now {new_name}"
            yield Fault("note", what, f"unset {name}; export {new_name}={value}")

        elif name in REMOVED:
            see = f"; see {REMOVED[name]}" if REMOVED[name] else ""
            what = f"{name}={value} has no effect any more{see}"
            yield Fault("warning", what, VariableFix(name))

        elif name not in MEANING and name.startswith(SPELL_CHECKED):
            for near in difflib.get_close_matches(name, MEANING, n=1, cutoff=SIMILARITY):
                what = f"{name} is not a known variable; did you mean {near}?"
                yield Fault("warning", what, f'export {near}="${name}"; unset {name}')


def _broken_rule(name: str, value: str) -> tuple[Level, str] | None:
    """The level and the reason why a variable, or this value of it, is wrong."""
    for level, rules in RULES.items():
        if what := rules.get(f"{name}={value.upper()}") or rules.get(name):
            return level, what

    return None
