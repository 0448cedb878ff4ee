import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Clips(Dataset):
    def __init__(self, manifest):
        with open(manifest) as fh:
            rows = [r.rstrip("\n").split("\t") for r in fh]
        self.rows = [(a, int(b)) for a, b in rows]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        path, genre = self.rows[i]
        return torch.load(path, map_location="cpu"), genre


class GenreNet(nn.Module):
    def __init__(self, genres=50):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(128, 256, 3), nn.GELU(), nn.Conv1d(256, 256, 3), nn.GELU())
        self.fc = nn.Linear(256, genres)

    def forward(self, x):
        return self.fc(self.conv(x).mean(-1))


if __name__ == "__main__":
    dist.init_process_group(backend="nccl")
    local_rank = int(os.environ["LOCAL_RANK"])

    clips = Clips("/data/fma/train.tsv")
    sampler = DistributedSampler(clips, shuffle=True, drop_last=True)
    loader = DataLoader(clips, batch_size=96, sampler=sampler, num_workers=8, drop_last=True)

    net = GenreNet().cuda()
    net = DDP(net, device_ids=[local_rank], output_device=local_rank)
    opt = torch.optim.AdamW(net.parameters(), lr=7e-4)
    for epoch in range(18):
        sampler.set_epoch(epoch)
        for mel, genre in loader:
            loss = F.cross_entropy(net(mel.cuda()), genre.cuda())
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
    if dist.get_rank() == 0:
        torch.save(net.module.state_dict(), "genre.pt")
    dist.destroy_process_group()
