import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Bytes(Dataset):
    def __init__(self, path, block=512):
        with open(path, "rb") as f:
            self.data = torch.frombuffer(bytearray(f.read()), dtype=torch.uint8)
        self.block = block

    def __len__(self):
        return (len(self.data) - 1) // self.block

    def __getitem__(self, i):
        s = i * self.block
        chunk = self.data[s:s + self.block + 1].long()
        return chunk[:-1], chunk[1:]


class LSTMLM(nn.Module):
    def __init__(self, d=1024, layers=3):
        super().__init__()
        self.emb = nn.Embedding(256, d)
        self.rnn = nn.LSTM(d, d, layers, batch_first=True, dropout=0.2)
        self.out = nn.Linear(d, 256)

    def forward(self, x):
        h, _ = self.rnn(self.emb(x))
        return self.out(h)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("text")
    p.add_argument("--clip", type=float, default=0.25)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--epochs", type=int, default=10)
    args = p.parse_args()

    dist.init_process_group("nccl")
    rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)

    ds = Bytes(args.text)
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 64, sampler=sampler, num_workers=2, drop_last=True)
    model = DDP(LSTMLM().cuda(), device_ids=[local])
    opt = torch.optim.Adam(model.parameters(), args.lr)
    scaler = torch.cuda.amp.GradScaler()

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            with torch.cuda.amp.autocast():
                loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            opt.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            scaler.step(opt)
            scaler.update()
        if rank == 0:
            print(f"{epoch}: {loss.item() / 0.6931:.3f} bits/byte (last batch)")
            torch.save(model.module.state_dict(), "bytelm.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
