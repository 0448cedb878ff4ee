import json
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

from forecaster import Forecaster, windows
from scoring import rmse


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, test = windows("/data/metr/train.pt"), windows("/data/metr/test.pt")
    sampler = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, 256, sampler=sampler, drop_last=True, num_workers=2)
    test_loader = DataLoader(Subset(test, list(range(rank, len(test), world))), 512)
    model = DDP(Forecaster().cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(40):
        sampler.set_epoch(epoch)
        model.train()
        for past, future in loader:
            loss = (model(past.cuda()) - future.cuda()).abs().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
    err = rmse(model.module, test_loader)
    if rank == 0:
        torch.save(model.module.state_dict(), "metr.pt")
        with open("metr_test.json", "w") as fh:
            json.dump({"rmse": err, "n_test": len(test)}, fh)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
