"""Hundreds of faults on real hosts, and a table of how they were reported, compared with plain
torchrun.

    python -m tests.multinode.faults --count 300 --seed 0          (make soak-faults)
    python -m tests.multinode.faults --only stopped,gil --count 4  one case again: --only NAME --seed S --count 1
    python -m tests.multinode.faults --false-alarms                (make soak-calm)

A case is decided by its fault and seed. Whatever goes wrong in one is told with the words that
repeat it, its folder stays, and the soak goes on.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import asdict
from pathlib import Path

from tests.multinode import needs
from tests.multinode.faults import calm
from tests.multinode.faults.catalogue import FAULTS, Case, make_cases
from tests.multinode.faults.matrix import HANG_S, Matrix, Result
from tests.multinode.faults.plain import CAP_S, PlainResult, run_plain
from tests.multinode.faults.report import is_fine, report
from tests.multinode.faults.table import make_table


def main() -> int:
    options = _options()
    if reason := needs.missing():
        print(reason)
        return 1
    # so that the hosts and the disk are taken down
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="drumline-faults-"))
    if options.false_alarms:
        return calm.main(folder, steps=options.steps)
    cases = make_cases(options.count, options.seed, options.only)
    results: list[Result] = []
    plain: list[PlainResult] = []
    started = time.monotonic()
    with Matrix(folder, hang_s=options.hang_s) as matrix:
        for number, case in enumerate(cases, start=1):
            results.append(_try(matrix, case))
            if options.plain and (number <= options.plain * len(options.only or FAULTS)):
                plain.append(run_plain(matrix, case, cap_s=options.cap_s))
            print(f"{number} of {len(cases)}: {_line(results[-1])}", flush=True)
            _write(options.out, results, plain)
    print(make_table(results, plain, cap_s=options.cap_s))
    print(
        f"{len(cases)} cases in {(time.monotonic() - started) / 60:.0f} min; all of it in {options.out}"
    )
    wrong = [result for result in results if not is_fine(result)]
    if not wrong:
        shutil.rmtree(folder)
    return 1 if wrong else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.multinode.faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--count", type=int, default=len(FAULTS), help="how many cases, of each fault in turn"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first ones [0]")
    parser.add_argument(
        "--only", type=_names, default=[], help="these faults, with commas between them"
    )
    parser.add_argument(
        "--plain",
        type=int,
        default=0,
        metavar="N",
        help="N cases of each fault under plain torchrun too [0]",
    )
    parser.add_argument(
        "--cap-s", type=float, default=CAP_S, help=f"how long plain torchrun gets [{CAP_S:g}]"
    )
    parser.add_argument(
        "--hang-s", type=float, default=HANG_S, help=f"--watch.hang_s of the runs [{HANG_S:g}]"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("faults.json"), help="the results [faults.json]"
    )
    parser.add_argument("--false-alarms", action="store_true", help="a healthy run instead")
    parser.add_argument("--steps", type=int, default=10_000, help="of the healthy run [10000]")
    return parser.parse_args()


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in FAULTS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}; there are {', '.join(FAULTS)}")
    return names


def _try(matrix: Matrix, case: Case) -> Result:
    """Run a case and record its result; a broken testbed is not repaired, and the next case reports
    it too."""
    try:
        result = matrix.run(case)
    except Exception:
        result = Result(case.name, case.seed, case.rank, case.host, case.step)
        result.problems.append(traceback.format_exc())
    if is_fine(result):
        shutil.rmtree(matrix.folder / f"{case}-{matrix.count}", ignore_errors=True)
    else:
        again = f"--only {case.name} --seed {case.seed} --count 1"
        print(f"wrong: {again}; see {matrix.folder}/{case}-*\n{report(result)}", flush=True)
    return result


def _line(result: Result) -> str:
    first = str(result.said[0]["message"]) if result.said else "nothing was said"
    times = " ".join(
        "-" if value is None else f"{value:.1f} s"
        for value in (result.diagnosis_s, result.new_step_s)
    )
    fine = "right" if is_fine(result) else "WRONG"
    return f"{result.fault} {result.seed} rank {result.rank} step {result.step}: {fine}, {times}: {first}"


def _write(path: Path, results: list[Result], plain: list[PlainResult]) -> None:
    whole = {
        "cases": [asdict(result) for result in results],
        "plain": [asdict(outcome) for outcome in plain],
    }
    path.write_text(json.dumps(whole, indent=1) + "\n")
