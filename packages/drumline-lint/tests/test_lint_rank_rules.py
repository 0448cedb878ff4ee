"""What the rules on ranks say, and the mend of the one that can be mended."""

from __future__ import annotations

import pytest

from drumline_lint.rules import all_rules
from reading_cases import findings_in

DDP = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
"""


def said(rule: str, text: str) -> list[str]:
    return [one.message for one in findings_in((("case.py", DDP + text),)) if one.rule == rule]


@pytest.mark.parametrize(
    ("rule", "text", "message"),
    [
        (
            "DL014",
            "dist.barrier()\ntorch.save({}, 'a.pt')\n",
            "torch.save runs on every rank and writes 'a.pt'",
        ),
        (
            "DL015",
            "dist.barrier()\nif local_rank == 0:\n    torch.save({}, 'a.pt')\n",
            "torch.save runs once on every node, and all nodes write 'a.pt'",
        ),
        (
            "DL016",
            "net = DDP(x)\nif dist.get_rank() == 0:\n    torch.save(net.state_dict(), 'a.pt')\n",
            "net is wrapped: the keys of net.state_dict() all begin with `module.`",
        ),
        (
            "DL017",
            "if dist.get_rank() == 0:\n    dist.barrier()\n",
            "only rank 0 calls dist.barrier, which blocks until every rank calls it",
        ),
        (
            "DL017",
            "if local_rank == 0:\n    dist.barrier()\n",
            "only one process of each node calls dist.barrier, which blocks until every rank calls it",
        ),
        (
            "DL017",
            "if dist.get_rank() != 0:\n    dist.barrier()\n",
            "all ranks but one call dist.barrier, which blocks until every rank calls it",
        ),
        (
            "DL017",
            "def a():\n    b()\ndef b():\n    dist.barrier()\nif dist.get_rank() in (0, 1):\n    a()\n",
            "only some ranks call a, which calls barrier through b: that blocks until every rank calls it",
        ),
        (
            "DL018",
            "def a(rank):\n    if rank == 0:\n        return\n    dist.barrier()\n",
            "rank 0 leaves here, and the other ranks block in barrier (line 7)",
        ),
        (
            "DL018",
            "def a(rank):\n    for x in y:\n        if rank == 0:\n            break\n        DDP(x)(x).backward()\n",
            "rank 0 leaves here, and the other ranks block in the backward pass",
        ),
        (
            "DL019",
            "dist.init_process_group()\nnet.load_state_dict(torch.load(resume))\n"
            "if dist.get_rank() == 0:\n    torch.save(net.state_dict(), resume)\n",
            "every rank loads resume onto the GPU that it was saved from",
        ),
        (
            "DL023",
            "import wandb\ndist.init_process_group()\nwandb.init()\n",
            "wandb.init begins a run on every rank",
        ),
        (
            "DL040",
            "net = DDP(x)\nif dist.get_rank() == 0:\n    net(y)\n",
            "only rank 0 calls net, which runs the wrapped net: its first forward broadcasts the buffers of "
            "rank 0, which the other ranks match with whatever collective they come to next",
        ),
        (
            "DL040",
            "def a(m):\n    return m(y)\nnet = DDP(x)\nif local_rank == 0:\n    a(net).backward()\n",
            "only one process of each node calls a, which runs the wrapped net: its backward averages "
            "gradients over all ranks, and the other ranks do not run it",
        ),
        (
            "DL040",
            "from torch.distributed import fsdp\nnet = fsdp.fully_shard(x)\nif dist.get_rank() != 0:\n    net(y)\n",
            "all ranks but one call net, which runs the wrapped net: its forward gathers the weights from all "
            "ranks, and the other ranks do not run it",
        ),
    ],
)
def test_the_text(rule: str, text: str, message: str) -> None:
    assert said(rule, text) == [message]


def test_what_to_write_instead() -> None:
    text = "net = DDP(x)\nif dist.get_rank() == 0:\n    torch.save(net.state_dict(), 'a.pt')\n"
    fixes = {one.rule: one.fix for one in findings_in((("case.py", DDP + text),))}
    assert fixes["DL016"] == "save `net.module.state_dict()`"


@pytest.mark.parametrize(
    ("text", "mended"),
    [
        (
            "model = DDP(x)\nif rank == 0:\n    torch.save(model.state_dict(), 'a.pt')\n",
            "    torch.save(model.module.state_dict(), 'a.pt')",
        ),
        (
            "class T:\n    def __init__(self, x):\n        self.net = DDP(x)\n    def save(self):\n"
            "        torch.save({'é': 1, 'm': self.net.state_dict()}, 'a.pt')\n",
            "        torch.save({'é': 1, 'm': self.net.module.state_dict()}, 'a.pt')",
        ),
        (
            "def f(x, many):\n    model = x\n    if many:\n        model = DDP(x)\n"
            "    torch.save(model.state_dict(), 'a.pt')\n",
            None,
        ),
        (
            "def f(x, many):\n    m = DDP(x) if many else x\n    torch.save(m.state_dict(), 'a.pt')\n",
            None,
        ),
        (
            "class T:\n    def __init__(self, x, many):\n        self.net = x\n        if many:\n"
            "            self.net = DDP(x)\n    def save(self):\n        torch.save(self.net.state_dict(), 'a.pt')\n",
            None,
        ),
        ("def f(model):\n    torch.save(model.state_dict(), 'a.pt')\nf(DDP(x))\nf(y)\n", None),
        (
            "model = DDP(x)\nmodel.load_state_dict(torch.load('a.pt'))\n"
            "if rank == 0:\n    torch.save(model.state_dict(), 'a.pt')\n",
            None,
        ),
        (
            "x.load_state_dict({key[7:]: value for key, value in torch.load('a.pt').items()})\n"
            "model = DDP(x)\nif rank == 0:\n    torch.save(model.state_dict(), 'a.pt')\n",
            None,
        ),
        (
            "model = DDP(x)\nmodel.module.load_state_dict(torch.load('b.pt'))\n"
            "if rank == 0:\n    torch.save(model.state_dict(), 'a.pt')\n",
            "    torch.save(model.module.state_dict(), 'a.pt')",
        ),
    ],
)
def test_the_fix_of_a_wrapped_state_dict(text: str, mended: str | None) -> None:
    whole = DDP + text
    (finding,) = [one for one in findings_in((("case.py", whole),)) if one.rule == "DL016"]
    assert all_rules()["DL016"].RULE.fixable
    if mended is None:
        assert not finding.edits
        return
    (edit,) = finding.edits
    line = whole.splitlines()[edit.start[0] - 1].encode()
    assert (line[: edit.start[1]] + edit.text.encode() + line[edit.end[1] :]).decode() == mended


def test_a_rank_in_a_path_is_seen_however_many_give_the_folder() -> None:
    keep = "def keep(folder, name):\n    path = folder + f'/{name}-{dist.get_rank()}.pt'\n    torch.save({}, path)\n"
    callers = "".join(f"keep('out' + str({number}) + 'a' + 'b', 'x')\n" for number in range(150))
    assert said("DL014", "dist.barrier()\n" + keep + callers) == []
    keep = keep.replace("-{dist.get_rank()}", "")
    assert len(said("DL014", "dist.barrier()\n" + keep + callers)) == 1


def test_the_inner_model_is_named_where_it_would_do() -> None:
    text = f"{DDP}net = DDP(x)\nif dist.get_rank() == 0:\n    net(y)\n"
    (found,) = [one for one in findings_in((("case.py", text),)) if one.rule == "DL040"]
    assert found.fix == "run `net.module` here, or let every rank run it"


def test_of_shards_the_inner_model_would_not_do() -> None:
    fsdp = "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
    text = f"{DDP}{fsdp}net = FSDP(x)\nif dist.get_rank() == 0:\n    net(y)\n"
    (found,) = [one for one in findings_in((("case.py", text),)) if one.rule == "DL040"]
    assert ".module" not in found.fix
