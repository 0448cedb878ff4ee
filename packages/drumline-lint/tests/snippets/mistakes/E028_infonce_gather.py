import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class DualEncoder(nn.Module):
    """Projects frozen image and text features to a shared space."""

    def __init__(self, d_img=1024, d_txt=768, d=512):
        super().__init__()
        self.img = nn.Sequential(nn.Linear(d_img, 2048), nn.GELU(), nn.Linear(2048, d))
        self.txt = nn.Sequential(nn.Linear(d_txt, 2048), nn.GELU(), nn.Linear(2048, d))
        self.scale = nn.Parameter(torch.tensor(2.659))

    def forward(self, i, t):
        return (F.normalize(self.img(i), dim=-1), F.normalize(self.txt(t), dim=-1),
                self.scale.exp().clamp(max=100))


def gather_all(x):
    out = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(out, x.contiguous())
    return torch.cat(out)


def contrastive(img, txt, scale):
    all_img, all_txt = gather_all(img), gather_all(txt)
    n = img.size(0)
    target = torch.arange(n, device=img.device) + n * dist.get_rank()
    return (F.cross_entropy(scale * img @ all_txt.t(), target)
            + F.cross_entropy(scale * txt @ all_img.t(), target)) / 2


def main():
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    is_main = dist.get_rank() == 0

    feats = torch.load("/data/cc3m/features.pt", map_location="cpu")
    ds = TensorDataset(feats["image"].float(), feats["text"].float())
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 1024, sampler=sampler, num_workers=4, drop_last=True)

    model = DDP(DualEncoder().cuda(), device_ids=[local])
    opt = torch.optim.AdamW(model.parameters(), 5e-4, weight_decay=0.1)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 30 * len(loader))

    for epoch in range(30):
        sampler.set_epoch(epoch)
        for i, t in loader:
            img, txt, scale = model(i.cuda(non_blocking=True), t.cuda(non_blocking=True))
            loss = contrastive(img, txt, scale)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
        if is_main:
            print(epoch, loss.item())
    if is_main:
        torch.save(model.module.state_dict(), "dual.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
