"""Which modules of a model are sharded one by one, and initialized and recomputed by themselves."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from drumline.base.errors import UsageError
from drumline.parallel.blocks import find_blocks
from drumline.parallel.meta_init import ModuleInit, check_can_initialize
from drumline.parallel.recompute import recompute_blocks
from drumline.parallel.shards import split_rows
from drumline.training.tasks.built_in import GPT


def gpt() -> GPT:
    return GPT(vocab_size=11, context=8, layers=3, heads=2, width=8)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 11))
    model[3].weight = model[0].weight
    return model


def test_the_class_that_is_most_frequent_in_lists_is_the_block() -> None:
    assert list(find_blocks(gpt())) == ["blocks.2", "blocks.1", "blocks.0"]
    assert find_blocks(nn.Linear(2, 2)) == {}


def test_a_module_whose_weight_is_tied_elsewhere_is_no_block() -> None:
    assert list(find_blocks(tied())) == ["2", "1"]
    assert list(find_blocks(tied(), ["Embedding", "Linear"])) == ["2", "1"]


def test_blocks_are_named_by_class_or_by_size_from_the_inside_out() -> None:
    assert list(find_blocks(gpt(), ["CausalAttention"])) == [
        f"blocks.{number}.attention" for number in (2, 1, 0)
    ]
    # A linear layer of the perceptron has 256 parameters, query_key_value 192, and the rest of a
    # block 80.
    by_size = find_blocks(gpt(), ["200"])
    assert sorted(by_size) == [
        f"blocks.{number}.{name}"
        for number in range(3)
        for name in ("attention", "mlp_in", "mlp_out")
    ]
    with pytest.raises(
        UsageError, match=r"--dist.wrap: GPT has no module of class 'Blok': did you mean 'Block'\?"
    ):
        find_blocks(gpt(), ["Blok"])


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9])
def test_rows_are_split_as_torch_does_it(length: int) -> None:
    for count in (1, 2, 3, 4):
        chunks = [len(chunk) for chunk in torch.chunk(torch.arange(length), count)]
        rows = [split_rows(length, number, count) for number in range(count)]
        assert [stop - start for start, stop in rows] == chunks + [0] * (count - len(chunks))


def test_weights_depend_on_the_seed_and_the_name_not_on_the_order() -> None:
    with torch.device("meta"):
        whole = gpt()
        by_block = gpt()
    before = torch.get_rng_state()
    check_can_initialize(whole)
    ModuleInit(3)(whole.named_modules())
    in_parts = ModuleInit(3)
    in_parts(
        (f"blocks.1.{name}".rstrip("."), module)
        for name, module in by_block.blocks[1].named_modules()
    )
    in_parts(by_block.named_modules())
    for name, weights in whole.state_dict().items():
        assert torch.equal(weights, by_block.state_dict()[name]), name
    assert torch.equal(torch.get_rng_state(), before)
    assert float(whole.blocks[0].mlp_out.weight.detach().std()) == pytest.approx(
        0.02 / 6**0.5, rel=0.3
    )
    assert not torch.equal(whole.blocks[0].mlp_in.weight, whole.blocks[1].mlp_in.weight)


def test_a_tied_weight_keeps_the_values_of_its_first_module() -> None:
    with torch.device("meta"):
        model = tied()
    ModuleInit(0)(model.named_modules())
    assert model[3].weight is model[0].weight
    assert float(model[0].weight.detach().abs().max()) > 1, (
        "an embedding's standard normal, not a linear layer's"
    )


def test_a_module_that_cannot_be_initialized_by_itself_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(
        UsageError,
        match=r"cannot initialize the model \(Sequential\): it has parameters or buffers",
    ):
        check_can_initialize(model)


class Masked(nn.Linear):
    """Its buffer is not set by `nn.Linear.reset_parameters`."""

    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__(2, 2)
        self.register_buffer("mask", mask)


class HalfSet(Masked):
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "mask"):
            self.mask[:1] = 0


TYPES = (
    torch.float32,
    torch.bfloat16,
    torch.complex64,
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_tensor_that_the_method_leaves_out_is_refused(dtype: torch.dtype) -> None:
    for kind, shape in ((Masked, (3, 2)), (Masked, ()), (HalfSet, (3, 2))):
        with torch.device("meta"):
            model = nn.Sequential(kind(torch.ones(shape, dtype=dtype)))
        check_can_initialize(model)
        if kind is HalfSet and dtype is torch.uint8:  # any value may have been set
            ModuleInit(0)(model.named_modules())
            continue
        with pytest.raises(UsageError) as caught:
            ModuleInit(0)(model.named_modules())
        assert caught.value.what == (
            f"--dist.meta_init: {kind.__name__}.reset_parameters() does not set 0.mask, or sets it to NaN"
        )


def test_every_nth_block_of_any_model_is_recomputed_with_the_same_gradients() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(
        *(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)) for _ in range(3))
    )
    model = copy.deepcopy(plain)
    recompute_blocks(model, "every:2", ["Linear", "BatchNorm1d"])
    copied = copy.deepcopy(model)
    assert [name for name, module in model.named_modules() if "forward" in vars(module)] == [
        "0.0",
        "1.0",
        "2.0",
    ]
    inputs = torch.randn(5, 4)
    for trained in (plain, model, copied):
        torch.manual_seed(1)
        trained(inputs).sum().backward()
    for (name, expected), *copies in zip(
        plain.named_parameters(), model.parameters(), copied.parameters(), strict=True
    ):
        assert all(torch.equal(copy.grad, expected.grad) for copy in copies), name
    with pytest.raises(UsageError, match="found no blocks in Linear"):
        recompute_blocks(nn.Linear(2, 2), True)
