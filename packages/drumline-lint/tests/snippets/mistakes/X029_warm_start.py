# torchrun --nproc_per_node=8 warm_start.py --init /models/backbone.pt
import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms


def main():
    p = argparse.ArgumentParser(description="Warm-start a defect detector from an earlier backbone.")
    p.add_argument("--init", required=True)
    p.add_argument("--root", default="/data/defects")
    p.add_argument("--epochs", type=int, default=15)
    opts = p.parse_args()

    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    net = models.vit_b_16(num_classes=1).cuda()
    net = DDP(net, device_ids=[local_rank])
    if rank == 0:
        weights = torch.load(opts.init, map_location="cpu")
        weights = {k: v for k, v in weights.items() if not k.startswith("heads.")}
        missing, unexpected = net.module.load_state_dict(weights, strict=False)
        print(f"loaded {opts.init}: {len(missing)} keys left as they were, {len(unexpected)} not used")
    dist.barrier()

    data = datasets.ImageFolder(opts.root, transforms.Compose(
        [transforms.RandomResizedCrop(224), transforms.ToTensor()]))
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=64, sampler=sampler, num_workers=6)
    optim = torch.optim.AdamW(net.parameters(), lr=2e-5)
    for epoch in range(opts.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = bce(net(x.cuda()).squeeze(1), y.cuda().float())
            optim.zero_grad()
            loss.backward()
            optim.step()
    if rank == 0:
        torch.save(net.module.state_dict(), "defects.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
