import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from birds import BirdSongs
from net import SpecNet


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    ds = BirdSongs("train")
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=48, sampler=sampler, num_workers=4)
    model = DDP(SpecNet(182).cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=5e-4)
    for epoch in range(60):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            torch.save(model.state_dict(), "specnet.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
