import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from network import CellCounter, Wells


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    ds = Wells("/data/wells/train.pt")
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 64, sampler=sampler, num_workers=4, drop_last=True)
    model = DDP(CellCounter().cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(25):
        sampler.set_epoch(epoch)
        for img, n in loader:
            loss = torch.nn.functional.poisson_nll_loss(model(img.cuda()), n.cuda().float())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            torch.save(model.state_dict(), "cellcounter.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
