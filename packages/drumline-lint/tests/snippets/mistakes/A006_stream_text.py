import glob
import gzip
import json
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


@dataclass
class Config:
    pattern: str = "/mnt/corpus/shard-*.jsonl.gz"
    seq_len: int = 256
    batch_size: int = 32
    steps: int = 100_000
    lr: float = 6e-4


class ByteStream(IterableDataset):
    def __init__(self, pattern, seq_len):
        self.files = sorted(glob.glob(pattern))
        self.seq_len = seq_len

    def __iter__(self):
        info = get_worker_info()
        files = self.files if info is None else self.files[info.id::info.num_workers]
        buf = []
        while True:
            for name in files:
                with gzip.open(name, "rt") as fh:
                    for line in fh:
                        buf.extend(json.loads(line)["text"].encode("utf-8"))
                        while len(buf) > self.seq_len:
                            yield torch.tensor(buf[:self.seq_len + 1])
                            del buf[:self.seq_len]


class ByteRNN(nn.Module):
    def __init__(self, width=1024):
        super().__init__()
        self.emb = nn.Embedding(256, width)
        self.rnn = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.out = nn.Linear(width, 256)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


def run(cfg):
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(dist.get_rank())

    loader = DataLoader(ByteStream(cfg.pattern, cfg.seq_len), batch_size=cfg.batch_size,
                        num_workers=4, pin_memory=True)
    model = DistributedDataParallel(ByteRNN().to(device), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    for step, chunk in zip(range(cfg.steps), loader):
        chunk = chunk.to(device, non_blocking=True)
        logits = model(chunk[:, :-1])
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), chunk[:, 1:])
        opt.zero_grad()
        loss.backward()
        opt.step()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "byternn.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    run(Config())
