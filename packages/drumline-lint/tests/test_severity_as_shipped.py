"""Findings whose severity is not that of their rule: what is not reached as the repository is
shipped is a note."""

from __future__ import annotations

import pytest

from drumline_lint.findings import Severity
from reading_cases import findings_in

TRAINING = (
    "import argparse\nimport torch\nimport torch.distributed as dist\n"
    "parser = argparse.ArgumentParser()\n"
    "DECLARED\n"
    "args = parser.parse_args()\n"
    "dist.init_process_group('nccl')\n"
    "net = torch.nn.parallel.DistributedDataParallel(net)\n"
    "if CONDITION:\n"
    "    torch.save(net.module.state_dict(), 'last.pt')\n"
)
SCRIPT = "torchrun --nproc_per_node=4 train.py --epochs 3\n"
FLAG = "parser.add_argument('--keep-last', action='store_true')"
PATH = "parser.add_argument('--keep', dest='keep_last', default=None)"
NUMBER = "parser.add_argument('--keep_last', type=int, default=0)"
WORD = "parser.add_argument('--mode', default='train')"


def severity_of(
    declared: str, condition: str, script: str = SCRIPT, *files: tuple[str, str]
) -> Severity | None:
    training = TRAINING.replace("DECLARED", declared).replace("CONDITION", condition)
    every = (("train.py", training), ("run.sh", script), *files)
    findings = [finding for finding in findings_in(every) if finding.rule == "DL014"]
    return findings[0].severity if findings else None


@pytest.mark.parametrize(
    ("declared", "condition"),
    [
        (FLAG, "args.keep_last"),
        (FLAG, "args.keep_last and epochs > 3"),
        (FLAG, "args.keep_last is True"),
        (FLAG, "vars(args) and not (not args.keep_last)"),
        (PATH, "args.keep_last != None"),
        (PATH, "os.path.isdir(args.keep_last)"),
        (NUMBER, "args.keep_last > 0"),
        (NUMBER, "args['keep_last'] != 0"),
        (WORD, "args.mode == 'test'"),
        (WORD, "args.mode != 'train'"),
        ("class Config:\n    keep_last: bool = False", "config.keep_last"),
        (FLAG + "\nparser.add_argument('--all', help='needs --keep-last')", "args.keep_last"),
        (FLAG + "\nif wrong:\n    raise ValueError('give --keep-last')", "args.keep_last"),
    ],
)
def test_under_an_option_that_is_off_by_default(declared: str, condition: str) -> None:
    assert severity_of(declared, condition) is Severity.NOTE


@pytest.mark.parametrize(
    ("declared", "condition"),
    [
        (FLAG, "not args.keep_last"),
        (FLAG, "args.keep_last or epochs > 3"),
        (FLAG, "args.keep_last is False"),
        (FLAG + "\nparser.set_defaults(keep_last=True)", "args.keep_last"),
        (FLAG, "args.unknown"),
        (NUMBER, "args.keep_last >= 0"),
        (NUMBER, "args.keep_last < limit"),
        (PATH.replace("None", "'last.pt'"), "args.keep_last"),
        (PATH.replace("default=None", "required=True"), "args.keep_last"),
        (WORD, "args.mode == 'train'"),
        (FLAG + "\nargs.keep_last = True", "args.keep_last"),
        (FLAG, "model.keep_last"),
        (FLAG + "\ncommand = 'train.py --keep-last'", "args.keep_last"),
        ("class Model:\n    keep_last: bool = False", "args.keep_last"),
    ],
)
def test_under_an_option_that_may_be_on(declared: str, condition: str) -> None:
    assert severity_of(declared, condition) is Severity.WARNING


@pytest.mark.parametrize("words", ["--keep-last", "--keep_last", "keep_last=true"])
def test_under_an_option_that_a_script_gives(words: str) -> None:
    script = f"torchrun --nproc_per_node=4 train.py {words}\n"
    assert severity_of(FLAG, "args.keep_last", script) is Severity.WARNING


def test_under_an_option_where_nothing_shows_how_it_is_run() -> None:
    assert severity_of(FLAG, "args.keep_last", "echo nothing\n") is Severity.WARNING


