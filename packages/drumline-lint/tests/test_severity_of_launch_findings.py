"""Findings in launch files whose severity is not that of their rule."""

from __future__ import annotations

import pytest

from drumline_lint.findings import Severity
from reading_cases import findings_in

SEVERITIES = {
    "the total of one machine, by a comment": (
        "DL114",
        "# two machines with 8 GPUs each\n"
        "accelerate launch --num_machines 2 --num_processes 8 --machine_rank $1 train.py\n",
        Severity.WARNING,
    ),
    "the total of one machine, by a comment on a test": (
        "DL114",
        "# tested on 8 GPUs per node\n"
        "accelerate launch --num_machines 2 --num_processes 8 --machine_rank $1 train.py\n",
        Severity.NOTE,
    ),
    "the total of one machine, by a comment on another run": (
        "DL114",
        "# the original used 8 GPUs per node\n"
        "accelerate launch --num_machines 2 --num_processes 8 --machine_rank $1 train.py\n",
        Severity.NOTE,
    ),
    "a variable in a line that sbatch reads": (
        "DL110",
        "#!/bin/bash\n#SBATCH --output=/logs/$TEAM/%j.out\nsrun python train.py\n",
        Severity.NOTE,
    ),
    "a line that sbatch does not read": (
        "DL110",
        "#!/bin/bash\nmodule load cuda\n#SBATCH --nodes=2\nsrun python train.py\n",
        Severity.WARNING,
    ),
    "P2P off, beside an unknown number of GPUs": (
        "DL123",
        "export NCCL_P2P_DISABLE=1\npython ddp.py\n",
        Severity.NOTE,
    ),
    "P2P off, beside eight ranks of one host": (
        "DL123",
        "export NCCL_P2P_DISABLE=1\ntorchrun --nproc-per-node=8 ddp.py\n",
        Severity.NOTE,
    ),
    "P2P off, in a job of two nodes": (
        "DL123",
        "#!/bin/bash\n#SBATCH --nodes=2\nexport NCCL_P2P_DISABLE=1\nsrun python ddp.py\n",
        Severity.NOTE,
    ),
    "a switch for debugging, for a trial": (
        "DL123",
        "export TORCH_DISTRIBUTED_DEBUG=DETAIL\ntorchrun --nproc_per_node=1 train.py\n",
        Severity.NOTE,
    ),
    "the first of two nodes at its own loopback address": (
        "DL109",
        "torchrun --nnodes=2 --node_rank=0 --master_addr=127.0.0.1 train.py\n",
        Severity.WARNING,
    ),
    "the loopback interface, of two nodes": (
        "DL123",
        "export NCCL_SOCKET_IFNAME=lo\n"
        "torchrun --nnodes=2 --node-rank=$RANK --master-addr=gpu01 train.py\n",
        Severity.WARNING,
    ),
    "blocking launches": (
        "DL123",
        "export CUDA_LAUNCH_BLOCKING=1\ntorchrun --nproc-per-node=8 ddp.py\n",
        Severity.NOTE,
    ),
    "InfiniBand off, where there may be none": (
        "DL123",
        "NCCL_IB_DISABLE=1 torchrun --nnodes=2 ddp.py\n",
        Severity.NOTE,
    ),
    "InfiniBand off, where there is some": (
        "DL123",
        "#SBATCH --nodes=2\nexport NCCL_SOCKET_IFNAME=ib0\n"
        "NCCL_IB_DISABLE=1 torchrun --nnodes=2 ddp.py\n",
        Severity.NOTE,
    ),
    "a log of NCCL": (
        "DL123",
        "export NCCL_DEBUG=TRACE\ntorchrun --nproc-per-node=8 ddp.py\n",
        Severity.NOTE,
    ),
    "a value behind a blank, of a variable that nothing reads": (
        "DL132",
        "NUM_BATCHES = 4\ntorchrun --nproc-per-node=8 ddp.py\n",
        Severity.NOTE,
    ),
    "a value behind a blank, of a variable that is read": (
        "DL132",
        "OUT = runs\ntorchrun --nproc-per-node=8 ddp.py --out $OUT\n",
        Severity.WARNING,
    ),
    "a launcher that a script leaves in the background, under nohup": (
        "DL119",
        "nohup torchrun --nproc-per-node=8 ddp.py &\n",
        Severity.NOTE,
    ),
    "a launcher that a script leaves behind after a pause": (
        "DL119",
        "nohup torchrun --nproc-per-node=8 ddp.py &\nsleep 5\necho started\n",
        Severity.NOTE,
    ),
    "a launcher under nohup that a script waits for": (
        "DL119",
        "nohup torchrun --nproc-per-node=8 ddp.py &\nwait\n",
        Severity.WARNING,
    ),
    "a launcher under nohup, in front": (
        "DL119",
        "nohup torchrun --nproc-per-node=8 ddp.py\n",
        Severity.WARNING,
    ),
    "the number of GPUs after deepspeed's script": (
        "DL112",
        "deepspeed train.py --num_gpus 4\n",
        Severity.WARNING,
    ),
}


