from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from drumline.base.errors import CheckpointError
from drumline.checkpoint import store
from drumline.checkpoint.state import load_model_state, model_state
from drumline.parallel.wrap import SingleProcess
from drumline.runs import catalog
from drumline.training.tasks.built_in import GPT, MiniResNet


class Tied(nn.Module):
    """Embeddings that share memory, a norm with counters, and tensors of every awkward kind."""

    def __init__(self, *, width: int = 4, tied: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(6, width)
        self.head = nn.Linear(width, 6, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.norm = nn.BatchNorm1d(6)
        self.low = nn.Parameter(torch.randn(3, width).bfloat16())
        self.sideways = nn.Parameter(torch.randn(5, 3).t())
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("nothing", torch.zeros(0, 4))
        self.register_buffer("nothing_else", torch.zeros(0, 4))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.head(self.tokens(tokens)))
        return out + self.low.sum() + self.sideways.sum()


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train_a_little(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.arange(6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same(first: nn.Module, second: nn.Module) -> None:
    ours_state = first.state_dict()
    theirs_state = second.state_dict()
    assert ours_state.keys() == theirs_state.keys()
    for name, tensor in ours_state.items():
        assert tensor.dtype == theirs_state[name].dtype
        assert torch.equal(tensor, theirs_state[name]), name


def through_disk(model: nn.Module, root: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    tensors, aliases = model_state(model)
    path = store.write(
        root, 1, tensors={"model": tensors}, documents={"model": aliases}, metrics={}
    )
    return store.read(path).tensors["model"], catalog.read_document(path, "model")


def test_is_restored_bit_for_bit(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Tied()
    loaded = Tied()
    train_a_little(model)
    load_model_state(loaded, *through_disk(model, tmp_path))
    assert_same(model, loaded)
    assert loaded.norm.num_batches_tracked.item() == 2
    assert loaded.head.weight is loaded.tokens.weight


@pytest.mark.parametrize(
    "make",
    [
        lambda: GPT(vocab_size=11, context=8, layers=1, heads=2, width=8),
        lambda: MiniResNet(in_channels=1, num_classes=3, widths=(4, 8)),
    ],
    ids=["gpt", "mini_resnet"],
)
def test_our_own_models_are_restored(tmp_path: Path, make: Callable[[], nn.Module]) -> None:
    model = make()
    loaded = make()
    load_model_state(loaded, *through_disk(model, tmp_path))
    assert_same(model, loaded)


def test_tied_tensors_are_stored_once() -> None:
    tensors, aliases = model_state(Tied())
    assert aliases == {"head.weight": "tokens.weight"}
    assert "head.weight" not in tensors
    assert {"nothing", "nothing_else", "norm.num_batches_tracked", "count"} <= tensors.keys()
    assert "scratch" not in tensors


def test_a_module_used_twice_is_stored_once() -> None:
    shared = nn.Linear(2, 2)
    tensors, aliases = model_state(nn.Sequential(shared, nn.ReLU(), shared))
    assert list(tensors) == ["0.weight", "0.bias"]
    assert aliases == {"2.weight": "0.weight", "2.bias": "0.bias"}


def test_views_of_the_same_memory_are_not_the_same_tensor(tmp_path: Path) -> None:
    class Views(nn.Module):
        def __init__(self, base: torch.Tensor) -> None:
            super().__init__()
            self.register_buffer("a", base)
            self.register_buffer("b", base.t())
            self.register_buffer("c", base[:1])

    saved = Views(torch.arange(4.0).reshape(2, 2))
    loaded = Views(torch.zeros(2, 2))
    assert model_state(saved)[1] == {}
    load_model_state(loaded, *through_disk(saved, tmp_path))
    assert_same(saved, loaded)


@pytest.mark.usefixtures("group_of_one")
def test_under_ddp_names_are_the_model_s_own(tmp_path: Path) -> None:
    wrapped = DistributedDataParallel(Tied())
    train_a_little(wrapped)
    tensors, aliases = through_disk(wrapped, tmp_path)
    assert not [name for name in (*tensors, *aliases) if name.startswith("module.")]
    plain = Tied()
    load_model_state(plain, tensors, aliases)
    assert_same(wrapped.module, plain)
    train_a_little(plain)
    load_model_state(wrapped, *model_state(plain))
    assert_same(wrapped.module, plain)


@pytest.mark.slow
@pytest.mark.usefixtures("group_of_one")
def test_under_torch_compile_too() -> None:
    model = Tied()
    names = model_state(model)[0].keys()
    assert model_state(torch.compile(model, backend="eager"))[0].keys() == names
    assert (
        model_state(torch.compile(DistributedDataParallel(model), backend="eager"))[0].keys()
        == names
    )
    assert model_state(torch.compile(SingleProcess(model), backend="eager"))[0].keys() == names


def test_nothing_is_copied_for_the_snapshot() -> None:
    model = nn.Linear(2, 2)
    assert model_state(model)[0]["weight"].data_ptr() == model.weight.data_ptr()


def test_every_difference_is_listed_and_nothing_is_changed() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    tensors, aliases = model_state(
        nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4), nn.BatchNorm1d(3))
    )
    tensors["extra"] = torch.zeros(1)
    tensors["2.num_batches_tracked"] = torch.tensor(0.0)
    del tensors["0.bias"]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_model_state(model, tensors, aliases)
    assert str(caught.value).splitlines() == [
        "the checkpoint is of another model:",
        "  - 0.bias is missing in the checkpoint",
        "  - extra is not in the model",
        "  - 1.weight is [4, 3] in the checkpoint and [3, 3] in the model",
        "  - 1.bias is [4] in the checkpoint and [3] in the model",
        "  - 2.num_batches_tracked is torch.float32 in the checkpoint and torch.int64 in the model",
        "  try: set the model up as for the checkpoint (see config.toml in the run folder)",
    ]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_tied_checkpoint_fits_a_model_that_is_not_tied() -> None:
    tied = Tied()
    apart = Tied(tied=False)
    load_model_state(apart, *model_state(tied))
    assert torch.equal(apart.head.weight, tied.tokens.weight)


def test_one_tensor_cannot_take_two_values() -> None:
    text = "head.weight and tokens.weight differ in the checkpoint and are one tensor in the model"
    with pytest.raises(CheckpointError, match=re.escape(text)):
        load_model_state(Tied(), *model_state(Tied(tied=False)))


def test_a_model_that_went_wrong_can_be_looked_at() -> None:
    model = Tied()
    loaded = Tied()
    nn.init.constant_(model.tokens.weight, math.nan)
    load_model_state(loaded, *model_state(model))
    assert loaded.head.weight.isnan().all()


def test_another_precision_is_fine() -> None:
    model = nn.Linear(2, 2)
    loaded = nn.Linear(2, 2).bfloat16()
    load_model_state(loaded, *model_state(model))
    assert torch.equal(loaded.weight, model.weight.bfloat16())


def test_extra_state_that_is_no_tensor_is_refused() -> None:
    class Talkative(nn.Module):
        def get_extra_state(self) -> str:
            return "hello"

    with pytest.raises(
        CheckpointError,
        match=r"the model's 0\._extra_state cannot be saved: it is a str, not a tensor",
    ):
        model_state(nn.Sequential(Talkative()))
