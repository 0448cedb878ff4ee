"""Runs the scripts of this folder on two ranks on the CPU, and prints the tables of docs/compare.md.

    python examples/compare/run.py                         all: 41 jobs, one after another
    python examples/compare/run.py f1 gan --only drumline  two jobs with one library

What the scripts write stays in runs/compare, with the output of each in log.txt.
"""

import argparse
import ast
import io
import json
import os
import shutil
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import torch
from common import Generator, Net, Samples, Words, pad, sentences, spirals
from safetensors.torch import load_file
from sklearn.metrics import f1_score
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

HERE = Path(__file__).resolve().parent
LIBRARIES = {"lightning": "Lightning", "accelerate": "Accelerate", "trainer": "HF Trainer", "drumline": "Drumline"}
PACKAGES = ["torch", "lightning", "accelerate", "transformers", "drumline"]
KILL_AT = {"resume": 56, "gan": 350}
"""By then each has saved a checkpoint in the middle of an epoch."""
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def script(job: str, library: str) -> Path:
    return HERE / f"{job}_{library}.py"


def code_lines(path: Path) -> int:
    """Lines of code, without blank lines, comments, docstrings, imports and the call of `show`."""
    text = path.read_text()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {row for one in tokens if one.type not in NO_CODE for row in range(one.start[0], one.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom) or (isinstance(node, ast.Expr) and _is_left_out(node.value)):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def _is_left_out(value: ast.expr) -> bool:
    is_show = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "show"
    return is_show or (isinstance(value, ast.Constant) and isinstance(value.value, str))


def is_task(path: Path) -> bool:
    return "(Task)" in path.read_text()


def start(path: Path, folder: Path, ranks: int, *, kill_at: int = 0) -> int:
    """Run a script in a folder; its exit code. Called again with the same folder, it resumes."""
    if is_task(path):
        words = ["drumline", "train", f"{path}:Job", "--procs", str(ranks), "--run", str(folder / "run")]
        words += ["--max-restarts", "0"]  # a kill is to end it, as it ends the others
    else:
        words = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(path)]
    own = {"COMPARE_FOLDER": str(folder), "COMPARE_KILL_AT": str(kill_at), "OMP_NUM_THREADS": "1"}
    on_cpu = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    with (folder / "log.txt").open("a") as log:
        return subprocess.run(
            [sys.executable, "-m", *words],
            cwd=folder,
            env={**os.environ, **own, **on_cpu},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode


def run(path: Path, folder: Path, ranks: int = 2) -> "Ended":
    """Run a script to its end, in a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if start(path, folder, ranks):
        sys.exit(f"{path.name} failed on {ranks} ranks: read {folder / 'log.txt'}")
    return Ended(path, folder)


def run_killed(path: Path, folder: Path, kill_at: int) -> "Ended":
    """Run a script on two ranks, in a new folder, kill both, and start it again."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if start(path, folder, 2, kill_at=kill_at) == 0:
        sys.exit(f"{path.name} was not killed: read {folder / 'log.txt'}")
    if start(path, folder, 2):
        sys.exit(f"{path.name} failed when it was started again: read {folder / 'log.txt'}")
    return Ended(path, folder)


class Ended:
    """What a script left when it had finished: `weights`, and the numbers that it reported."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.folder = folder
        if is_task(path):
            file = folder / "weights.safetensors"
            words = ["export", str(folder / "run"), "--which", "last", "--to", str(file)]
            words += ["--ema"] * ("EMA" in path.read_text())
            subprocess.run([sys.executable, "-m", "drumline", *words], check=True, stdout=subprocess.DEVNULL)
            self.weights = load_file(file)
            self.numbers = _last_evaluation(folder / "run")
        else:
            self.weights = torch.load(folder / "weights.pt")
            self.numbers = json.loads((folder / "numbers.json").read_text())

    def model(self, model: nn.Module) -> nn.Module:
        model.load_state_dict(self.weights)
        return model.eval()

    def early(self) -> float:
        return json.loads((self.folder / "early.json").read_text())


def _last_evaluation(folder: Path) -> dict[str, float]:
    events = map(json.loads, (folder / "events" / "rank-00000.jsonl").read_text().splitlines())
    numbers = ([one for one in events if one["kind"] == "evaluation"] or [{}])[-1]
    counted = sum(map(sum, numbers["confusion"])) if "confusion" in numbers else numbers.get("tokens", 0)
    return {**numbers, "counted": counted, "epochs": numbers.get("epoch", 0)}


def difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """The largest of any two weights."""
    return max((first[name] - second[name]).abs().max().item() for name in first)


@torch.no_grad()
def chosen(model: nn.Module, data: Samples) -> Tensor:
    return model(data.columns["points"]).argmax(1)


def compare_f1(path: Path, folder: Path) -> dict[str, str]:
    data = spirals(501, seed=2)
    ended = run(path, folder)
    true = f1_score(data.columns["labels"], chosen(ended.model(Net()), data), average="macro")
    return {
        "samples counted": f"{ended.numbers['counted']:.0f} of {len(data)}",
        "F1 reported": f"{ended.numbers['f1']:.5f}",
        "F1 of these weights": f"{true:.5f}",
    }


def compare_tokens(path: Path, folder: Path) -> dict[str, str]:
    batch = pad(list(sentences(333, seed=2)))
    ended = run(path, folder)
    with torch.no_grad():
        true = cross_entropy(ended.model(Words())(batch["tokens"]).transpose(1, 2), batch["labels"])
    alone = run(path, folder / "alone", ranks=1)
    return {
        "tokens counted": f"{ended.numbers['counted']:,.0f} of {(batch['labels'] != -100).sum().item():,}",
        "loss reported": f"{ended.numbers['loss']:.5f}",
        "loss of these weights": f"{true:.5f}",
        "largest difference of a weight, 1 and 2 ranks": f"{difference(ended.weights, alone.weights):.1e}",
    }


def compare_ema(path: Path, folder: Path) -> dict[str, str]:
    data = spirals(501, seed=2)
    ended = run(path, folder)
    true = (chosen(ended.model(Net()), data) == data.columns["labels"]).float().mean().item()
    return {
        "stopped after": f"{ended.numbers['epochs']:.0f} epochs",
        "accuracy reported": f"{ended.numbers['accuracy']:.5f}",
        "accuracy of the average": f"{true:.5f}",
    }


def compare_resume(path: Path, folder: Path) -> dict[str, str]:
    job = path.stem.partition("_")[0]
    whole, killed = run(path, folder / "whole"), run_killed(path, folder / "killed", KILL_AT[job])
    if whole.early() == killed.early():
        return {"weights after a kill": "started over"}
    far = difference(whole.weights, killed.weights)
    return {"weights after a kill": "the same bits" if far == 0 else f"differ by up to {far:.1e}"}


def compare_gan(path: Path, folder: Path) -> dict[str, str]:
    found = compare_resume(path, folder)
    first = {(folder / "whole" / f"noise-{rank}.json").read_text() for rank in range(2)}
    noise = torch.randn(2000, 2, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        radius = Ended(path, folder / "whole").model(Generator())(noise).norm(dim=1)
    near = ((radius - 1).abs() < 0.2).float().mean()
    return {**found, "noise of two ranks": "differs" if len(first) == 2 else "the same", "near the ring": f"{near:.0%}"}


JOBS = {"f1": compare_f1, "tokens": compare_tokens, "ema": compare_ema, "resume": compare_resume, "gan": compare_gan}


def line_counts() -> Iterator[str]:
    """A table in Markdown."""
    yield f"| lines of code | {' | '.join(LIBRARIES.values())} |"
    yield f"| --- |{' --- |' * len(LIBRARIES)}"
    for job in JOBS:
        paths = [script(job, library) for library in LIBRARIES]
        cells = [f"[{code_lines(path)}](../examples/compare/{path.name})" for path in paths]
        yield f"| [{job}](#{job}) | {' | '.join(cells)} |"


def results(job: str, libraries: list[str], folder: Path) -> Iterator[str]:
    """A table in Markdown, each line as soon as it is known."""
    for number, library in enumerate(libraries):
        path = script(job, library)
        found = JOBS[job](path, folder / path.stem)
        if number == 0:
            yield f"| {job} | {' | '.join(found)} |"
            yield f"| --- |{' --- |' * len(found)}"
        yield f"| {LIBRARIES[library]} | {' | '.join(found.values())} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", help=f"of {', '.join(JOBS)}; all by default")
    parser.add_argument("--only", nargs="+", default=list(LIBRARIES), choices=LIBRARIES, help="libraries")
    given = parser.parse_args()
    jobs, folder = given.jobs or list(JOBS), Path("runs/compare").resolve()
    print(", ".join(f"{name} {version(name)}" for name in PACKAGES), *line_counts(), sep="\n", flush=True)
    for job in jobs:
        print()
        for line in results(job, given.only, folder):
            print(line, flush=True)
    if "accelerate" in given.only and "tokens" in jobs:
        plain = run(HERE / "tokens_accelerate_plain.py", folder / "tokens_accelerate_plain")
        print(f"\na plain loop on Accelerate counts {plain.numbers['counted']:,.0f} tokens")


if __name__ == "__main__":
    main()