@pytest.mark.parametrize(("rule", "text", "severity"), SEVERITIES.values(), ids=SEVERITIES)
def test_the_severity_of_a_finding(rule: str, text: str, severity: Severity) -> None:
    findings = [finding for finding in findings_in((("case.sh", text),)) if finding.rule == rule]
    assert [finding.severity for finding in findings] == [severity]


def test_an_argument_that_a_script_has_under_no_name() -> None:
    start = "python -m torch.distributed.launch --nproc_per_node=4 main.py\n"
    code = (
        "import argparse\nimport torch.distributed as dist\n"
        "args = argparse.ArgumentParser().parse_args()\ndist.barrier()\n"
    )
    findings = findings_in((("run.sh", start), ("main.py", code)))
    severities = {finding.severity for finding in findings if finding.rule == "DL106"}
    assert Severity.WARNING in severities


UNDERSCORED = (
    "import argparse\nimport torch\nimport torch.distributed as dist\n"
    "parser = argparse.ArgumentParser()\nparser.add_argument('--local_rank')\n"
    "args = parser.parse_args()\nnet = torch.compile(net)\ndist.barrier()\n"
)


@pytest.mark.parametrize(
    ("name", "text", "severities"),
    [
        ("requirements.txt", "numpy\ntorch==1.11.0+cu113\n", {Severity.NOTE}),
        ("requirements.txt", "torch>=1.8, <2.0\n", {Severity.NOTE}),
        ("pyproject.toml", '[tool.poetry.dependencies]\ntorch = "^1.13"\n', {Severity.NOTE}),
        ("environment.yml", "dependencies:\n- pytorch=1.12\n", {Severity.NOTE}),
        ("requirements.txt", "torch==2.1.0\n", {Severity.NOTE, Severity.WARNING}),
        ("requirements.txt", "torch>=1.8,<2.3\n", {Severity.NOTE, Severity.WARNING}),
        ("requirements.txt", "torchvision<2\n", {Severity.NOTE, Severity.WARNING}),
        ("tools/requirements.txt", "torch==1.9\n", {Severity.NOTE, Severity.WARNING}),
    ],
)
def test_an_argument_with_the_torch_that_the_project_pins(
    name: str, text: str, severities: set[Severity]
) -> None:
    start = "python -m torch.distributed.launch --nproc_per_node=4 main.py\n"
    findings = findings_in((("run.sh", start), ("main.py", UNDERSCORED), (name, text)))
    assert {finding.severity for finding in findings if finding.rule == "DL106"} == severities


def test_an_argument_in_a_program_that_mentions_a_newer_torch() -> None:
    start = "python -m torch.distributed.launch --nproc_per_node=4 main.py\n"
    code = UNDERSCORED.replace("net = torch.compile(net)", "print('needs PyTorch 2.0 or above')")
    findings = findings_in((("run.sh", start), ("main.py", code)))
    assert {finding.severity for finding in findings if finding.rule == "DL106"} == {Severity.NOTE}


