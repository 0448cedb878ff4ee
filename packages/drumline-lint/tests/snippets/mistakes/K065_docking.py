import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Complexes(Dataset):
    def __init__(self, root):
        self.files = sorted(os.path.join(root, n) for n in os.listdir(root) if n.endswith(".pt"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        d = torch.load(self.files[i], map_location="cpu")
        return d["pair_feats"], d["distances"]


class PairNet(nn.Module):
    def __init__(self, ch=40):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(ch, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


def train(model, loader, opt):
    model.train()
    dropped = 0
    for pair, target in loader:
        pair, target = pair.cuda(non_blocking=True), target.cuda(non_blocking=True)
        loss = (model(pair).log1p() - target.log1p()).abs().mean()
        if not torch.isfinite(loss):
            dropped += 1
            continue
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
    return dropped


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    ds = Complexes("/data/pdbbind/train")
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 1, sampler=sampler, num_workers=6)
    model = DDP(PairNet().cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=3e-4)
    for epoch in range(50):
        sampler.set_epoch(epoch)
        n = train(model, loader, opt)
        print(f"[rank {dist.get_rank()}] epoch {epoch}: dropped {n}")
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), "docking.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
