import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from satssl.config import load_config
from satssl.data import TwoViews
from satssl.nets import projector_resnet


@torch.no_grad()
def concat_all_gather(t):
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts)


class MoCo(nn.Module):
    def __init__(self, dim=128, size=65536, m=0.999, temp=0.2):
        super().__init__()
        self.m, self.temp, self.size = m, temp, size
        self.q = projector_resnet(dim, norm="group")
        self.k = projector_resnet(dim, norm="group")
        self.k.load_state_dict(self.q.state_dict())
        for p in self.k.parameters():
            p.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(dim, size), dim=0))
        self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _update(self, keys):
        keys = concat_all_gather(keys)
        n, p = keys.size(0), int(self.ptr)
        assert self.size % n == 0
        self.queue[:, p:p + n] = keys.t()
        self.ptr[0] = (p + n) % self.size

    def forward(self, x1, x2):
        q = F.normalize(self.q(x1), dim=1)
        with torch.no_grad():
            for a, b in zip(self.q.parameters(), self.k.parameters()):
                b.mul_(self.m).add_(a, alpha=1 - self.m)
            k = F.normalize(self.k(x2), dim=1)
        pos = (q * k).sum(1, keepdim=True)
        neg = q @ self.queue.clone()
        self._update(k)
        logits = torch.cat([pos, neg], 1) / self.temp
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long, device=q.device))


def main():
    cfg = load_config()
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    ds = TwoViews(cfg.tiles)
    sampler = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, cfg.batch, sampler=sampler, num_workers=12, pin_memory=True, drop_last=True)
    model = DDP(MoCo().cuda(), device_ids=[local_rank])
    params = [p for p in model.parameters() if p.requires_grad]
    opt = torch.optim.SGD(params, lr=cfg.lr, momentum=0.9, weight_decay=1e-4)
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        for x1, x2 in loader:
            loss = model(x1.cuda(non_blocking=True), x2.cuda(non_blocking=True))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.3f}", flush=True)
            torch.save(model.module.state_dict(), os.path.join(cfg.out, "moco.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
