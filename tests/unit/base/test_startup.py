"""torch's compiler is not loaded by optimizers and DDP, and is as ever when it is needed.

What is loaded cannot be unloaded: all of it is shown in one process of its own, in the order of the
functions below.
"""

from __future__ import annotations

import faulthandler
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from drumline.base.startup import LateModule, load_compiler_late


@pytest.mark.soak
def test_the_compiler_is_loaded_late_and_completely() -> None:
    """It takes seconds. In one of two hundred runs the process did not exit; then it shows where,
    and is run again."""
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, __file__], capture_output=True, text=True, check=False
        )
        if "Timeout (" not in done.stderr:
            break
        print(done.stderr)
    assert done.returncode == 0, done.stderr


def test_a_late_module_has_no_secrets() -> None:
    """Those who search through all modules do not wake it."""
    late = LateModule("no.such.module")
    with pytest.raises(
        AttributeError, match=r"^module 'no.such.module' has no attribute '__file__'$"
    ):
        late.__file__  # noqa: B018
    with pytest.raises(ModuleNotFoundError):
        late.anything  # noqa: B018


def test_a_part_of_a_late_module_is_loaded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`import late.part` asks the stand-in for its path, and that loads the part: it must not come
    twice."""
    package = tmp_path / "outer_of_late" / "late"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text("from . import part as own\n")
    (package / "part.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    name = "outer_of_late.late"
    outer = importlib.import_module("outer_of_late")
    sys.modules[name] = outer.late = LateModule(name)
    held = outer.late
    part = importlib.import_module(f"{name}.part")
    assert part is outer.late.part is outer.late.own
    assert type(outer.late) is ModuleType
    assert dir(held) == dir(outer.late)
    assert part.__spec__.origin == str(package / "part.py")
    (package / "part.py").write_text("value = 'two'\n")
    assert importlib.reload(part).value == "two"


def train_without_it() -> None:
    """In the other process."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    load_compiler_late()
    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    for optimizer in (torch.optim.SGD, torch.optim.AdamW):
        made = optimizer(model.parameters(), lr=0.1)
        model(torch.ones(4, 3)).sum().backward()
        made.step()
        made.zero_grad()
        made.load_state_dict(made.state_dict())
    dist.destroy_process_group()
    assert not {"torch._dynamo.utils", "torch._inductor", "sympy"} & sys.modules.keys()


def compile_something() -> None:
    """In the other process, after that."""
    import torch

    held = torch._dynamo
    with torch.no_grad():
        parameter = torch.nn.Parameter(torch.ones(3))
    made = torch.optim.SGD([parameter], lr=0.5)
    disabled = torch.optim.Optimizer.zero_grad.__wrapped__.__dynamo_disable
    assert disabled is torch.optim.Optimizer.zero_grad.__wrapped__, "nothing to leave it out of"
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def step(x):
        loss = (x * parameter).sum()
        made.zero_grad()
        return loss * 2

    compiled = torch.compile(step, backend=count)
    assert torch.equal(compiled(torch.ones(3)), torch.tensor(6.0))
    assert len(graphs) == 2, "the graph ends where torch leaves a function out"
    real = sys.modules["torch._dynamo"]
    assert torch._dynamo is real
    assert type(real) is type(sys)
    assert held is not real
    assert (held.disable, held.graph_break, held.utils) == (
        real.disable,
        real.graph_break,
        real.utils,
    )
    disabled = torch.optim.Optimizer.zero_grad.__wrapped__.__dynamo_disable
    assert disabled is not torch.optim.Optimizer.zero_grad.__wrapped__
    load_compiler_late()
    assert sys.modules["torch._dynamo"] is real, "it is never taken away"


if __name__ == "__main__":
    faulthandler.dump_traceback_later(60, exit=True)
    train_without_it()
    compile_something()
