"""One step of DDP on a small model, compared with what it must give: every rank knows all ranks' data, so it can work
out the average gradient by itself."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from drumline.distributed.collectives import gather_json
from drumline.distributed.tensor_hash import hash_tensors
from drumline.manager import DDPManager
from drumline.text import join_names

BATCH, INPUTS, OUTPUTS, WIDTH = 16, 8, 4, 16
# In float64 an average of thousands of gradients is right to many digits, in whatever order it was added up.
CLOSE = 1e-9
LEARNING_RATE = 0.1


def ddp_faults(ddp: DDPManager) -> Iterator[str]:
    """Collective: what is wrong with the gradients on this rank, or with the weights of any rank."""
    torch.manual_seed(7)
    plain = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, OUTPUTS)).double()
    model = ddp.wrap(copy.deepcopy(plain))
    inputs, targets = _batch(ddp.rank)
    torch.autograd.backward(_loss(model, inputs.to(ddp.device), targets.to(ddp.device)))
    yield from _wrong_gradients(ddp, plain, model)
    torch.optim.SGD(model.parameters(), lr=LEARNING_RATE).step()
    yield from _different_weights(ddp, model)


def _wrong_gradients(ddp: DDPManager, plain: nn.Module, model: nn.Module) -> Iterator[str]:
    for other in range(ddp.world_size):
        torch.autograd.backward(_loss(plain, *_batch(other)) / ddp.world_size)
    for (name, right), found in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert right.grad is not None
        if found.grad is None:
            yield f"the gradient of {name} is missing after a backward pass under DDP"
            continue
        wrong = ((found.grad.cpu() - right.grad).abs().flatten() > CLOSE).nonzero()
        if len(wrong):
            place = int(wrong[0])
            yield (
                f"the gradient of {name} is not the average over {ddp.world_size} ranks: element {place} is "
                f"{found.grad.flatten()[place].item():.6g} where {right.grad.flatten()[place].item():.6g} is right"
            )


def _different_weights(ddp: DDPManager, model: nn.Module) -> Iterator[str]:
    mine = hash_tensors(list(model.parameters()), ddp.device).tolist()
    everyone = gather_json({"host": ddp.host, "hashes": mine}, device=ddp.device)
    odd = [rank for rank, one in enumerate(everyone) if one["hashes"] != everyone[0]["hashes"]]
    if odd:
        who = join_names([f"rank {rank} on {everyone[rank]['host']}" for rank in odd])
        yield f"after one step under DDP the weights of {who} are not those of rank 0 on {everyone[0]['host']}"


def _batch(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + rank)
    values = torch.randn(BATCH, INPUTS + OUTPUTS, generator=generator, dtype=torch.float64)
    return values[:, :INPUTS], values[:, INPUTS:]


def _loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    loss: Tensor = (model(inputs) - targets).square().mean()
    return loss
