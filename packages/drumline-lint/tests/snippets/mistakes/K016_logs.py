import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import AutoTokenizer

RAW = "/shared/syslogs/all.txt"
CACHE = "/shared/syslogs/all.ids.npy"
BLOCK = 512


def ids():
    if not os.path.exists(CACHE):
        tok = AutoTokenizer.from_pretrained("/models/log-bpe")
        buf = []
        with open(RAW) as fh:
            for line in fh:
                buf.extend(tok.encode(line))
        np.save(CACHE, np.asarray(buf, dtype=np.int32))
    return np.load(CACHE, mmap_mode="r")


class Blocks(Dataset):
    def __init__(self):
        self.ids = ids()

    def __len__(self):
        return (len(self.ids) - 1) // BLOCK

    def __getitem__(self, i):
        w = torch.from_numpy(self.ids[i * BLOCK:(i + 1) * BLOCK + 1].astype(np.int64))
        return w[:-1], w[1:]


class LM(nn.Module):
    def __init__(self, vocab=8192, dim=384):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.LSTM(dim, dim, 3, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    ds = Blocks()
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 64, sampler=sampler, num_workers=2, drop_last=True)
    lm = DDP(LM().cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(lm.parameters(), 3e-4)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(lm(x.cuda()).flatten(0, 1), y.cuda().flatten())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            torch.save(lm.module.state_dict(), f"loglm_{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
