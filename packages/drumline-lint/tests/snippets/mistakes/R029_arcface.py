import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import yaml
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from face.backbones import iresnet50
from face.data import MXFaceDataset


class ArcMargin(nn.Module):
    def __init__(self, dim, classes, s=64.0, m=0.5):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(classes, dim))
        nn.init.xavier_uniform_(self.weight)
        self.s, self.cos_m, self.sin_m = s, math.cos(m), math.sin(m)
        self.th, self.mm = math.cos(math.pi - m), math.sin(math.pi - m) * m

    def forward(self, emb, label):
        cos = F.linear(F.normalize(emb), F.normalize(self.weight)).clamp(-1, 1)
        sin = torch.sqrt((1.0 - cos.pow(2)).clamp(min=1e-7))
        phi = torch.where(cos > self.th, cos * self.cos_m - sin * self.sin_m, cos - self.mm)
        one_hot = F.one_hot(label, self.weight.size(0)).bool()
        return F.cross_entropy(self.s * torch.where(one_hot, phi, cos), label)


def adjust(optimizer, step, cfg, total):
    frac = min(step / max(cfg["warmup"], 1), (total - step) / max(total - cfg["warmup"], 1))
    for g in optimizer.param_groups:
        g["lr"] = cfg["lr"] * max(frac, 0.0) ** 2


def main(path="configs/webface.yaml"):
    with open(path) as f:
        cfg = yaml.safe_load(f)
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    torch.manual_seed(cfg["seed"] + rank)

    ds = MXFaceDataset(cfg["rec"])
    sampler = DistributedSampler(ds, shuffle=True, seed=cfg["seed"])
    loader = DataLoader(ds, cfg["batch_size"], sampler=sampler, num_workers=4, pin_memory=True, drop_last=True)

    backbone = DDP(iresnet50(num_features=512, fp16=True).cuda(), device_ids=[local_rank], broadcast_buffers=False)
    margin = ArcMargin(512, ds.num_classes).cuda()
    params = list(backbone.parameters()) + list(margin.parameters())
    opt = torch.optim.SGD(params, lr=cfg["lr"], momentum=0.9, weight_decay=5e-4)
    total, step = cfg["epochs"] * len(loader), 0
    scaler = torch.amp.GradScaler("cuda", growth_interval=100)

    for epoch in range(cfg["epochs"]):
        sampler.set_epoch(epoch)
        for img, label in loader:
            adjust(opt, step, cfg, total)
            emb = backbone(img.cuda(non_blocking=True))
            loss = margin(emb.float(), label.cuda(non_blocking=True))
            opt.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(backbone.parameters(), 5.0)
            scaler.step(opt)
            scaler.update()
            step += 1
            if rank == 0 and step % 100 == 0:
                print(f"{step}/{total} loss {loss.item():.3f}", flush=True)
        if rank == 0:
            torch.save({"backbone": backbone.module.state_dict(), "margin": margin.state_dict()},
                       os.path.join(cfg["out"], f"arc_{epoch:02d}.pt"))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
