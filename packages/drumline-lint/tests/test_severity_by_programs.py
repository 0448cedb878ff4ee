"""Findings whose severity is not that of their rule: by which programs run the code, and as how many
processes they are started."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from drumline_lint.findings import Severity
from drumline_lint.linter import findings_of, run_rules
from drumline_lint.program.program import Program
from drumline_lint.reading.parse import read_bytes
from drumline_lint.reading.source import Cell, Source
from drumline_lint.rules import all_rules
from drumline_lint.settings import Settings
from made_up_rules import report_of
from reading_cases import findings_in

IMPORTS = "import os\nimport torch\nimport torch.distributed as dist\n"
START = IMPORTS + "dist.init_process_group('nccl')\n"
TRACKED = START + "import wandb\nwandb.init()\n"


@pytest.mark.parametrize(
    ("used", "severity"), [("mean", Severity.NOTE), ("gathered", Severity.WARNING)]
)
def test_a_function_that_a_used_file_keeps_for_nobody(used: str, severity: Severity) -> None:
    gather = (
        "def mean(x):\n    return x.mean()\n"
        "def gathered(x):\n    parts = [torch.zeros_like(x)] * dist.get_world_size()\n"
        "    dist.all_gather(parts, x)\n    return parts\n"
    )
    files = (
        ("helper.py", IMPORTS + gather),
        (
            "train.py",
            START + f"from helper import {used}\nprint({used}(torch.ones(2)))\n",
        ),
    )
    severities = [finding.severity for finding in findings_in(files) if finding.rule == "DL071"]
    assert severities == [severity]


ONE_PROCESS = (
    "import os\nimport torch\nimport wandb\n"
    "def loss(x):\n    return x.mean()\n"
    "class Trainer:\n    def __init__(self):\n        wandb.init()\n"
    "def main():\n    if 'RANK' in os.environ:\n        print(os.environ['RANK'])\n    Trainer()\n"
    "if __name__ == '__main__':\n    main()\n"
)


@pytest.mark.parametrize(
    ("imported", "severity"),
    [
        ("from train import loss\nloss(x)", Severity.NOTE),
        ("from train import Trainer\nTrainer()", Severity.WARNING),
        ("import train\ntrain.Trainer()", Severity.WARNING),
        ("from train import main\nmain()", Severity.WARNING),
        ("from train import *\nTrainer()", Severity.WARNING),
    ],
)
def test_what_a_program_with_ranks_does_not_reach_is_a_note(
    imported: str, severity: Severity
) -> None:
    """`train.py` is also a program of its own, with one process."""
    files = (("train.py", ONE_PROCESS), ("train_ddp.py", f"{START}{imported}\n"))
    severities = [finding.severity for finding in findings_in(files) if finding.rule == "DL023"]
    assert severities == [severity]


def test_a_program_with_ranks_that_others_import_from() -> None:
    train = ONE_PROCESS.replace(
        "    if 'RANK'", "    torch.distributed.init_process_group()\n    if 'RANK'"
    )
    files = (
        ("train.py", train),
        ("evaluate.py", f"{START}from train import loss\nloss(x)\n"),
    )
    severities = [finding.severity for finding in findings_in(files) if finding.rule == "DL023"]
    assert severities == [Severity.WARNING]


def test_a_hang_in_a_folder_of_tests_is_a_note() -> None:
    text = START + "if dist.get_rank() == 0:\n    dist.barrier()\n"
    severities = [
        [finding.severity for finding in findings_in(((name, text),)) if finding.rule == "DL017"]
        for name in ("tools/check.py", "tests/check.py")
    ]
    assert severities == [[Severity.ERROR], [Severity.NOTE]]


@pytest.mark.parametrize(
    ("command", "severity"),
    [
        ("torchrun --nproc-per-node=8", Severity.WARNING),
        ("torchrun --nproc-per-node=1", Severity.NOTE),
        ("torchrun --nproc-per-node=1 --nnodes=4", Severity.WARNING),
        ("srun --nodes=1 --ntasks=1 python", Severity.NOTE),
        ("python", Severity.WARNING),
        ("CUDA_VISIBLE_DEVICES=3 python", Severity.NOTE),
        ("CUDA_VISIBLE_DEVICES=3 RANK=3 python", Severity.WARNING),
    ],
)
def test_what_is_said_of_every_rank_is_a_note_where_one_is_started(
    command: str, severity: Severity
) -> None:
    files = (("case.py", TRACKED), ("run.sh", f"{command} case.py\n"))
    findings = [finding for finding in findings_in(files) if finding.rule == "DL023"]
    assert [finding.severity for finding in findings] == [severity]


@pytest.mark.parametrize(
    ("name", "severity"),
    [("train.py", Severity.WARNING), ("train_single_gpu.py", Severity.NOTE)],
)
def test_what_is_said_of_every_rank_needs_a_start_of_several(name: str, severity: Severity) -> None:
    """In the file itself, and in a helper that it alone imports."""
    start = START.replace("dist.init", "def setup():\n    dist.init")
    files = (
        (name, start + "    import helper\n    helper.begin()\nsetup()\n"),
        ("helper.py", "import wandb\ndef begin():\n    wandb.init()\n"),
        (f"second_{name}", TRACKED),
    )
    severities = {
        finding.place.path: finding.severity
        for finding in findings_in(files)
        if finding.rule == "DL023"
    }
    assert severities == {"helper.py": severity, f"second_{name}": severity}


PERHAPS_SEVERAL = (
    "import torch.distributed as dist\nimport wandb\n"
    "def main(args):\n    if args.distributed:\n        dist.init_process_group('nccl')\n"
    "    wandb.init()\n"
)


@pytest.mark.parametrize(
    ("readme", "severity"),
    [
        ("```\npython case.py --epochs 9\n```\n", Severity.NOTE),
        ("```\n$ torchrun --nproc-per-node=8 case.py\n```\n", Severity.WARNING),
        (
            "```sh\npython case.py\n```\n```sh\ntorchrun --nproc-per-node=8 case.py\n```\n",
            Severity.WARNING,
        ),
        ("```python\npython case.py\n```\n", Severity.NOTE),
        ("Any start is fine.\n", Severity.NOTE),
    ],
)
def test_a_readme_may_say_that_one_process_is_started(readme: str, severity: Severity) -> None:
    files = (("case.py", PERHAPS_SEVERAL), ("README.md", readme))
    findings = [finding for finding in findings_in(files) if finding.rule == "DL023"]
    assert [finding.severity for finding in findings] == [severity]


NOT_CALLED = (
    "import torch\nimport torch.distributed as dist\n"
    "def main():\n    dist.init_process_group('nccl')\n"
    "    net = torch.nn.parallel.DistributedDataParallel(build())\n"
    "    torch.save(net.state_dict(), 'last.pt')\n"
    "if __name__ == '__main__':\n    START\n"
)


@pytest.mark.parametrize(
    ("start", "severity"),
    [
        ("print(dist.is_available())", Severity.NOTE),
        ("main()", Severity.WARNING),
        ("fire.Fire()", Severity.WARNING),
        ("globals()['main']()", Severity.WARNING),
    ],
)
def test_a_function_that_a_program_does_not_name(start: str, severity: Severity) -> None:
    findings = findings_in((("case.py", NOT_CALLED.replace("START", start)),))
    assert [each.severity for each in findings if each.rule == "DL014"] == [severity]


RESUMED = (
    "import argparse\n" + START + "parser = argparse.ArgumentParser()\n"
    "parser.add_argument('--load')\nargs = parser.parse_args(WORDS)\n"
    "net = build()\nif args.load:\n"
    "    net.load_state_dict(torch.load('last.pt', map_location='cuda:0'))\n"
)


@pytest.mark.parametrize(
    ("words", "severity"),
    [
        ("", Severity.WARNING),
        ("'--epochs 3'.split()", Severity.NOTE),
        ("['--epochs', '3']", Severity.NOTE),
        ("['--load=last.pt']", Severity.WARNING),
        ("'--epochs 3 --load x'.split()", Severity.WARNING),
        ("words.split()", Severity.WARNING),
        ("[])\nparser.add_argument('--load', default='last.pt'", Severity.WARNING),
        ("['--epochs', '3'])\nparser.add_argument('--load', default='last.pt'", Severity.WARNING),
    ],
)
def test_an_option_that_a_fixed_command_line_leaves_out(words: str, severity: Severity) -> None:
    findings = findings_in((("case.py", RESUMED.replace("WORDS", words)),))
    assert [each.severity for each in findings if each.rule == "DL019"] == [severity]


COUNTED = (
    "import argparse, deepspeed\nparser = argparse.ArgumentParser()\n"
    "parser.add_argument('--gradient_accumulation_steps', default=COUNT)\n"
    "args = parser.parse_args()\n"
    "config = {'gradient_accumulation_steps': args.gradient_accumulation_steps}\n"
    "engine, _, _, _ = deepspeed.initialize(model=net, config=config)\n"
    "for number, batch in enumerate(loader):\n    engine.backward(engine(batch).sum())\n"
    "    if (number + 1) % args.gradient_accumulation_steps == 0:\n        engine.step()\n"
)


@pytest.mark.parametrize(("count", "severity"), [("1", Severity.NOTE), ("8", Severity.WARNING)])
def test_micro_batches_that_are_counted_twice(count: str, severity: Severity) -> None:
    findings = findings_in((("case.py", COUNTED.replace("COUNT", count)),))
    assert [each.severity for each in findings if each.rule == "DL070"] == [severity]


KERNEL = (
    "import os\nfrom transformers import AutoModel, Trainer\nimport torch.distributed as dist\n"
    "dist.init_process_group()\nplace = os.environ['LOCAL_RANK']\n"
    "net = AutoModel.from_pretrained('bert', device_map='auto')\nTrainer(net).train()\n"
)


@pytest.mark.parametrize(
    ("text", "cells", "severity"),
    [
        (KERNEL, [], Severity.WARNING),
        (KERNEL, [Cell(1, 1)], Severity.NOTE),
        (KERNEL + "notebook_launcher(main, num_processes=2)\n", [Cell(1, 1)], Severity.WARNING),
    ],
)
def test_the_kernel_of_a_notebook_is_one_process(
    text: str, cells: list[Cell], severity: Severity
) -> None:
    source = Source(Path("case.py"), text, ast.parse(text), cells)
    findings = findings_of(all_rules()["DL089"], Program([source]), source)
    assert [finding.severity for finding in findings] == [severity]


@pytest.mark.parametrize(
    ("start", "script", "severity"),
    [
        ("    dist.init_process_group('nccl')\n", "", Severity.ERROR),
        (
            "    if args.distributed:\n        dist.init_process_group('nccl')\n",
            "",
            Severity.WARNING,
        ),
        (
            "    if args.distributed:\n        dist.init_process_group('nccl')\n",
            "torchrun --nproc-per-node=8 case.py\n",
            Severity.ERROR,
        ),
    ],
)
def test_an_error_needs_a_program_that_surely_has_ranks(
    start: str, script: str, severity: Severity
) -> None:
    text = f"import torch.distributed as dist\ndef main(args):\n{start}"
    text += "    if dist.get_rank() == 0:\n        dist.barrier()\n"
    findings = findings_in((("case.py", text), ("run.sh", script)))
    assert [each.severity for each in findings if each.rule == "DL017"] == [severity]


SAVED = IMPORTS + "def save(net):\n    torch.save(net.state_dict(), 'last.pt')\n"
TRAINED = START + "import helper\nhelper.save(net)\n"
PLAIN = "import helper\nhelper.save(net)\n"


@pytest.mark.parametrize(
    ("others", "severity"),
    [
        ({"train.py": TRAINED}, Severity.WARNING),
        ({"train.py": TRAINED, "second.py": TRAINED}, Severity.NOTE),
        ({"train.py": TRAINED, "export.py": PLAIN}, Severity.NOTE),
    ],
)
def test_a_file_of_several_programs_has_notes(others: dict[str, str], severity: Severity) -> None:
    findings = findings_in((("helper.py", SAVED), *others.items()))
    assert [each.severity for each in findings if each.rule == "DL014"] == [severity]


OPTIONAL = (
    "import helper\nimport torch\nimport torch.distributed as dist\nif options.ddp:\n"
    "    dist.init_process_group()\nnet = torch.nn.parallel.DistributedDataParallel(net)\n"
    "torch.save(net.state_dict(), 'last.pt')\n"
)


def test_another_program_beside_it_does_not_show_several_processes() -> None:
    """Both import the same file, and only one of them joins a group in any case."""
    files = (("train.py", OPTIONAL), ("train_ddp.py", TRAINED), ("helper.py", SAVED))
    findings = findings_in(files)
    severities = {each.severity for each in findings if each.place.path == "train.py"}
    assert severities == {Severity.NOTE}


DINO = (
    "import os\nimport subprocess\nimport torch.distributed as dist\nimport wandb\n"
    "def begin(args):\n    subprocess.check_output(['git', 'log'])\n"
    "    if 'SLURM_PROCID' in os.environ:\n        args.rank = 1\n"
    "    else:\n        FALLBACK\n"
    "    dist.init_process_group('nccl', rank=args.rank, world_size=args.world_size)\n"
    "begin(args)\nwandb.init()\n"
)


@pytest.mark.parametrize(
    ("fallback", "severity"),
    [
        ("args.rank, args.world_size = 0, 1", Severity.NOTE),
        ("args.world_size = 1", Severity.NOTE),
        ("args.rank, args.world_size = 0, 16", Severity.WARNING),
        ("args.world_size == 1", Severity.WARNING),
    ],
)
def test_a_program_that_goes_alone_is_started_by_python_alone(
    fallback: str, severity: Severity
) -> None:
    files = (
        ("train.py", DINO.replace("FALLBACK", fallback)),
        ("README.md", "```\npython train.py\n```\n"),
    )
    findings = [each for each in findings_in(files) if each.rule == "DL023"]
    assert [finding.severity for finding in findings] == [severity]


def notebook(*cells: str) -> str:
    return json.dumps({"cells": [{"cell_type": "code", "source": cell} for cell in cells]})


@pytest.mark.parametrize(("name", "severity"), [("save", Severity.NOTE), ("store", Severity.ERROR)])
def test_a_function_that_a_later_cell_replaces_is_of_another_example(
    name: str, severity: Severity
) -> None:
    cells = notebook(f"def {name}():\n    bad()\n", "def save():\n    pass\n")
    report = report_of({"a.ipynb": cells})
    assert [finding.severity for finding in report.findings] == [severity]


@pytest.mark.parametrize(
    ("name", "severity"),
    [
        ("diffusers/examples/train.py", Severity.NOTE),
        ("third_party/gan/train.py", Severity.NOTE),
        ("parts/examples/train.py", Severity.ERROR),
        ("train.py", Severity.ERROR),
    ],
)
def test_what_a_copy_of_a_library_brings_is_not_run(name: str, severity: Severity) -> None:
    files = {"diffusers/setup.py": "", "parts/setup.py": "", name: "bad()\n"}
    files.setdefault("main.py", "")
    report = report_of(files)
    assert [finding.severity for finding in report.findings] == [severity]


def test_a_library_that_is_checked_itself_is_no_copy() -> None:
    files = {"diffusers/setup.py": "", "diffusers/examples/train.py": "bad()\n"}
    assert [each.severity for each in report_of(files).findings] == [Severity.ERROR]


@pytest.mark.parametrize(
    ("load", "severity"),
    [
        ("net.load_state_dict(torch.load('last.pt'))", Severity.WARNING),
        (
            "state = torch.load('last.pt')\n"
            "state = {key.replace('module.', ''): state[key] for key in state}\n"
            "net.load_state_dict(state)",
            Severity.NOTE,
        ),
        ("net.load_state_dict(torch.load('first.pt'))", Severity.NOTE),
    ],
)
def test_what_a_program_beside_it_loads(load: str, severity: Severity) -> None:
    """Nothing imports the other."""
    saving = (
        START + "net = torch.nn.parallel.DistributedDataParallel(net)\n"
        "if dist.get_rank() == 0:\n    torch.save(net.state_dict(), 'last.pt')\n"
    )
    readings = [
        read_bytes(Path(name), text.encode())
        for name, text in (("train.py", saving), ("chat.py", f"import torch\n{load}\n"))
    ]
    rules = all_rules()
    results = run_rules(readings, rules, Settings(chosen=frozenset(rules)))
    assert [each.severity for each in results.findings if each.rule == "DL016"] == [severity]


@pytest.mark.parametrize(
    ("ranks", "severity"), [(1, Severity.NOTE), (2, Severity.WARNING), (4, Severity.WARNING)]
)
def test_a_download_where_a_script_starts_some_ranks_on_a_node(
    ranks: int, severity: Severity
) -> None:
    training = START + "import torchvision\ntorchvision.datasets.MNIST('data', download=True)\n"
    script = f"torchrun --nnodes=4 --nproc_per_node={ranks} train.py\n"
    findings = findings_in((("train.py", training), ("run.sh", script)))
    assert [each.severity for each in findings if each.rule == "DL042"] == [severity]


@pytest.mark.parametrize(
    ("command", "severity"),
    [("python train.py --gpus 1", Severity.NOTE), ("python other.py", Severity.WARNING)],
)
def test_a_file_that_is_imported_and_also_started_by_itself(
    command: str, severity: Severity
) -> None:
    """As one process, it is a program of its own."""
    started = (
        "import torch.distributed as dist\nfrom train import train\n"
        "dist.init_process_group('nccl')\ntrain()\n"
    )
    training = (
        "import wandb\ndef train():\n    wandb.init()\nif __name__ == '__main__':\n    train()\n"
    )
    files = (("train.py", training), ("train_ddp.py", started), ("run.sh", command + "\n"))
    severities = [each.severity for each in findings_in(files) if each.rule == "DL023"]
    assert severities == [severity]


@pytest.mark.parametrize(("count", "severity"), [(1, Severity.NOTE), (8, Severity.WARNING)])
def test_ranks_that_a_notebook_starts(count: int, severity: Severity) -> None:
    text = (
        "import accelerate, torch\nfrom torch.utils.data import DataLoader, DistributedSampler\n"
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "def train():\n    torch.distributed.init_process_group()\n    net = DDP(build())\n"
        "    torch.save(net.module.state_dict(), 'last.pt')\n"
        f"accelerate.notebook_launcher(train, num_processes={count})\n"
    )
    findings = findings_in((("case.py", text),))
    assert [each.severity for each in findings if each.rule == "DL014"] == [severity]