@pytest.mark.parametrize(
    ("settings", "severity"),
    [
        ("train:\n  keep_last: false\n", Severity.NOTE),
        ("keep_last: ~ # no file\n", Severity.NOTE),
        ("keep_last: 0\n", Severity.NOTE),
        ("keep_last: last.pt\n", Severity.WARNING),
        ("keep_last:\n  path: last.pt\n", Severity.WARNING),
        ("keep_last: false\n---\nkeep_last: yes\n", Severity.WARNING),
    ],
)
def test_under_an_option_of_settings(settings: str, severity: Severity) -> None:
    condition = "cfg.train.get('keep_last')"
    assert severity_of("", condition, SCRIPT, ("train.yaml", settings)) is severity


@pytest.mark.parametrize(
    ("condition", "severity"),
    [("args.keep_last", Severity.NOTE), ("args.epochs", Severity.ERROR)],
)
def test_in_a_function_that_is_called_under_an_option(condition: str, severity: Severity) -> None:
    waiting = "\ndef wait():\n    if dist.get_rank() == 0:\n        dist.barrier()"
    training = TRAINING.replace("DECLARED", FLAG + waiting).replace("CONDITION", condition)
    files = (("train.py", training + "    wait()\n"), ("run.sh", SCRIPT))
    severities = [finding.severity for finding in findings_in(files) if finding.rule == "DL017"]
    assert severities == [severity]


HANDED_ON = (
    "import argparse\nimport torch\nimport torch.distributed as dist\n"
    "class Trainer:\n"
    "    def __init__(self, norm=0.0):\n        self.norm = norm\n"
    "    def fit(self, net):\n        if CONDITION:\n"
    "            torch.save(net.state_dict(), 'last.pt')\n"
    "parser = argparse.ArgumentParser()\n"
    "parser.add_argument('--max_norm', type=float, default=0.0)\n"
    "args = parser.parse_args()\ndist.init_process_group('nccl')\n"
    "trainer = Trainer(norm=ARGUMENT)\n"
    "trainer.fit(torch.nn.parallel.DistributedDataParallel(net))\n"
)


@pytest.mark.parametrize(
    ("condition", "argument", "severity"),
    [
        ("self.norm > 0", "args.max_norm", Severity.NOTE),
        ("self.norm != 0", "args.max_norm or args.max_norm", Severity.NOTE),
        ("self.norm == 0", "args.max_norm", Severity.WARNING),
        ("self.norm > 0", "args.max_norm if clip else 1.0", Severity.WARNING),
        ("self.norm > 0", "0.0", Severity.WARNING),
        ("self.norm > 0", "compute(args.max_norm)", Severity.WARNING),
    ],
)
def test_under_an_option_that_is_handed_on(
    condition: str, argument: str, severity: Severity
) -> None:
    training = HANDED_ON.replace("CONDITION", condition).replace("ARGUMENT", argument)
    findings = findings_in((("train.py", training), ("run.sh", SCRIPT)))
    assert [each.severity for each in findings if each.rule == "DL014"] == [severity]


def test_after_an_interrupt() -> None:
    training = (
        "import torch\nimport torch.distributed as dist\ndist.init_process_group('nccl')\n"
        "try:\n    train()\nexcept KeyboardInterrupt:\n    torch.save(net, 'last.pt')\n"
    )
    findings = findings_in((("train.py", training),))
    assert [finding.severity for finding in findings if finding.rule == "DL014"] == [Severity.NOTE]


@pytest.mark.parametrize(("words", "severity"), [("", Severity.NOTE), (" --ddp", Severity.WARNING)])
def test_a_group_that_is_joined_under_an_option(words: str, severity: Severity) -> None:
    training = (
        "import argparse\nimport torch\nimport torch.distributed as dist\n"
        "parser = argparse.ArgumentParser()\nparser.add_argument('--ddp', action='store_true')\n"
        "args = parser.parse_args()\nif args.ddp:\n    dist.init_process_group('nccl')\n"
        "    net = torch.nn.parallel.DistributedDataParallel(net)\n"
        "torch.save(net.state_dict(), 'last.pt')\n"
    )
    script = f"torchrun --nproc_per_node=4 train.py{words}\n"
    findings = findings_in((("train.py", training), ("run.sh", script)))
    assert [each.severity for each in findings if each.rule == "DL014"] == [severity]
