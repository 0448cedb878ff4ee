"""The passes of a sharded model that differ from the first one, without shards: only which blocks
are called."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drumline.base.errors import UnusedParametersError
from drumline.parallel.block_use import BlockUse
from drumline.training.steps.compiled_blocks import compile_blocks

ADVICE = "call it in every batch (multiply the output by 0 where it is not needed), or use --dist.mode ddp with "


class Block(nn.Module):
    """As `fully_shard` makes them, as far as their use is concerned."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def set_custom_reduce_scatter(self, _: Any) -> None: ...

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layer(inputs)
        return output


class Blocks(Block):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(size))

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


def use_of(model: nn.Module) -> BlockUse:
    sharded = {name: module for name, module in model.named_modules() if isinstance(module, Block)}
    return BlockUse(sharded, mode="fsdp", finds_unused=False)


INPUTS = torch.ones(1, 2)


def test_the_model_itself_is_named_as_such() -> None:
    model = Blocks(1)
    use = use_of(model)
    model(INPUTS)
    use.learn()
    use.begin_pass()
    with pytest.raises(UnusedParametersError) as left_out:
        use.end_forward()
    assert left_out.value.what.startswith(
        "the loss does not call the model, which it called in the first step; with "
    )
    assert left_out.value.next_step is not None
    assert left_out.value.next_step.startswith(ADVICE)

    model = Blocks(1)
    use = use_of(model)
    model.blocks[0](INPUTS)
    use.learn()
    use.begin_pass()
    with pytest.raises(UnusedParametersError) as added:
        model(INPUTS)
    assert added.value.what.startswith(
        "the loss calls the model, which it did not call in the first step; with "
    )


def test_gradients_of_another_size_name_the_parameters_of_the_block() -> None:
    use = use_of(Blocks(1))
    use.before_reduction("blocks.0", 6)
    use.learn()
    use.begin_pass()
    with pytest.raises(
        UnusedParametersError,
        match=r"use these parameters: blocks\.0\.layer\.weight and blocks\.0\.layer\.bias",
    ):
        use.before_reduction("blocks.0", 4)


@pytest.mark.soak
# the compiler reads it
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_blocks_share_their_compiled_graphs_whatever_their_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More blocks than torch compiles one function for (`recompile_limit`)."""
    from torch._dynamo.utils import counters

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = Blocks(12)
    compile_blocks(model, ["Block"])
    use = use_of(model)
    model(INPUTS)
    use.learn()
    for _ in range(3):
        use.begin_pass()
        model(INPUTS)
        use.end_forward()
    num_graphs = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    assert num_graphs == 2, "only the first block gets inputs without a gradient"
