"""Whether `drumline profile` names planted bottlenecks first, and leaves healthy jobs alone.

    python -m benchmarks.planted_profile benchmarks/planted/open [--only NAME] [--device cuda]

Every job of FOLDER/cases.json is profiled on two ranks, as a user would do it. A case is right if
the first advice names the bottleneck (`names`: words, or a planted line), and no advice of it is
harmful. A healthy job is right without harmful advice. On a GPU both ranks share one: each is a
node of its own, with its own NCCL_HOSTID.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.planted_cases import PlantedCase, read_cases, select

RANKS = 2
STEPS = "10:20"
DRUMLINE = [sys.executable, "-m", "drumline"]
CUDA_LIMIT = 3
"""Starting NCCL ranks takes longer: the limit of a case is this many times as long."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    name: str
    bottleneck: str
    named: bool
    harmful: bool
    failed: bool
    advice: list[str]
    seconds: float


def main() -> int:
    options = parsed()
    cases = select(read_cases(options.folder), options.only, options.device)
    outcomes = []
    for number, case in enumerate(cases, start=1):
        outcome = profiled(case, options)
        outcomes.append(outcome)
        print_outcome(f"{number}/{len(cases)}", case, outcome)
        if options.out:
            entries = [asdict(outcome) for outcome in outcomes]
            options.out.write_text(json.dumps(entries, indent=1) + "\n")
    print_summary(outcomes)
    return 0 if outcomes and not any(outcome.failed for outcome in outcomes) else 1


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="a folder with cases.json and its jobs")
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the outcomes as JSON")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one case [120]")
    return parser.parse_args()


def profiled(case: PlantedCase, options: argparse.Namespace) -> Outcome:
    begin = time.perf_counter()
    advice: list[str] = []
    failed = False
    try:
        advice = advice_for(case, options)
    except (RuntimeError, subprocess.TimeoutExpired, json.JSONDecodeError) as error:
        failed = True
        print(f"{case.name}: {error}", file=sys.stderr)
    judged = advice if case.is_healthy else advice[:1]
    return Outcome(
        name=case.name,
        bottleneck=case.bottleneck,
        named=bool(advice) and case.is_named_by(advice[0]),
        harmful=any(case.is_harmed_by(text) for text in judged),
        failed=failed,
        advice=advice,
        seconds=round(time.perf_counter() - begin, 1),
    )


def advice_for(case: PlantedCase, options: argparse.Namespace) -> list[str]:
    """All that the profile of a job advises, the most important first."""
    with tempfile.TemporaryDirectory() as scratch:
        job = str(options.folder.resolve() / case.job)
        run = str(Path(scratch) / "profile")
        if options.device == "cpu":
            flags = ["--procs", str(RANKS), "--run", run, "--json"]
            target = [job, *flags] if case.is_task else [*flags, job]
            output = finished([[*DRUMLINE, "profile", *target]], scratch, options.limit)
        else:
            finished(rank_commands(case, job, run), scratch, CUDA_LIMIT * options.limit)
            output = finished([[*DRUMLINE, "profile", run, "--json"]], scratch, options.limit)
        report = json.loads(output)
    return [text_of(entry) for entry in report["advice"]]


def text_of(advice: dict[str, Any]) -> str:
    """All texts of an advice, in whatever fields they are, with the names of its settings."""
    return " ".join(text for value in advice.values() for text in texts_in(value))


def texts_in(value: Any) -> Iterator[str]:
    """Those in a field."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, setting in value.items():
            yield name
            yield from texts_in(setting)
    elif isinstance(value, list):
        for part in value:
            yield from texts_in(part)


def rank_commands(case: PlantedCase, job: str, run: str) -> list[list[str]]:
    """One command for each rank, which is a node of its own."""
    port = free_port()
    commands = []
    for rank in range(RANKS):
        launch = ["launch", "--nodes", str(RANKS), "--node-rank", str(rank), "--procs", "1"]
        launch += ["--master", f"127.0.0.1:{port}"]
        if case.is_task:
            target = [job, "--run", run, "--train.steps", "25", "--log.profile", STEPS]
        else:
            launch += ["--profile", STEPS, "--profile-to", run, "--profile-only"]
            target = [job]
        commands.append([*DRUMLINE, *launch, *target])
    return commands


def finished(commands: list[list[str]], folder: str, limit_s: float) -> str:
    """Runs the commands side by side, and returns what the first printed."""
    secret = secrets.token_hex(32)
    processes = []
    for rank, command in enumerate(commands):
        variables = dict(os.environ)
        paths = [str(Path(__file__).resolve().parent.parent), variables.get("PYTHONPATH", "")]
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        if len(commands) > 1:
            variables["NCCL_HOSTID"] = f"h{rank}"
            variables["NCCL_SOCKET_IFNAME"] = "lo"
            variables["DRUMLINE_SECRET"] = secret
        processes.append(
            subprocess.Popen(
                command,
                cwd=folder,
                env=variables,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=limit_s) for process in processes]
    finally:
        for process in processes:
            end(process)
    for process, (output, errors) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"exit code {process.returncode}: {(errors + output)[-1500:]}")
    return outputs[0][0]


def end(process: subprocess.Popen[str]) -> None:
    """Ends a command that is still running; drumline then ends its ranks."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def print_outcome(position: str, case: PlantedCase, outcome: Outcome) -> None:
    first = outcome.advice[0] if outcome.advice else "no advice"
    words = [verdict_of(case, outcome), *(["HARMFUL"] if outcome.harmful else [])]
    print(f"{position} {case.name}: {', '.join(words)} ({outcome.seconds:.0f} s)")
    print(f"    {first}", flush=True)


def verdict_of(case: PlantedCase, outcome: Outcome) -> str:
    if outcome.failed:
        return "failed"
    if case.is_healthy:
        return "healthy"
    return "right" if outcome.named else "wrong"


def print_summary(outcomes: list[Outcome]) -> None:
    planted = [outcome for outcome in outcomes if outcome.bottleneck]
    bottlenecks = {outcome.bottleneck for outcome in planted}
    missed = {outcome.bottleneck for outcome in planted if not is_right(outcome)}
    right = sum(is_right(outcome) for outcome in planted)
    harmful = sum(outcome.harmful for outcome in outcomes)
    failed = sum(outcome.failed for outcome in outcomes)
    print(f"{len(bottlenecks) - len(missed)} of {len(bottlenecks)} bottlenecks on all their jobs")
    print(f"{right} of {len(planted)} named first, {harmful} harmful, {failed} failed")


def is_right(outcome: Outcome) -> bool:
    return outcome.named and not outcome.harmful


if __name__ == "__main__":
    sys.exit(main())
