import copy
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from gen.data import Faces
from gen.edm import EDM


@torch.no_grad()
def update_ema(ema, net, decay=0.9999):
    for e, p in zip(ema.parameters(), net.parameters()):
        e.lerp_(p, 1 - decay)
    for e, b in zip(ema.buffers(), net.buffers()):
        e.copy_(b)


def main():
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    model = DDP(EDM().cuda(), device_ids=[local_rank])
    ema = copy.deepcopy(model.module).eval().requires_grad_(False)
    ds = Faces("/data/ffhq64")
    sampler = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, 32, sampler=sampler, num_workers=4, drop_last=True)
    opt = torch.optim.Adam(model.parameters(), lr=1e-4)
    for epoch in range(500):
        sampler.set_epoch(epoch)
        for x in loader:
            loss = model(x.cuda(non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            update_ema(ema, model.module)
        if rank == 0:
            torch.save({"net": model.module.state_dict(), "ema": ema.state_dict()}, "edm.pt")
            grid = ema.sample(16)
            torch.save(grid.cpu(), f"samples_{epoch}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
