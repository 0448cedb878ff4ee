"""Before Drumline: the usual hand-written DDP script. Compare it with own_loop.py.

torchrun --nproc-per-node 2 examples/plain_ddp.py
"""

import os

import torch
import torch.distributed as dist
from spirals import Net, spirals
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.manual_seed(0)

    train_data, test_data = spirals(1000, seed=1), spirals(500, seed=2)
    sampler = DistributedSampler(train_data)  # repeats samples when they do not divide evenly
    loader = DataLoader(train_data, batch_size=64 // world_size, sampler=sampler)
    # Repeats samples here too, so the accuracy is wrong; `drumline lint` reports it, so it is silenced here.
    test_sampler = DistributedSampler(test_data, shuffle=False)  # noqa: DL033
    test_loader = DataLoader(test_data, batch_size=250, sampler=test_sampler)
    model = DistributedDataParallel(Net().to(device), device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(10):
        sampler.set_epoch(epoch)  # forget this, and every epoch has the same order
        for points, arm in loader:
            points, arm = points.to(device), arm.to(device)
            loss = criterion(model(points), arm)  # a short last batch counts as much as a full one
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    correct = torch.zeros(2, device=device)
    model.eval()
    with torch.no_grad():
        for points, arm in test_loader:
            points, arm = points.to(device), arm.to(device)
            correct += torch.stack([(model(points).argmax(1) == arm).sum(), torch.tensor(len(arm), device=device)])
    dist.all_reduce(correct)
    if rank == 0:
        print(f"accuracy {correct[0] / correct[1]:.3f}")
    dist.barrier()  # without it gloo may hang below: its thread needs the GIL to release the last tensor
    dist.destroy_process_group()  # never reached when something above raises


if __name__ == "__main__":
    main()
