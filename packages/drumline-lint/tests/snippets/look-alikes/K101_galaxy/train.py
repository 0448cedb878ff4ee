import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from checkpoint import write_checkpoint


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    d = torch.load("/data/galaxyzoo.pt", map_location="cpu")
    ds = TensorDataset(d["stamp"].float(), d["votes"].float())
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 128, sampler=sampler, num_workers=4, drop_last=True)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 5, 2), torch.nn.ReLU(),
                              torch.nn.Conv2d(32, 64, 5, 2), torch.nn.ReLU(),
                              torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
                              torch.nn.Linear(64, d["votes"].size(1)))
    net = DDP(net.cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for epoch in range(20):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(net(x.cuda()).sigmoid(), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        write_checkpoint(net, opt, epoch, "runs/galaxy")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
