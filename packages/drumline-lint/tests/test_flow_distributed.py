"""Which files count as distributed, and which leave the work to a framework."""

from __future__ import annotations

import pytest

from drumline_lint.flow.distributed import distributed_sources, framework
from drumline_lint.program.imports import imported_sources
from test_program_values import program_of


def distributed(files: dict[str, str]) -> set[str]:
    return {str(source.path.with_suffix("")) for source in distributed_sources(program_of(files))}


def imports_of(first: str, files: dict[str, str]) -> list[str]:
    program = program_of({first: files[first], **files})
    return [str(one.path.with_suffix("")) for one in imported_sources(program, program.sources[0])]


INITS = "import torch.distributed as dist\ndef setup():\n    dist.init_process_group('nccl')\n"


@pytest.mark.parametrize(
    "text",
    [
        "import torch.distributed as dist\ndist.init_process_group('nccl')",
        "from torch import distributed as dist\ndist.barrier()",
        "from torch.nn.parallel import DistributedDataParallel as DDP\nmodel = DDP(net)",
        "from torch.nn.parallel import *\nmodel = DistributedDataParallel(net)",
        "from torch.utils.data.distributed import DistributedSampler\ns = DistributedSampler(data)",
        "from torch.distributed.fsdp import fully_shard\nfully_shard(model)",
        "from drumline import DDPManager\nwith DDPManager() as manager: pass",
        "import torch\n\ndef later():\n    torch.distributed.all_reduce(x)",
    ],
)
def test_who_starts_or_uses_a_group_is_distributed(text: str) -> None:
    assert distributed({"train": text}) == {"train"}


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nmodel = torch.nn.Linear(1, 1)",
        "import torch.distributed as dist\ndef is_main():\n    return dist.get_rank() == 0",
        "import torch.distributed as dist\nif dist.is_available() and dist.is_initialized(): pass",
        "from torch.nn.parallel import DistributedDataParallel\nisinstance(m, DistributedDataParallel)",
        "import os\nrank = int(os.environ['RANK'])",
        "'''torch.distributed.init_process_group()'''",
        "class DistributedSampler: pass\nDistributedSampler()",
    ],
)
def test_who_asks_imports_or_speaks_of_it_is_not(text: str) -> None:
    assert distributed({"train": text}) == set()


def test_who_calls_another_files_function_that_starts_one_is() -> None:
    assert distributed({"train": "import helper\nhelper.setup()", "helper": INITS}) == {
        "train",
        "helper",
    }


def test_who_imports_such_a_function_without_calling_it_is_not() -> None:
    assert distributed({"train": "from helper import setup", "helper": INITS}) == {"helper"}


def test_who_calls_something_else_of_such_a_file_is_not() -> None:
    files = {
        "plot": "from helper import colour\ncolour()",
        "helper": INITS + "def colour():\n    return 1\n",
    }
    assert distributed(files) == {"helper"}


def test_all_that_a_distributed_file_imports_is() -> None:
    files = {
        "train": "import model\n" + INITS,
        "model": "import layers",
        "layers": "import torch",
        "alone": "import torch",
    }
    assert distributed(files) == {"train", "model", "layers"}


def test_through_a_file_between_that_does_not_speak_of_it() -> None:
    files = {
        "train": "from middle import begin\nbegin()",
        "middle": "import helper\ndef begin():\n    helper.setup()",
        "helper": INITS,
    }
    assert distributed(files) == {"train", "middle", "helper"}


def test_through_what_a_package_hands_on() -> None:
    files = {
        "train": "from pkg import setup\nsetup()",
        "pkg/__init__": "from .dist import setup",
        "pkg/dist": INITS,
    }
    assert distributed(files) == {"train", "pkg/__init__", "pkg/dist"}


def test_a_class_of_another_file() -> None:
    group = "import torch.distributed as dist\nclass Group:\n    def begin(self):\n        dist.barrier()\n"
    assert distributed({"train": "from group import Group\nGroup().begin()", "group": group}) == {
        "train",
        "group",
    }


def test_relative_imports_from_the_same_and_from_the_outer_package() -> None:
    files = {
        "pkg/__init__": INITS,
        "pkg/helper": INITS,
        "pkg/deep/__init__": "",
        "pkg/deep/a": "from .. import setup\nsetup()",
        "pkg/deep/b": "from ..helper import setup\nsetup()",
        "pkg/deep/c": "from .. import helper\nhelper.setup()",
        "pkg/deep/d": "from .a import nothing",
    }
    assert distributed(files) == set(files) - {"pkg/deep/d", "pkg/deep/__init__"}


def test_functions_that_call_one_another_end() -> None:
    files = {
        "a": "import b\ndef f():\n    b.g()\nf()",
        "b": "import a\nimport torch.distributed\ndef g():\n    a.f()",
    }
    assert distributed(files) == set()


def test_a_module_imported_with_its_package_is_found() -> None:
    files = {"train": "import pkg.helper, os", "pkg/__init__": "", "pkg/helper": ""}
    assert imports_of("train", files) == ["pkg/__init__", "pkg/helper"]


def test_an_import_of_a_library_does_not_import_the_package_around() -> None:
    assert (
        imports_of(
            "pkg/train", {"pkg/train": "import os\nfrom torch import nn", "pkg/__init__": ""}
        )
        == []
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from accelerate import Accelerator", "accelerate"),
        ("def f():\n    import lightning.pytorch as pl", "lightning"),
        ("from transformers import Trainer", "transformers"),
        ("from transformers import AutoModel", ""),
        ("import torch", ""),
        ("from .accelerate import Accelerator", ""),
    ],
)
def test_framework(text: str, expected: str) -> None:
    program = program_of({"train": text})
    assert framework(program, program.sources[0]) == expected


def test_a_file_of_ones_own_is_no_framework() -> None:
    program = program_of({"train": "import composer", "composer": "x = 1"})
    assert framework(program, program.sources[0]) == ""
