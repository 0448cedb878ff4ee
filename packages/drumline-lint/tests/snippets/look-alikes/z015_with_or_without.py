"""python train.py on one GPU, or torchrun --standalone --nproc_per_node=N train.py on several."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from insects import InsectTraps, build_resnet


def init():
    if "RANK" not in os.environ:
        return False, 0, 0
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    return True, dist.get_rank(), local_rank


def main():
    distributed, rank, local_rank = init()
    device = torch.device("cuda", local_rank)

    traps = InsectTraps("/data/insects", "train")
    sampler = DistributedSampler(traps) if distributed else None
    loader = DataLoader(
        traps,
        batch_size=64,
        sampler=sampler,
        shuffle=(sampler is None),
        num_workers=8,
        pin_memory=True,
    )

    model = build_resnet(len(traps.species)).to(device)
    if distributed:
        model = DDP(model, device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    for epoch in range(60):
        if sampler is not None:
            sampler.set_epoch(epoch)
        total = torch.zeros(2, device=device)
        for image, species in loader:
            image, species = image.to(device, non_blocking=True), species.to(device, non_blocking=True)
            loss = F.cross_entropy(model(image), species)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            total += torch.stack([loss.detach(), torch.ones_like(loss)])
        if distributed:
            dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {(total[0] / total[1]).item():.4f}", flush=True)
            net = model.module if distributed else model
            torch.save(net.state_dict(), "insects.pt")

    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
