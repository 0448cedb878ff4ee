"""Findings whose severity is not that of their rule: what is not reached as the repository is
shipped is a note."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from drumline_lint.findings import Severity
from drumline_lint.flow.option_values import UNKNOWN, of_yaml
from drumline_lint.levels import why_not_run
from drumline_lint.linter import launches_by_file
from drumline_lint.program.program import Program
from drumline_lint.reading.shell import Script
from drumline_lint.reading.source import Source
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


OPTIONS = (
    "import argparse\nimport torch\nimport torch.distributed as dist\nimport torchvision\n"
    "parser = argparse.ArgumentParser()\n"
    "parser.add_argument('--mode', default='train')\n"
    "parser.add_argument('-n', '--norm', type=float, default=0.0)\n"
    "parser.add_argument('--track', type=str2bool, default=True)\n"
    "parser.add_argument('--fp16', action='store_true')\n"
    "parser.add_argument('--val_data', default=None)\n"
    "parser.add_argument('--local_rank', type=int, default=-1)\n"
    "args = parser.parse_args()\n"
    "dist.init_process_group('nccl')\n"
    "net = torch.nn.parallel.DistributedDataParallel(net)\n"
    "BEFORE\n"
    "if CONDITION:\n"
    "    torchvision.datasets.MNIST('data', download=True)\n"
)
CHOSEN = "kind = torch.float16 if args.fp16 else torch.float32"
SCALED = (
    f"{CHOSEN}\nif kind == torch.float16:\n    scaler = torch.amp.GradScaler()\n"
    "else:\n    scaler = None"
)


def severity_in_runs(condition: str, before: str, *words: str) -> Severity:
    training = OPTIONS.replace("BEFORE", before).replace("CONDITION", condition)
    script = "".join(f"torchrun --nproc_per_node=4 train.py {each}\n" for each in words)
    findings = findings_in((("train.py", training), ("run.sh", script)))
    return next(finding.severity for finding in findings if finding.rule == "DL042")


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ("args.mode == 'train'", "--mode test"),
        ("args.mode in ('train', 'tune')", "--mode=test"),
        ("args.norm > 0", "-n 0"),
        ("args.norm > 0", "--norm 0.0 $@"),
        ("args.track", "--track n"),
        ("args.track", "--track false"),
        ("getattr(args, 'track', True)", "--track no"),
        ("not args.fp16", "--fp16"),
        ("args.fp16", "--fp32"),
        ("args.fp16", "$MORE"),
        ("args.mode.lower() and args.norm", "--norm 0"),
    ],
)
def test_a_condition_that_no_launch_meets(condition: str, words: str) -> None:
    assert severity_in_runs(condition, "", words) is Severity.NOTE


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ("args.mode == 'test'", ("--mode test",)),
        ("args.mode == 'test'", ("--mode train", "--mode test")),
        ("args.mode == 'test'", ("--mode $MODE",)),
        ("args.mode in ('test', 'tune')", ("--mode=test",)),
        ("args.norm > 0", ("-n 0.5",)),
        ("args.norm > 0", ("--norm 0", "--norm 1e-3")),
        ("args.track", ("--track y",)),
        ("not args.fp16", ("--fp16", "")),
        ("args.fp16", ("MORE", "--fp16")),
        ("args.mode.lower() == 'test'", ("",)),
        ("args.local_rank != -1", ("",)),
    ],
)
def test_a_condition_that_some_launch_meets(condition: str, words: tuple[str, ...]) -> None:
    assert severity_in_runs(condition, "", *words) is Severity.WARNING


@pytest.mark.parametrize(
    ("words", "severity"), [("--norm 3", Severity.NOTE), ("--fp16", Severity.WARNING)]
)
@pytest.mark.parametrize(
    ("before", "condition"),
    [
        (CHOSEN, "kind == torch.float16"),
        (CHOSEN.replace("torch.float16", "torch.half"), "kind == torch.float16"),
        (SCALED, "scaler"),
        (SCALED.replace("\nelse:", "\nif not args.fp16:"), "scaler != None"),
        ("low = args.fp16", "low and ready"),
        ("if not args.fp16:\n    raise SystemExit", "ready"),
    ],
)
def test_a_value_that_an_option_decides(
    before: str, condition: str, words: str, severity: Severity
) -> None:
    assert severity_in_runs(condition, before, words) is severity


@pytest.mark.parametrize(
    ("before", "condition", "severity"),
    [
        ("args.track = args.track and False", "args.track", Severity.WARNING),
        ("if args.mode == 'test':\n    args.fp16 = True", "args.fp16", Severity.NOTE),
        ("if args.mode == 'train':\n    args.fp16 = True", "args.fp16", Severity.WARNING),
        ("args.fp16 = args.fp16 or compute()", "args.fp16", Severity.WARNING),
        ("found = False", "found", Severity.WARNING),
        ("clip = 0.0", "clip > 0", Severity.WARNING),
        (
            "if args.val_data is not None:\n    args.data_path = args.val_data",
            "args.data_path if hasattr(args, 'data_path') else None",
            Severity.NOTE,
        ),
        (
            "args.data_path = read()",
            "args.data_path if hasattr(args, 'data_path') else None",
            Severity.WARNING,
        ),
    ],
)
def test_a_value_that_the_code_sets(before: str, condition: str, severity: Severity) -> None:
    assert severity_in_runs(condition, before, "--norm 3") is severity


@pytest.mark.parametrize(
    ("named", "severity"),
    [("off.yaml", Severity.NOTE), ("on.yaml", Severity.WARNING), ("$CONFIG", Severity.WARNING)],
)
def test_the_settings_that_a_launch_names(named: str, severity: Severity) -> None:
    training = TRAINING.replace("DECLARED", "config = load(args.config)").replace(
        "CONDITION", "config.keep_last"
    )
    files = (
        ("train.py", training),
        ("configs/off.yaml", "train:\n  keep_last: false\n"),
        ("configs/on.yaml", "train:\n  keep_last: true\n"),
        ("run.sh", f"torchrun --nproc_per_node=4 train.py --config configs/{named}\n"),
    )
    findings = [finding for finding in findings_in(files) if finding.rule == "DL014"]
    assert [finding.severity for finding in findings] == [severity]


@pytest.mark.parametrize(
    ("words", "severity"), [("", Severity.NOTE), ("--max_norm 1", Severity.WARNING)]
)
def test_an_option_that_a_subclass_hands_on(words: str, severity: Severity) -> None:
    training = HANDED_ON.replace("CONDITION", "self.norm > 0").replace(
        "trainer = Trainer(norm=ARGUMENT)",
        "class Special(Trainer):\n    def __init__(self, limit, norm):\n"
        "        super().__init__(norm)\n"
        "trainer = Special(3, norm=args.max_norm)",
    )
    script = f"torchrun --nproc_per_node=4 train.py {words}\n"
    findings = findings_in((("train.py", training), ("run.sh", script)))
    assert [each.severity for each in findings if each.rule == "DL014"] == [severity]


def test_an_attribute_that_others_set() -> None:
    training = HANDED_ON.replace("CONDITION", "self.norm > 0")
    training = training.replace("ARGUMENT", "args.max_norm") + "trainer.norm = 3.0\n"
    findings = findings_in((("train.py", training), ("run.sh", SCRIPT)))
    severities = [each.severity for each in findings if each.rule == "DL014"]
    assert severities == [Severity.WARNING]


def test_a_note_says_that_no_launch_leads_to_its_line() -> None:
    training = TRAINING.replace("DECLARED", FLAG).replace("CONDITION", "args.keep_last")
    findings = findings_in((("train.py", training), ("run.sh", SCRIPT)))
    (message,) = [finding.message for finding in findings if finding.rule == "DL014"]
    assert message.endswith("(a note: no launch shown here leads to this line)")


@pytest.mark.parametrize(
    ("words", "severity"), [("--track n", Severity.NOTE), ("", Severity.WARNING)]
)
def test_a_tracker_that_every_launch_turns_off(words: str, severity: Severity) -> None:
    training = (
        "import argparse, os, wandb\nimport torch.distributed as dist\n"
        "parser = argparse.ArgumentParser()\nparser.add_argument('--track', default='y')\n"
        "args = parser.parse_args()\ndist.init_process_group('nccl')\n"
        "if args.track == 'n':\n    os.environ['WANDB_DISABLED'] = 'true'\nwandb.init()\n"
    )
    script = f"torchrun --nproc_per_node=4 train.py {words}\n"
    findings = findings_in((("train.py", training), ("run.sh", script)))
    assert [each.severity for each in findings if each.rule == "DL023"] == [severity]


LONG = "9" * 5000


@pytest.mark.parametrize(
    ("before", "condition", "words"),
    [
        ("", "args.limit > 3", f"--limit {LONG}"),
        ("limit = int(args.norm)", "limit > 3", "--norm 1e999"),
    ],
)
def test_a_number_that_is_too_large(before: str, condition: str, words: str) -> None:
    before = f"parser.add_argument('--limit', type=int, default=0)\n{before}"
    assert severity_in_runs(condition, before, words) is Severity.WARNING


def test_a_number_of_yaml_that_is_too_large() -> None:
    assert of_yaml(LONG) is UNKNOWN


def test_a_finding_in_another_file_is_not_at_that_line_of_this_file() -> None:
    training = TRAINING.replace("DECLARED", FLAG).replace("CONDITION", "args.keep_last")
    (finding,) = (
        each
        for each in findings_in((("train.py", training), ("run.sh", SCRIPT)))
        if each.rule == "DL014"
    )
    source = Source(Path("train.py"), training, ast.parse(training))
    program = Program([source])
    program.launches = launches_by_file([Script(Path("run.sh"), SCRIPT)], {})
    assert why_not_run(program, source, finding) == "no launch shown here leads to this line"

    elsewhere = replace(finding, place=replace(finding.place, path="other.py"))
    assert why_not_run(program, source, elsewhere) is None


@pytest.mark.parametrize(
    ("written", "severity"),
    [
        ("ddp", Severity.WARNING),
        ('"ddp"', Severity.WARNING),
        ("'ddp' # of torch", Severity.WARNING),
        ('"fsdp"', Severity.NOTE),
        ('"d\\x64p"', Severity.WARNING),
        ('"${oc.env:KIND}"', Severity.WARNING),
        ("{{ kind }}", Severity.WARNING),
        ("run-{{ kind }}", Severity.WARNING),
        ("&kind ddp", Severity.WARNING),
        ("*kind", Severity.WARNING),
        ("!!str ddp", Severity.WARNING),
        ("|", Severity.WARNING),
        (">-", Severity.WARNING),
    ],
)
def test_a_text_of_settings(written: str, severity: Severity) -> None:
    settings = ("train.yaml", f"strategy: {written}\n")
    assert severity_of("", "cfg.strategy == 'ddp'", SCRIPT, settings) is severity


def test_a_list_of_settings() -> None:
    settings = ("train.yaml", "kinds: [ddp, fsdp]\n")
    assert severity_of("", "cfg.kinds == ['ddp']", SCRIPT, settings) is Severity.WARNING


@pytest.mark.parametrize("written", ["''", '""'])
def test_an_empty_text_of_settings(written: str) -> None:
    settings = ("train.yaml", f"keep_last: {written}\n")
    assert severity_of("", "cfg.keep_last", SCRIPT, settings) is Severity.NOTE
    assert severity_of("", "cfg.keep_last == ''", SCRIPT, settings) is Severity.WARNING


@pytest.mark.parametrize(
    "script", ["python -m pip install -r requirements.txt\n", "python setup.py install\n"]
)
def test_a_launch_of_something_else_shows_no_options(script: str) -> None:
    setup = ("setup.py", "from setuptools import setup\nsetup(name='training')\n")
    assert severity_of(FLAG, "args.keep_last", script, setup) is Severity.WARNING


BOTH = "action=argparse.BooleanOptionalAction"
CHOOSES = "if [ $1 = half ]; then\n  EXTRA=--fp16\nelse\n  EXTRA=--norm=1\nfi\n"


@pytest.mark.parametrize(
    ("words", "severity"),
    [
        ("$EXTRA", Severity.WARNING),
        ("--quiet $EXTRA", Severity.WARNING),
        ('--mode "$EXTRA"', Severity.NOTE),
        ("--quiet $@", Severity.NOTE),
    ],
)
def test_a_variable_after_a_flag_may_hold_others(words: str, severity: Severity) -> None:
    training = OPTIONS.replace(
        "BEFORE", "parser.add_argument('--quiet', action='store_true')"
    ).replace("CONDITION", "args.fp16")
    script = f"{CHOOSES}torchrun --nproc_per_node=4 train.py {words}\n"
    findings = findings_in((("train.py", training), ("run.sh", script)))
    assert [each.severity for each in findings if each.rule == "DL042"] == [severity]


@pytest.mark.parametrize(
    ("declared", "condition", "words", "severity"),
    [
        ("type=str2bool, default='false'", "args.each", "", Severity.NOTE),
        ("type=str2bool, default='true'", "not args.each", "", Severity.NOTE),
        ("type=str2bool, default='false'", "not args.each", "", Severity.WARNING),
        ("type=bool, default='false'", "not args.each", "", Severity.NOTE),
        ("type=int, default='0'", "args.each", "", Severity.NOTE),
        ("type=int, default='0'", "args.each == 0", "", Severity.WARNING),
        ("type=read, default='off'", "args.each == 'on'", "", Severity.WARNING),
        ("type=read, default=None", "args.each", "", Severity.NOTE),
        ("type=read", "args.each == 'on'", "--each off", Severity.WARNING),
        ("type=lambda word: not word", "args.each", "--each 0", Severity.WARNING),
        ("type=str2bool", "args.each", "--each 0", Severity.NOTE),
        ("type=int", "args.each > 3", "--each 2", Severity.NOTE),
        ("type=int, nargs='+'", "args.each == [1, 2]", "--each 1 2", Severity.WARNING),
        ("nargs='?', const='on'", "args.each == 'on'", "--each", Severity.WARNING),
        ("action='store_const', const=0", "not args.each", "--each", Severity.WARNING),
        ("action='append'", "args.each == ['on']", "--each on", Severity.WARNING),
        ("action='count', default=0", "args.each > 1", "--each --each", Severity.WARNING),
        (f"{BOTH}, default=True", "not args.each", "--no-each", Severity.WARNING),
        (f"{BOTH}, default=True", "not args.each", "", Severity.NOTE),
        (f"{BOTH}, default=False", "not args.each", "--each", Severity.WARNING),
    ],
)
def test_what_a_parser_makes_of_words(
    declared: str, condition: str, words: str, severity: Severity
) -> None:
    before = f"parser.add_argument('--each', {declared})"
    assert severity_in_runs(condition, before, words) is severity


@pytest.mark.parametrize(
    ("words", "severity"), [("--each", Severity.WARNING), ("--no-each", Severity.NOTE)]
)
def test_two_flags_of_an_option(words: str, severity: Severity) -> None:
    before = (
        "parser.add_argument('--each', action='store_true')\n"
        "parser.add_argument('--no-each', dest='each', action='store_false')"
    )
    assert severity_in_runs("args.each", before, words) is severity


def test_flags_that_a_variable_holds() -> None:
    before = "parser.add_argument(*FLAGS, dest='each', action='store_true')"
    assert severity_in_runs("args.each", before, "--each") is Severity.WARNING
