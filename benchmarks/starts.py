"""What a change costs a launch and a step: this checkout against another one, turn by turn.

    python -m benchmarks.starts --against ../before --rounds 7

Launches: two nodes on the loopback and two ranks on one, with a script that ends at once. Steps: a
small model on two ranks, by the log lines of a run.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parents[1]
SCRIPT = "import os\nprint('rank', os.environ['RANK'])\n"
TASK = (
    "train digits --procs 2 --model.widths 8 --train.steps 700 --train.batch_size 64 --train.eval_every_epochs 0 "
    "--log.every_steps 50 --checkpoint.every_steps 0 --fresh --run"
)


def start(checkout: Path, words: str, secret: str | None = None) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(checkout), "GLOO_SOCKET_IFNAME": "lo"}
    if secret:
        environment["DRUMLINE_SECRET"] = secret
    return subprocess.Popen(
        [sys.executable, "-m", "drumline", *words.split()],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def nodes(checkout: Path, folder: Path, secret: str | None) -> float:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    began = time.perf_counter()
    words = f"launch --nodes 2 --master 127.0.0.1:{port} --procs 1"
    started = [
        start(checkout, f"{words} --node-rank {rank} {folder}/script.py", secret)
        for rank in range(2)
    ]
    assert [process.wait() for process in started] == [0, 0]
    return time.perf_counter() - began


def ranks(checkout: Path, folder: Path) -> float:
    began = time.perf_counter()
    assert start(checkout, f"launch --procs 2 {folder}/script.py").wait() == 0
    return time.perf_counter() - began


def steps(checkout: Path, folder: Path) -> float:
    """Milliseconds of one."""
    run = folder / "run"
    assert start(checkout, f"{TASK} {run}").wait() == 0
    events = [
        json.loads(line) for line in (run / "events" / "rank-00000.jsonl").read_text().splitlines()
    ]
    logged = [
        (int(event["step"]), float(event["time"])) for event in events if event["kind"] == "train"
    ]
    (first, began), (last, ended) = logged[1], logged[-1]
    return 1000 * (ended - began) / (last - first)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, required=True, help="the checkout to compare with")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    secret = "0123456789abcdef" * 4
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.py").write_text(SCRIPT)
        ways: dict[str, Callable[[Path], float]] = {
            "launch, 2 nodes with a secret (s)": lambda checkout: nodes(checkout, folder, secret),
            "launch, 2 nodes without (s)": lambda checkout: nodes(checkout, folder, None),
            "launch, 2 ranks (s)": lambda checkout: ranks(checkout, folder),
            "step, 2 ranks (ms)": lambda checkout: steps(checkout, folder),
        }
        for title, measure in ways.items():
            pairs = []
            for number in range(options.rounds + 1):
                order = (options.against, HERE) if number % 2 else (HERE, options.against)
                taken = {checkout: measure(checkout) for checkout in order}
                pairs.append((taken[options.against], taken[HERE]))
            before, after = zip(*pairs[1:], strict=True)  # the first fills caches
            ratios = sorted(new / old for old, new in pairs[1:])
            print(
                f"{title}: {statistics.median(before):.3f} before, {statistics.median(after):.3f} now, "
                f"ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}, {len(ratios)} rounds)",
                flush=True,
            )


if __name__ == "__main__":
    main()
