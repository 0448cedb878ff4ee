"""Findings whose severity is not that of their rule: by what one file says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from drumline_lint.findings import Severity
from drumline_lint.levels import Evidence, limited
from drumline_lint.reading.source import Source
from drumline_lint.rules import all_rules
from reading_cases import findings_in

IMPORTS = "import os\nimport torch\nimport torch.distributed as dist\n"
START = IMPORTS + "dist.init_process_group('nccl')\n"
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
SAME_DATA = (
    START
    + "loader = torch.utils.data.DataLoader(data, shuffle=True)\n"
    + "net = torch.nn.parallel.DistributedDataParallel(net)\n"
    + "for epoch in range(3):\n    for batch in loader:\n        net(batch).backward()\n"
)
DOWNLOAD = START + "import torchvision\ntorchvision.datasets.MNIST('data', download=True)\n"
NODE_RANKS = (
    IMPORTS + "import torchvision\n"
    "dist.init_process_group('gloo', world_size=NUMBER, rank=args.rank)\n"
    "torchvision.datasets.MNIST('data', download=True)\n"
    "net = torch.nn.parallel.DistributedDataParallel(net)\n"
)
SPAWN = (
    "import torch.distributed as dist\nimport torch.multiprocessing as mp\n"
    "def work(rank):\n    dist.barrier()\n"
)
SCALED = (
    START
    + "scaler = torch.cuda.amp.GradScaler()\nnet = torch.nn.parallel.DistributedDataParallel(a)\n"
    "for x in batches:\n    scaler.scale(net(x)).backward()\n    scaler.step(fast)\n"
)
SPAWNED = (
    IMPORTS + "import argparse\nimport torch.multiprocessing as mp\n"
    "def train(rank, args):\n    dist.init_process_group('nccl', rank=rank, world_size=args.gpus)\n"
    "    torch.save(net, 'last.pt')\n"
    "parser = argparse.ArgumentParser()\nparser.add_argument('-g', '--gpus', default=COUNT)\n"
    "args = parser.parse_args()\nmp.spawn(train, nprocs=args.gpus, args=(args,))\n"
)
MODES = (
    IMPORTS
    + "def main(args):\n    dist.init_process_group('nccl')\n"
    + "    if args.mode == 'train':\n        PLACE_OF_TRAINING\n"
    + "    else:\n        PLACE_OF_OTHERS\n"
    + "main(options)\n"
)
EPOCHS = (
    "import argparse\n" + START + "parser = argparse.ArgumentParser()\n"
    "parser.add_argument('--epochs', type=int, default=COUNT)\nargs = parser.parse_args()\n"
    "sampler = torch.utils.data.DistributedSampler(data)\n"
    "loader = torch.utils.data.DataLoader(data, sampler=sampler)\n"
    "net = torch.nn.parallel.DistributedDataParallel(net)\n"
    "for epoch in range(args.epochs):\n    for x in loader:\n        net(x).backward()\n"
)
TRACKED = START + "import wandb\nwandb.init()\n"
SAVING = "torch.save(net.state_dict(), 'masks.pt')"
WORK = START + "def evaluate(data):\n    data.map(tokenize)\nif dist.get_rank() == 0:\n    CALL\n"
OWNERS = (
    START + "rank = dist.get_rank()\nclass Writer:\n    def __init__(self, rank):\n"
    "        self.process_idx = rank\n    def write(self, batches):\n"
    "        for batch_idx, (owner, batch) in enumerate(batches):\n"
    "            SKIP\n                continue\n            self.queue.put((batch_idx, batch))\n"
    "        for item in iter(self.queue.get, None):\n            self.save(*item)\n"
    "    def save(self, batch_idx, batch):\n        torch.save(batch, f'{batch_idx}.pt')\n"
    "Writer(rank).write(batches)\n"
)
SCHEDULED = (
    "from accelerate import Accelerator\naccelerator = Accelerator()\n"
    "net, data = accelerator.prepare(net, data)\nsteps = len(data) * 3\n"
    "schedule = CALL\nschedule = accelerator.prepare(schedule)\n"
)
NODES = (
    IMPORTS + "import argparse\nimport torch.multiprocessing as mp\n"
    "def work(gpu, args):\n    args.world_size = args.nodes * args.gpus\n"
    "    dist.init_process_group('nccl', world_size=args.world_size, rank=gpu)\n"
    "parser = argparse.ArgumentParser()\nparser.add_argument('--gpus', type=int)\n"
    "parser.add_argument('--nodes', type=int, default=COUNT)\nargs = parser.parse_args()\n"
    "mp.spawn(work, nprocs=args.gpus, args=(args,))\n"
)
SPAWNED_TRACKER = (
    "import torch.distributed as dist\nimport torch.multiprocessing as mp\nimport wandb\n"
    "def train(rank, size):\n    dist.init_process_group('nccl', rank=rank, world_size=size)\n"
    "    wandb.init()\nworld_size = COUNT\n"
    "mp.spawn(train, args=(world_size,), nprocs=world_size)\n"
)
WRITER = START + (
    "from torch.utils.tensorboard import SummaryWriter\nwriter = SummaryWriter('runs')\n"
)
EVALUATION = (
    START + "from torch.utils.data import DataLoader, DistributedSampler\n"
    "loader = DataLoader(data, sampler=DistributedSampler(data, shuffle=False))\n"
    "total = 0\nwith torch.no_grad():\n    for x, y in loader:\n"
    "        total += (net(x) == y).sum().item()\nprint(total)\n"
)
ACCELERATED = (
    "from accelerate import Accelerator\naccelerator = Accelerator(mixed_precision='PRECISION')\n"
    "net, data = accelerator.prepare(net, data)\nfor x in data:\n    net(x).mean().backward()\n"
)
GLOO = (
    "import torch\nimport torch.distributed as dist\n"
    "def work(model, rank, backend='BACKEND'):\n"
    "    dist.init_process_group(backend, rank=rank, world_size=2)\n"
    "    return torch.nn.parallel.DistributedDataParallel(model.cuda())\n"
)
BARRIER = START + "if dist.get_rank() == 0 and CONDITION:\n    dist.barrier()\n"
LOCAL_RANK = "# torchrun train.py\n" + START + "parser.add_argument('--local_rank')\n"
SEVERITIES = {
    "a save of the training": (
        "DL014",
        MODES.replace("PLACE_OF_TRAINING", SAVING).replace("PLACE_OF_OTHERS", "pass"),
        Severity.WARNING,
    ),
    "long work before a barrier": (
        "DL025",
        WORK.replace("CALL", "data.map(tokenize).save_to_disk(out)") + "dist.barrier()\n",
        Severity.NOTE,
    ),
    "the same data in the same order": (
        "DL003",
        SAME_DATA.replace("loader =", "torch.manual_seed(0)\nloader =", 1),
        Severity.WARNING,
    ),
    "the same data in an order of each rank": ("DL003", SAME_DATA, Severity.WARNING),
    "the same data beside a sampler that no loader gets": (
        "DL003",
        SAME_DATA.replace(
            "loader =", "sampler = torch.utils.data.DistributedSampler(data)\nloader ="
        ),
        Severity.NOTE,
    ),
    "the same data beside the name of the sampler": (
        "DL003",
        "from torch.utils.data import DistributedSampler\n" + SAME_DATA,
        Severity.NOTE,
    ),
    "the same data beside other data that is divided": (
        "DL003",
        SAME_DATA + "torch.utils.data.DataLoader(\n"
        "    images, sampler=torch.utils.data.DistributedSampler(images)\n)\n",
        Severity.NOTE,
    ),
    "a spawn without a guard": ("DL067", SPAWN + "mp.spawn(work, nprocs=2)\n", Severity.WARNING),
    "a barrier of rank 0": (
        "DL017",
        START + "if dist.get_rank() == 0:\n    dist.barrier()\n",
        Severity.ERROR,
    ),
    "a barrier of rank 0 at an interval of tests": (
        "DL017",
        BARRIER.replace("CONDITION", "epoch % args.test_interval == 0"),
        Severity.ERROR,
    ),
    "a barrier of rank 0 on an option about ranks": (
        "DL017",
        BARRIER.replace("CONDITION", "cfg.rank0_only"),
        Severity.ERROR,
    ),
    "a barrier of rank 0 on an option that has test in its name": (
        "DL017",
        BARRIER.replace("CONDITION", "args.latest"),
        Severity.ERROR,
    ),
    "a barrier of rank 0 in runs that are not for debugging": (
        "DL017",
        BARRIER.replace("CONDITION", "not args.debug"),
        Severity.ERROR,
    ),
    "a barrier of rank 0 in runs for debugging": (
        "DL017",
        BARRIER.replace("CONDITION", "args.debug"),
        Severity.NOTE,
    ),
    "a barrier of rank 0 where a constant is for debugging": (
        "DL017",
        BARRIER.replace("CONDITION", "DEBUG"),
        Severity.NOTE,
    ),
    "a barrier of rank 0 in runs that only test": (
        "DL017",
        BARRIER.replace("CONDITION", "args.test_only"),
        Severity.NOTE,
    ),
    "a load of what the run saved": (
        "DL019",
        START
        + "net = build()\nnet.load_state_dict(torch.load(resume))\n"
        + "if dist.get_rank() == 0:\n    torch.save(net.state_dict(), resume)\n",
        Severity.NOTE,
    ),
    "a load onto the first GPU": (
        "DL019",
        START + "net.load_state_dict(torch.load(resume, map_location='cuda:0'))\n",
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
    "a state of the wrapper": ("DL016", WRAPPED, Severity.NOTE),
    "a state of the wrapper, and loaded without it": (
        "DL016",
        WRAPPED + "build().load_state_dict(torch.load('last.pt', map_location='cpu'))\n",
        Severity.WARNING,
    ),
    "a state of the wrapper, loaded by a loader that strips it": (
        "DL016",
        WRAPPED
        + "build().load_state_dict({key[len('module.'):]: value for key, value in old.items()})\n",
        Severity.NOTE,
    ),
    "a state of the wrapper under a key that nothing reads": (
        "DL016",
        WRAPPED.replace("net.state_dict()", "{'model_state': net.state_dict()}")
        + "build().load_state_dict(torch.load('start.pt')['model'])\n",
        Severity.NOTE,
    ),
    "a state of the wrapper under a key that is read": (
        "DL016",
        WRAPPED.replace("net.state_dict()", "{'model_state': net.state_dict()}")
        + "build().load_state_dict(torch.load('last.pt')['model_state'])\n",
        Severity.WARNING,
    ),
    "a layer that is trained beside the wrapped model": (
        "DL091",
        START
        + "net = torch.nn.parallel.DistributedDataParallel(net)\nhead = torch.nn.Linear(8, 2)\n"
        + "fast = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.1)\n",
        Severity.NOTE,
    ),
    "a model that Accelerate does not get": (
        "DL091",
        "import torch\nfrom accelerate import Accelerator\naccelerator = Accelerator()\n"
        "net = torch.nn.Linear(8, 2)\nfast = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "fast, data = accelerator.prepare(fast, data)\n"
        "for x in data:\n    accelerator.backward(net(x).sum())\n    fast.step()\n",
        Severity.WARNING,
    ),
    "a model with a BatchNorm": (
        "DL040",
        NORM + "if dist.get_rank() == 0:\n    model(x)\n",
        Severity.NOTE,
    ),
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
    "a file that every rank writes": (
        "DL014",
        START
        + "import json\nwith open('scores.json', 'w') as file:\n    json.dump(scores, file)\n",
        Severity.NOTE,
    ),
    "a checkpoint of every rank": (
        "DL014",
        START + "torch.save(net, 'last.pt')\n",
        Severity.WARNING,
    ),
    "a checkpoint in a function that joins the group": (
        "DL014",
        IMPORTS + "def run():\n    dist.init_process_group()\n    torch.save(net, 'last.pt')\n",
        Severity.WARNING,
    ),
    "a checkpoint of an interrupted run": (
        "DL014",
        START + "try:\n    train()\nexcept KeyboardInterrupt:\n"
        "    torch.save(net.state_dict(), 'last.pt')\n",
        Severity.NOTE,
    ),
    "a file that is prepared once": (
        "DL014",
        START + "def preprocess():\n    torch.save(x, 'features.pt')\npreprocess()\n",
        Severity.NOTE,
    ),
    "an exit of the first rank": (
        "DL018",
        START + "def run(rank):\n    if rank == 0:\n        return\n    dist.barrier()\n",
        Severity.ERROR,
    ),
    "a checkpoint of a spawn of several": (
        "DL014",
        SPAWNED.replace("COUNT", "4"),
        Severity.WARNING,
    ),
    "a download of several processes": ("DL042", DOWNLOAD, Severity.WARNING),
    "a download where the wrapping was taken out": (
        "DL042",
        DOWNLOAD + "# net = torch.nn.parallel.DistributedDataParallel(net)\n",
        Severity.NOTE,
    ),
    "a folder of an evaluation": (
        "DL046",
        START + "def evaluate():\n    os.makedirs('scores')\nevaluate()\n",
        Severity.NOTE,
    ),
    "a timeout of a wrong type": (
        "DL025",
        START.replace("'nccl'", "'nccl', timeout=60"),
        Severity.WARNING,
    ),
    "a folder where a group is begun on demand": (
        "DL046",
        IMPORTS + "if args.local_rank != -1:\n    dist.init_process_group()\n"
        "net = torch.nn.parallel.DistributedDataParallel(net)\nos.makedirs('out')\n",
        Severity.NOTE,
    ),
    "a flag of an unknown launcher": (
        "DL056",
        START + "parser.add_argument('--local_rank')\n",
        Severity.NOTE,
    ),
    "a flag for a framework that reads the variable itself": (
        "DL056",
        "# torchrun train.py\nfrom transformers import Trainer\n"
        + START
        + "parser.add_argument('--local_rank')\n",
        Severity.NOTE,
    ),
    "a checkpoint of something else": (
        "DL014",
        START + "torch.save(masks, 'masks.pt')\n",
        Severity.NOTE,
    ),
    "an exit on an option": (
        "DL018",
        START + "def run(rank, args):\n    if args.check and rank == 0:\n        return\n"
        "    dist.barrier()\n",
        Severity.NOTE,
    ),
    "an exit by what the loop counts": (
        "DL018",
        START + "bad = 0\nwhile True:\n    if dist.get_rank() == 0:\n        bad += 1\n"
        "        if bad > args.patience:\n            break\n    dist.barrier()\n",
        Severity.ERROR,
    ),
    "a collective of a framework": (
        "DL017",
        "import pytorch_lightning as pl\ntrainer = pl.Trainer(devices=4)\n"
        "if trainer.global_rank == 0:\n    trainer.save_checkpoint('last.ckpt')\n",
        Severity.NOTE,
    ),
    "an exit at a step for tests": (
        "DL018",
        START + "step = 0\nwhile True:\n    step += 1\n"
        "    if dist.get_rank() == 0 and step > args.test_freq:\n        break\n"
        "    dist.barrier()\n",
        Severity.ERROR,
    ),
    "a model that rank 0 runs at an interval of tests": (
        "DL040",
        NORM
        + "if dist.get_rank() == 0 and epoch % args.test_interval == 0:\n    model(x).backward()\n",
        Severity.WARNING,
    ),
    "a model that rank 0 runs for debugging": (
        "DL040",
        NORM + "if dist.get_rank() == 0 and args.debug:\n    model(x).backward()\n",
        Severity.NOTE,
    ),
    "a model that a function runs": (
        "DL040",
        NORM + "def run(net):\n    net(x)\nif dist.get_rank() == 0:\n    run(model)\n",
        Severity.NOTE,
    ),
    "an order of a single epoch": (
        "DL005",
        EPOCHS.replace("COUNT", "1"),
        Severity.NOTE,
    ),
    "an order of several epochs": (
        "DL005",
        EPOCHS.replace("COUNT", "90"),
        Severity.WARNING,
    ),
    "a wrapped state that is loaded as a whole file": (
        "DL016",
        WRAPPED + "plain.load_state_dict(torch.load('last.pt'))\n",
        Severity.WARNING,
    ),
    "a wrapped state where only parts of files are loaded": (
        "DL016",
        WRAPPED + "plain.load_state_dict(torch.load('last.pt')['model'])\n",
        Severity.NOTE,
    ),
    "a wrapped state that is written anew before it is loaded": (
        "DL016",
        WRAPPED + "state = rename(torch.load('last.pt'))\nplain.load_state_dict(state)\n",
        Severity.NOTE,
    ),
    "a schedule that may be constant": (
        "DL070",
        SCHEDULED.replace("CALL", "get_scheduler(args.schedule, optimizer, steps)"),
        Severity.NOTE,
    ),
    "a schedule that is not constant": (
        "DL070",
        SCHEDULED.replace("CALL", "get_linear_schedule(optimizer, steps)"),
        Severity.WARNING,
    ),
    "a pretrained model that is named in what rank 0 writes": (
        "DL062",
        START + "if dist.get_rank() == 0:\n    save_card(base_model=args.pretrained_path)\n"
        "load(args.pretrained_path)\n",
        None,
    ),
    "the local rank on two nodes": (
        "DL074",
        NODES.replace("COUNT", "2"),
        Severity.WARNING,
    ),
    "the local rank on one node": ("DL074", NODES.replace("COUNT", "1"), Severity.NOTE),
    "a tracker of a trainer that joins as it is made": (
        "DL023",
        IMPORTS + "import wandb\nclass Trainer:\n    def __init__(self):\n"
        "        dist.init_process_group('nccl')\n    def fit(self):\n        wandb.init()\n"
        "Trainer().fit()\n",
        Severity.WARNING,
    ),
    "ranks of which there is one": (
        "DL023",
        SPAWNED_TRACKER.replace("COUNT", "1"),
        Severity.NOTE,
    ),
    "ranks of which there are two": (
        "DL023",
        SPAWNED_TRACKER.replace("COUNT", "2"),
        Severity.WARNING,
    ),
    "a writer that every rank uses": (
        "DL023",
        WRITER + "writer.add_scalar('loss', 0.1)\n",
        Severity.NOTE,
    ),
    "a metric of a part": ("DL061", EVALUATION, Severity.WARNING),
    "a metric of a part that is meant": (
        "DL061",
        EVALUATION.replace("with torch", "# only results from rank 0 are used here\nwith torch"),
        Severity.NOTE,
    ),
    "a backward that Accelerate would not scale": (
        "DL070",
        ACCELERATED.replace("PRECISION", "bf16"),
        Severity.NOTE,
    ),
    "a backward that Accelerate would scale": (
        "DL070",
        ACCELERATED.replace("PRECISION", "fp16"),
        Severity.WARNING,
    ),
    "a file that is read where no group begins": (
        "DL062",
        "from torch.nn.parallel import DistributedDataParallel\nUSE_DDP = False\nif USE_DDP:\n"
        "    net = DistributedDataParallel(net)\nif rank == 0:\n    save(net, 'net.pt')\n"
        "net = load('net.pt')\n",
        Severity.NOTE,
    ),
    "a folder that is deleted": (
        "DL046",
        START + "import shutil\nshutil.rmtree('out')\n",
        Severity.NOTE,
    ),
    "one epoch": (
        "DL005",
        EPOCHS.replace("COUNT", "3").replace("range(args.epochs)", "range(1)"),
        Severity.NOTE,
    ),
    "statistics of a dataset": (
        "DL014",
        START
        + "import json\ndef build(data):\n"
        + "    sampler = torch.utils.data.DistributedSampler(data)\n"
        + "    return torch.utils.data.DataLoader(data, sampler=sampler), data.statistics\n"
        + "loader, statistics = build(data)\n"
        + "with open('statistics.json', 'w') as file:\n    json.dump(statistics, file)\n",
        Severity.NOTE,
    ),
    "a download of a rank on each node": (
        "DL042",
        NODE_RANKS.replace("NUMBER", "args.num_nodes"),
        Severity.NOTE,
    ),
    "a download of several ranks on each node": (
        "DL042",
        NODE_RANKS.replace("NUMBER", "args.num_nodes * 8"),
        Severity.WARNING,
    ),
    "a tracker of several ranks": ("DL023", TRACKED, Severity.WARNING),
    "a flag under torchrun": (
        "DL056",
        "# torchrun train.py\n"
        + START
        + "parser.add_argument('--local_rank')\nprint(parser.parse_args().local_rank)\n",
        Severity.WARNING,
    ),
    "a flag under torchrun that is read by a key": (
        "DL056",
        LOCAL_RANK + "print(vars(parser.parse_args())['local_rank'])\n",
        Severity.WARNING,
    ),
    "a flag under torchrun that is read by its name": (
        "DL056",
        LOCAL_RANK + "print(getattr(parser.parse_args(), 'local_rank', 0))\n",
        Severity.WARNING,
    ),
    "a flag under torchrun that is read under another name": (
        "DL056",
        LOCAL_RANK.replace("_rank')", "_rank', dest='gpu')") + "print(parser.parse_args().gpu)\n",
        Severity.WARNING,
    ),
    "a flag under torchrun whose other name nothing reads": (
        "DL056",
        LOCAL_RANK.replace("_rank')", "_rank', dest='gpu')") + "print(job.local_rank)\n",
        Severity.NOTE,
    ),
    "a flag under torchrun that nothing reads": (
        "DL056",
        "# torchrun train.py\n" + START + "parser.add_argument('--local_rank')\n",
        Severity.NOTE,
    ),
}


@pytest.mark.parametrize("name", SEVERITIES)
def test_the_severity(name: str) -> None:
    rule, text, severity = SEVERITIES[name]
    findings = findings_in((("case.py", text),))
    expected = [] if severity is None else [severity]
    assert [finding.severity for finding in findings if finding.rule == rule] == expected


@pytest.mark.parametrize(
    ("rule", "level", "evidence", "severity"),
    [
        ("DL017", Severity.ERROR, Evidence.COMPLETE, Severity.ERROR),
        ("DL017", Severity.ERROR, Evidence.PERHAPS_ONE_PROCESS, Severity.WARNING),
        ("DL017", Severity.WARNING, Evidence.PERHAPS_ONE_PROCESS, Severity.NOTE),
        ("DL014", Severity.ERROR, Evidence.COMPLETE, Severity.WARNING),
        ("DL014", Severity.WARNING, Evidence.SEVERAL_PROGRAMS, Severity.NOTE),
        ("DL042", Severity.WARNING, Evidence.SEVERAL_PROGRAMS, Severity.WARNING),
        ("DL042", Severity.WARNING, Evidence.PERHAPS_ONE_PROCESS, Severity.NOTE),
        ("DL005", Severity.WARNING, Evidence.PERHAPS_ONE_PROCESS, Severity.WARNING),
    ],
)
def test_no_finding_is_more_than_its_rule_has_earned(
    rule: str, level: Severity, evidence: Evidence, severity: Severity
) -> None:
    docs = all_rules()[rule].RULE
    where = Source(Path("case.py"), "pass\n", ast.parse("pass\n"))
    finding = docs.at(where, where.tree.body[0], "", severity=level)
    assert limited(finding, docs, evidence).severity is severity


def test_only_rules_that_have_earned_errors_report_them() -> None:
    texts = {
        number: Path(module.__file__).read_text()
        for number, module in all_rules().items()
        if module.RULE.severity is not Severity.ERROR
    }
    assert [number for number, text in texts.items() if "Severity.ERROR" in text] == []
