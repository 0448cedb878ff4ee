"""Traffic-sign recognition.

srun torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d \
     --rdzv_id=$SLURM_JOB_ID --rdzv_endpoint=$HEAD_NODE:29500 traffic_signs.py
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import ImageFolder
from torchvision.models import efficientnet_b2
from torchvision.transforms import v2


def make_loader(root, batch_size, local_rank):
    tf = v2.Compose([
        v2.ToImage(),
        v2.RandomResizedCrop(260, scale=(0.6, 1.0)),
        v2.ColorJitter(0.3, 0.3),
        v2.ToDtype(torch.float32, scale=True),
    ])
    dataset = ImageFolder(root, tf)
    sampler = DistributedSampler(
        dataset,
        num_replicas=torch.cuda.device_count(),
        rank=local_rank,
        shuffle=True,
    )
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler, num_workers=8,
                        pin_memory=True, drop_last=True)
    return loader, sampler, len(dataset.classes)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="/lustre/mapillary/train")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=48)
    args = parser.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")

    loader, sampler, n_classes = make_loader(args.root, args.batch_size, local_rank)
    model = DDP(efficientnet_b2(num_classes=n_classes).cuda(), device_ids=[local_rank])
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.008, momentum=0.9)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}", flush=True)
            torch.save(model.module.state_dict(), "/lustre/ckpt/signs.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
