import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

ACCUM = 16
MICRO_BATCH = 4


class CharData(Dataset):
    def __init__(self, path, n=512):
        with open(path, "rb") as fh:
            self.raw = torch.frombuffer(bytearray(fh.read()), dtype=torch.uint8).long()
        self.n = n

    def __len__(self):
        return (len(self.raw) - 1) // self.n

    def __getitem__(self, i):
        s = self.raw[i * self.n:i * self.n + self.n + 1]
        return s[:-1], s[1:]


class CharModel(nn.Module):
    def __init__(self, d=1024):
        super().__init__()
        self.emb = nn.Embedding(256, d)
        self.rnn = nn.LSTM(d, d, 3, batch_first=True)
        self.out = nn.Linear(d, 256)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(dist.get_rank())
    ds = CharData("enwik9")
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, MICRO_BATCH, sampler=sampler, drop_last=True)
    model = DDP(CharModel().to(device), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=5e-4)

    for epoch in range(3):
        sampler.set_epoch(epoch)
        opt.zero_grad(set_to_none=True)
        for i, (x, y) in enumerate(loader):
            x, y = x.to(device), y.to(device)
            loss = F.cross_entropy(model(x).transpose(1, 2), y) / ACCUM
            loss.backward()
            if (i + 1) % ACCUM == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                opt.zero_grad(set_to_none=True)
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "char.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
