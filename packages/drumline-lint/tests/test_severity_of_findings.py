"""Findings whose severity is not that of their rule: by what is known about the ranks."""

from __future__ import annotations

import pytest

from drumline_lint.findings import Severity
from reading_cases import findings_in

START = (
    "import os\nimport torch\nimport torch.distributed as dist\ndist.init_process_group('nccl')\n"
)
NORM = START + (
    "from torch.nn.parallel import DistributedDataParallel as DDP\n"
    "from torch.utils.data import DataLoader\n"
    "model = DDP(torch.nn.BatchNorm1d(8).cuda(), device_ids=[0])\n"
)
WRAPPED = (
    START
    + "net = torch.nn.parallel.DistributedDataParallel(net)\n"
    + "if dist.get_rank() == 0:\n    torch.save(net.state_dict(), 'last.pt')\n"
)
TOOL = (
    "import torch\nimport torch.distributed as dist\nfrom others import init_distributed_device\n"
    "def count(net):\n    if dist.is_initialized():\n        dist.barrier()\n"
    "def train():\n    init_distributed_device()\n    count(net)\n"
    "def evaluate():\n    count(torch.nn.DataParallel(net))\n"
    "if __name__ == '__main__':\n    evaluate()\n"
)
SEVERITIES = {
    "one process for all GPUs": (
        "DL001",
        "import torch\nmodel = torch.nn.DataParallel(net)\n",
        Severity.NOTE,
    ),
    "all GPUs in every process": (
        "DL001",
        START + "model = torch.nn.DataParallel(net)\n",
        Severity.WARNING,
    ),
    "all GPUs in every process, if it has several": (
        "DL001",
        START + "if args.n_gpu > 1:\n    model = torch.nn.DataParallel(net)\n",
        Severity.NOTE,
    ),
    "a load of weights from elsewhere": (
        "DL019",
        START + "weights = torch.load('pretrained.pt')\n",
        Severity.NOTE,
    ),
    "a load of what the run saved": (
        "DL019",
        START
        + "net.load_state_dict(torch.load(resume))\n"
        + "if dist.get_rank() == 0:\n    torch.save(net.state_dict(), resume)\n",
        Severity.WARNING,
    ),
    "a save of local rank 0": (
        "DL015",
        START + "if int(os.environ['LOCAL_RANK']) == 0:\n    torch.save(net, 'last.pt')\n",
        Severity.NOTE,
    ),
    "a save of local rank 0 on several nodes": (
        "DL015",
        "# torchrun --nnodes 2 train.py\n"
        + START
        + "if int(os.environ['LOCAL_RANK']) == 0:\n    torch.save(net, 'last.pt')\n",
        Severity.WARNING,
    ),
    "a state of the wrapper": ("DL016", WRAPPED, Severity.WARNING),
    "a state of the wrapper, and loaded into it": (
        "DL016",
        WRAPPED + "net.load_state_dict(torch.load('last.pt', map_location='cpu'))\n",
        Severity.NOTE,
    ),
    "a state of the wrapper, and resumed with it": (
        "DL016",
        WRAPPED + "resume('last.pt', weights=net)\n",
        Severity.NOTE,
    ),
    "all GPUs in a tool beside a training": ("DL001", TOOL, Severity.NOTE),
    "a file that every rank writes": (
        "DL014",
        START + "with open('scores.txt', 'w') as file:\n    file.write('1')\n",
        Severity.WARNING,
    ),
    "a file that every rank downloads": (
        "DL014",
        START
        + "def download():\n    with open('data.zip', 'wb') as file:\n        file.write(part)\n"
        + "download()\n",
        Severity.NOTE,
    ),
    "a checkpoint of every rank": ("DL014", START + "torch.save(net, 'last.pt')\n", Severity.ERROR),
    "data that every rank prepares": (
        "DL014",
        START + "import numpy\nnumpy.save('features.npy', features)\n",
        Severity.WARNING,
    ),
    "a printed line": ("DL023", START + "print('a')\n", Severity.NOTE),
    "a run of a tracker": ("DL023", START + "import wandb\nwandb.init()\n", Severity.WARNING),
    "a BatchNorm and batches of unknown size": (
        "DL006",
        NORM + "DataLoader(data, batch_size=size)\n",
        Severity.NOTE,
    ),
    "a BatchNorm and batches of two": (
        "DL006",
        NORM + "DataLoader(data, batch_size=2)\n",
        Severity.WARNING,
    ),
    "a BatchNorm and an evaluation of one sample": (
        "DL006",
        NORM + "DataLoader(data, batch_size=1)\n",
        Severity.NOTE,
    ),
    "lines in one file": (
        "DL014",
        START + "with open('log', 'w') as file:\n    file.write('a')\n",
        Severity.WARNING,
    ),
    "a timeout of a wrong type": (
        "DL025",
        START.replace("'nccl'", "'nccl', timeout=60"),
        Severity.ERROR,
    ),
    "a folder named by the clock": (
        "DL046",
        START + "import time\nos.makedirs(time.strftime('%H'), exist_ok=True)\n",
        Severity.WARNING,
    ),
    "a flag of an unknown launcher": (
        "DL056",
        START + "parser.add_argument('--local_rank')\n",
        Severity.NOTE,
    ),
    "a flag under torchrun": (
        "DL056",
        "# torchrun train.py\n" + START + "parser.add_argument('--local_rank')\n",
        Severity.WARNING,
    ),
}


@pytest.mark.parametrize("name", SEVERITIES)
def test_the_severity(name: str) -> None:
    rule, text, severity = SEVERITIES[name]
    findings = findings_in((("case.py", text),))
    assert [finding.severity for finding in findings if finding.rule == rule] == [severity]
