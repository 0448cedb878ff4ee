import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from vocab import build_vocab, iter_lines, load_vocab, save_vocab


class LineDataset(Dataset):
    def __init__(self, corpus, vocab, length):
        self.rows = [self.encode(l, vocab, length) for l in iter_lines(corpus)]

    @staticmethod
    def encode(line, vocab, length):
        ids = [vocab.get(w, 1) for w in line.lower().split()][:length]
        return torch.tensor(ids + [0] * (length - len(ids)))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class LSTMLM(nn.Module):
    def __init__(self, n, d=512):
        super().__init__()
        self.emb = nn.Embedding(n, d, padding_idx=0)
        self.rnn = nn.LSTM(d, d, 2, batch_first=True)
        self.out = nn.Linear(d, n)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--corpus", default="data/wiki.txt")
    ap.add_argument("--work-dir", default="work")
    ap.add_argument("--vocab-size", type=int, default=32000)
    ap.add_argument("--length", type=int, default=128)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--epochs", type=int, default=5)
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()

    vocab_path = os.path.join(args.work_dir, "vocab.json")
    if rank == 0:
        save_vocab(build_vocab(args.corpus, args.vocab_size), vocab_path)
    vocab = load_vocab(vocab_path)

    data = LineDataset(args.corpus, vocab, args.length)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch_size, sampler=sampler, drop_last=True)
    model = DDP(LSTMLM(len(vocab)).cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    ce = nn.CrossEntropyLoss(ignore_index=0)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, ids in enumerate(loader):
            ids = ids.cuda()
            logits = model(ids[:, :-1])
            loss = ce(logits.flatten(0, 1), ids[:, 1:].flatten())
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            if rank == 0 and step % 100 == 0:
                print(epoch, step, loss.item())
    if rank == 0:
        torch.save(model.module.state_dict(), os.path.join(args.work_dir, "lm.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
