"""Findings whose severity is not that of their rule: what no program runs that a repository shows how
to start is a note."""

from __future__ import annotations

import pytest

from drumline_lint.findings import Finding, Severity
from reading_cases import findings_in

TRAINING = (
    "import torch\nimport torch.distributed as dist\nfrom steps import step\n"
    "dist.init_process_group('nccl')\n"
    "net = torch.nn.parallel.DistributedDataParallel(net)\n"
    "step(net).backward()\n"
    "torch.save(net.module.state_dict(), 'last.pt')\n"
    "if __name__ == '__main__':\n    main()\n"
)
STEPS = "def step(net):\n    return net(batch).sum()\n"


def saves(*texts: tuple[str, str]) -> dict[str, Finding]:
    """What DL014 says of the two programs `train.py` and `train_old.py`, by path."""
    files = dict((("train.py", TRAINING), ("train_old.py", TRAINING), ("steps.py", STEPS), *texts))
    findings = findings_in(tuple(files.items()))
    return {finding.place.path: finding for finding in findings if finding.rule == "DL014"}


def severity_of_old(*texts: tuple[str, str]) -> Severity:
    return saves(*texts)["train_old.py"].severity


@pytest.mark.parametrize(
    "text",
    [
        ("run.sh", "torchrun --nproc_per_node=4 train.py --epochs 3\n"),
        ("run.sh", "python -m torch.distributed.launch --nproc_per_node=4 train.py\n"),
        ("run.sh", "accelerate launch --num_processes 4 train.py\n"),
        ("run.sh", "deepspeed train.py --deepspeed\n"),
        ("run.sh", "SCRIPT=train.py\nsrun python -u $SCRIPT --epochs 3\n"),
        ("scripts/run.sh", "torchrun --nproc_per_node=4 $CODE/train.py\n"),
        (
            "run.sbatch",
            "#!/bin/bash\n#SBATCH --nodes=2\nsrun torchrun --nproc_per_node=4 \\\n  train.py\n",
        ),
        ("README.md", "Run:\n```sh\n$ torchrun --nproc_per_node=4 train.py\n```\n"),
        ("README.md", "Run:\n```\ntorchrun \\\n  --nproc_per_node=4 \\\n  train.py\n```\n"),
        ("docs/training.md", "```bash\ntorchrun --nproc_per_node=4 train.py\n```\n"),
    ],
)
def test_a_program_that_no_launch_starts_is_a_note(text: tuple[str, str]) -> None:
    findings = saves(text)
    assert findings["train.py"].severity is Severity.WARNING
    assert findings["train_old.py"].severity is Severity.NOTE
    assert findings["train_old.py"].message.endswith(
        "(a note: no launch shown here starts train_old.py)"
    )


def test_a_program_in_a_folder_that_a_script_enters() -> None:
    files = {
        "code/train.py": TRAINING,
        "code/train_old.py": TRAINING,
        "code/steps.py": STEPS,
        "run.sh": "cd code\ntorchrun --nproc_per_node=4 train.py\n",
    }
    findings = [each for each in findings_in(tuple(files.items())) if each.rule == "DL014"]
    severities = {finding.place.path: finding.severity for finding in findings}
    assert severities == {
        "code/train.py": Severity.WARNING,
        "code/train_old.py": Severity.NOTE,
    }


STARTED = ("run.sh", "torchrun --nproc_per_node=4 train.py\n")


@pytest.mark.parametrize(
    "texts",
    [
        (),
        (("run.sh", "echo nothing\n"),),
        (("run.sh", "python evaluate.py\n"), ("evaluate.py", "from steps import step\n")),
        (("run.sh", "python prepare_data.py\n"), ("prepare_data.py", "import steps\n")),
        (STARTED, ("more.sh", "torchrun --nproc_per_node=4 train_old.py\n")),
        (STARTED, ("more.sh", "# torchrun --nproc_per_node=4 train_old.py\n")),
        (STARTED, ("README.md", "`train_old.py` is for V100s.\n")),
        (STARTED, ("job.yaml", "script: tools/train_old.py\n")),
        (STARTED, ("pyproject.toml", '[project.scripts]\ntrain-old = "train_old:main"\n')),
        (("run.sh", "torchrun train.py\npython -m train_old\n"),),
        (STARTED, ("train.py", TRAINING + "    from train_old import main\n")),
        (STARTED, ("train_old.py", f'"""Usage: torchrun train_old.py"""\n{TRAINING}')),
    ],
)
def test_a_program_that_is_shown_keeps_its_severity(texts: tuple[tuple[str, str], ...]) -> None:
    """Also where no launch of training is shown at all."""
    assert severity_of_old(*texts) is Severity.WARNING


@pytest.mark.parametrize(
    ("importing", "severity"), [("train", Severity.WARNING), ("train_old", Severity.NOTE)]
)
def test_what_only_such_a_program_imports(importing: str, severity: Severity) -> None:
    helper = (
        "import torch.distributed as dist\nimport torch\ndist.init_process_group('nccl')\n"
        "def save(net):\n    torch.save(net.state_dict(), 'last.pt')\n"
    )
    text = TRAINING + "    from helper import save\n    save(net)\n"
    findings = saves(STARTED, ("helper.py", helper), (f"{importing}.py", text))
    assert findings["helper.py"].severity is severity
