"""Detector training that tolerates an occasional bad batch."""
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from traffic.data import Frames, boxes_collate
from traffic.fcos import FCOS


def any_rank(flag, device):
    t = torch.tensor(int(flag), device=device)
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return bool(t.item())


class Loop:
    def __init__(self, device):
        self.device = device
        self.model = DDP(FCOS(classes=12).to(device), device_ids=[device.index])
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
        self.skipped = 0

    def step(self, imgs, targets):
        losses = self.model(imgs.to(self.device), [t.to(self.device) for t in targets])
        loss = sum(losses.values())
        bad = not torch.isfinite(loss).item()
        if any_rank(bad, self.device):
            self.skipped += 1
            self.opt.zero_grad(set_to_none=True)
            return None
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 10.0)
        self.opt.step()
        return loss.detach()


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)

    frames = Frames("/data/traffic", "train")
    sampler = DistributedSampler(frames, shuffle=True, seed=14)
    loader = DataLoader(frames, 8, sampler=sampler, collate_fn=boxes_collate, num_workers=8, drop_last=True)
    loop = Loop(device)
    for epoch in range(24):
        sampler.set_epoch(epoch)
        loop.model.train()
        for i, (imgs, targets) in enumerate(loader):
            loss = loop.step(imgs, targets)
            if loss is None:
                continue
            if i % 50 == 0 and rank == 0:
                print(f"{epoch}/{i} loss {loss.item():.3f} skipped {loop.skipped}", flush=True)
        if rank == 0:
            torch.save(loop.model.module.state_dict(), "fcos.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
