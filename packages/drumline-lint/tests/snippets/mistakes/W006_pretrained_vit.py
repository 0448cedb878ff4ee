"""Fine-tuning a ViT. Started with one task per GPU:  srun --ntasks-per-node=4 python vit.py init.pt"""
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms
from torchvision.models import vit_b_16

rank = int(os.environ["SLURM_PROCID"])
world_size = int(os.environ["SLURM_NTASKS"])
gpu = int(os.environ["SLURM_LOCALID"])


def load_weights(model, path):
    state = torch.load(path, map_location="cpu")
    model.load_state_dict(state["model"])


def main(weights):
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)  # MASTER_* come from the job script
    train = datasets.ImageFolder(
        "/scratch/birds/train",
        transforms.Compose([transforms.RandomResizedCrop(224), transforms.ToTensor()]),
    )
    sampler = DistributedSampler(train, num_replicas=world_size, rank=rank)
    loader = DataLoader(train, batch_size=48, sampler=sampler, num_workers=8, pin_memory=True)

    model = vit_b_16(num_classes=200).cuda()
    model = DistributedDataParallel(model, device_ids=[gpu])
    if rank == 0:
        # the shared disk is slow, one read is enough
        load_weights(model.module, weights)
    dist.barrier()

    opt = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.05)
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        if rank == 0:
            print("epoch", epoch, "loss", loss.item(), flush=True)
            torch.save({"model": model.module.state_dict()}, "vit_birds.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
