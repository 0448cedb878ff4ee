"""How many logs of failed jobs `drumline tune --log` explains with the cause that is known.

    python -m benchmarks.tune_logs FOLDER        (or: python benchmarks/tune_logs.py FOLDER)

A case is `NAME.log`, and `NAME.json` with the cause and with `names`: lists of texts. An answer is
right if for one of the lists every text occurs, in any case, in the explanation of the first
finding: what it says and how to fix it. Cases whose threads ended in few words (`--thin NAME,...`)
may be counted apart.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from drumline.tools.tune.log_findings import log_findings
from drumline.tools.tune.nccl_log import NcclLog


@dataclass(frozen=True)
class LogCase:
    name: str
    cause: str
    first_check: str
    explanation: str
    is_right: bool


def read_case(path: Path) -> LogCase:
    """`path`: of the log."""
    case = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    log = NcclLog()
    with path.open("rb") as file:
        log.read(file, path.name)
    findings = log_findings(log)
    first = findings[0] if findings else None
    explanation = f"{first.what} {first.fix}" if first else ""
    return LogCase(
        name=path.stem,
        cause=case["cause"],
        first_check=first.check if first else "nothing",
        explanation=explanation,
        is_right=names_cause(explanation, case["names"]),
    )


def names_cause(explanation: str, names: list[list[str]]) -> bool:
    text = explanation.lower()
    return any(all(part.lower() in text for part in parts) for parts in names)


def read_cases(folder: Path) -> list[LogCase]:
    return [
        read_case(path)
        for path in sorted(folder.glob("*.log"))
        if path.with_suffix(".json").exists()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--thin", default="", help="names of cases to leave out of a second count")
    parser.add_argument("--explain", action="store_true", help="also print the first finding")
    arguments = parser.parse_args()
    cases = read_cases(arguments.folder)
    if not cases:
        print(f"no cases in {arguments.folder}")
        return 2
    for case in cases:
        print(f"{'right' if case.is_right else 'WRONG'}  {case.name}  ({case.first_check})")
        if arguments.explain or not case.is_right:
            print(f"       cause: {case.cause}\n       first finding: {case.explanation}")
    _print_share("all", cases)
    thin = set(arguments.thin.split(","))
    if arguments.thin:
        _print_share("without thin ones", [case for case in cases if case.name not in thin])
    return 0


def _print_share(label: str, cases: list[LogCase]) -> None:
    num_right = sum(case.is_right for case in cases)
    print(f"{label}: {num_right} of {len(cases)} right ({num_right / len(cases):.0%})")


if __name__ == "__main__":
    sys.exit(main())