INIT = "import os\nimport torch\nimport torch.distributed as dist\ndist.init_process_group()\n"
CLOCK = INIT + (
    "import time\nmodel = torch.nn.parallel.DistributedDataParallel(net)\nfor x in batches:\n"
    "    model(x).backward()\n    if time.time() > end:\n        break\n"
)
PARSED = "import argparse\nparser = argparse.ArgumentParser()\n"
FOLDER = INIT + "if not os.path.exists(out):\n    os.makedirs(out)\n"
ONE = "torchrun --nproc-per-node=1 --nnodes=1 train.py\n"
EIGHT = "torchrun --nproc-per-node=8 train.py\n"
OLD = "python -m torch.distributed.launch --nproc_per_node=8 train.py\n"
PERHAPS = INIT.replace("dist.init", "if options.ddp:\n    dist.init")
NEVER_JOINED = (
    "import torch\nimport torch.distributed as dist\n"
    "def main():\n    net = torch.nn.parallel.DistributedDataParallel(build())\n"
    "    torch.save(net.module.state_dict(), 'a.pt')\n"
    "if __name__ == '__main__':\n    main()\n"
)
SIGNALLED = INIT + (
    "import signal\nimport threading\nstopped = False\ndef stop(*_):\n    global stopped\n"
    "    stopped = True\nsignal.signal(signal.SIGTERM, stop)\n"
    "model = torch.nn.parallel.DistributedDataParallel(net)\nfor x in batches:\n"
    "    model(x).backward()\n    if stopped:\n        break\n"
)
STARTED = {
    "a clock of eight processes": ("DL045", EIGHT, CLOCK, Severity.WARNING),
    "a clock of a program that may be one process": (
        "DL045",
        "echo\n",
        CLOCK.replace("dist.init", "if options.ddp:\n    dist.init"),
        Severity.NOTE,
    ),
    "a save of a program that may be one process": (
        "DL014",
        "echo\n",
        PERHAPS + "torch.save(net, 'a.pt')\n",
        Severity.NOTE,
    ),
    "a save of a program that may be one process, and is started as eight": (
        "DL014",
        EIGHT,
        PERHAPS + "torch.save(net, 'a.pt')\n",
        Severity.WARNING,
    ),
    "a save of a program that wraps its model and joins no group": (
        "DL014",
        EIGHT,
        NEVER_JOINED,
        Severity.NOTE,
    ),
    "a save of a program that wraps its model and joins a group": (
        "DL014",
        EIGHT,
        NEVER_JOINED.replace("net =", "dist.init_process_group()\n    net ="),
        Severity.WARNING,
    ),
    "a signal of a program that goes on": ("DL045", EIGHT, SIGNALLED, Severity.WARNING),
    "a signal of a program that ends itself": (
        "DL045",
        EIGHT,
        SIGNALLED.replace(
            "    stopped", "    threading.Timer(60, lambda: os._exit(1))\n    stopped"
        ),
        Severity.NOTE,
    ),
    "a clock of one process, and of eight": ("DL045", ONE + EIGHT, CLOCK, Severity.WARNING),
    "a clock of several pythons": (
        "DL045",
        "export RANK=$1\npython train.py\n",
        CLOCK,
        Severity.WARNING,
    ),
    "a save of eight processes": (
        "DL014",
        EIGHT,
        INIT + "torch.save(net, 'a.pt')\n",
        Severity.WARNING,
    ),
    "a program that takes the local rank of older releases": (
        "DL106",
        OLD,
        INIT + PARSED + "parser.add_argument('--local_rank')\noptions = parser.parse_args()\n",
        Severity.NOTE,
    ),
}


@pytest.mark.parametrize(("rule", "script", "text", "severity"), STARTED.values(), ids=STARTED)
def test_the_severity_by_how_a_program_is_started(
    rule: str, script: str, text: str, severity: Severity
) -> None:
    findings = findings_in((("train.py", text), ("run.sh", script)))
    assert max(finding.severity for finding in findings if finding.rule == rule) == severity
