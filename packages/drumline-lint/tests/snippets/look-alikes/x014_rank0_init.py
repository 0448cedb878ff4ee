# torchrun --nproc_per_node=8 rank0_init.py --init /nfs/models/backbone.pt
import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--init", required=True)
    p.add_argument("--root", default="/data/defects")
    opts = p.parse_args()

    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    net = models.vit_b_16(num_classes=1).cuda()
    if rank == 0:
        # read the file once over NFS; the wrapper below sends the values to the others
        net.load_state_dict(torch.load(opts.init, map_location="cpu"))
    net = DDP(net, device_ids=[local_rank])

    tf = transforms.Compose([transforms.RandomResizedCrop(224), transforms.ToTensor()])
    data = datasets.ImageFolder(opts.root, tf)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=64, sampler=sampler, num_workers=6)
    optim = torch.optim.AdamW(net.parameters(), lr=2e-5)
    bce = torch.nn.BCEWithLogitsLoss()
    for epoch in range(15):
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
