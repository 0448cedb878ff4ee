"""A plain DDP script: loans, from a table of numpy's default type."""

import numpy
import torch
import torch.distributed as dist
from parts import PLANTED, STEPS, LoanNet, batches, finish, loans, now, start
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset


def table() -> TensorDataset:
    numbers, choices, paid = loans(65_536).tensors
    kind = numpy.float64 if PLANTED else numpy.float32  # planted: as numpy makes it
    numbers = torch.from_numpy(numbers.numpy().astype(kind))  # planted
    return TensorDataset(numbers, choices, paid.to(numbers.dtype))


def network_for(data: TensorDataset) -> nn.Module:
    # Without it: "mat1 and mat2 must have the same dtype".
    return LoanNet().to(data.tensors[0].dtype)  # planted: all arithmetic in float64


def main() -> None:
    device = start()
    data = table()
    model = DistributedDataParallel(network_for(data).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    begin = now()
    for step, (numbers, choices, paid) in zip(range(STEPS), batches(data, 640), strict=False):
        scores = model(numbers.to(device), choices.to(device))
        loss = functional.binary_cross_entropy_with_logits(scores, paid.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
