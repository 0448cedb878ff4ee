import argparse
import csv
import json
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


def read_tsv(path):
    with open(path, newline="", encoding="utf-8") as f:
        return [(text, label) for text, label in csv.reader(f, delimiter="\t")]


def build_label_map(rows):
    labels = {label for _, label in rows}
    return {label: i for i, label in enumerate(labels)}


class IntentDataset(Dataset):
    def __init__(self, rows, label2id, max_len=64):
        self.rows, self.label2id, self.max_len = rows, label2id, max_len

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        text, label = self.rows[i]
        raw = list(text.encode("utf-8"))[: self.max_len]
        ids = torch.zeros(self.max_len, dtype=torch.long)
        ids[: len(raw)] = torch.tensor(raw) + 1
        return ids, self.label2id[label]


class ByteCNN(nn.Module):
    def __init__(self, n_labels, d=192):
        super().__init__()
        self.emb = nn.Embedding(257, d, padding_idx=0)
        self.convs = nn.ModuleList([nn.Conv1d(d, d, k, padding=k // 2) for k in (3, 5, 7)])
        self.fc = nn.Linear(3 * d, n_labels)

    def forward(self, ids):
        x = self.emb(ids).transpose(1, 2)
        return self.fc(torch.cat([c(x).relu().amax(-1) for c in self.convs], 1))


def run(args):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()

    train_rows, dev_rows = read_tsv(args.train), read_tsv(args.dev)
    label2id = build_label_map(train_rows)
    train, dev = IntentDataset(train_rows, label2id), IntentDataset(dev_rows, label2id)
    sampler = DistributedSampler(train)
    train_dl = DataLoader(train, args.bs, sampler=sampler, num_workers=2, drop_last=True)
    dev_dl = DataLoader(dev, 1024, sampler=DistributedSampler(dev, shuffle=False))

    model = DDP(ByteCNN(len(label2id)).cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for ids, y in train_dl:
            loss = F.cross_entropy(model(ids.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()

        model.eval()
        ok = torch.zeros(2, device="cuda")
        with torch.no_grad():
            for ids, y in dev_dl:
                pred = model(ids.cuda()).argmax(-1)
                ok[0] += (pred == y.cuda()).sum()
                ok[1] += len(y)
        dist.all_reduce(ok)
        if rank == 0:
            print(f"epoch {epoch} dev acc {(ok[0] / ok[1]).item():.4f}")

    if rank == 0:
        os.makedirs(args.out, exist_ok=True)
        torch.save(model.module.state_dict(), f"{args.out}/model.pt")
        with open(f"{args.out}/labels.json", "w") as f:
            json.dump(label2id, f)
    dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser(description="run with torchrun")
    ap.add_argument("--train", default="data/train.tsv")
    ap.add_argument("--dev", default="data/dev.tsv")
    ap.add_argument("--out", default="out")
    ap.add_argument("--bs", type=int, default=256)
    ap.add_argument("--epochs", type=int, default=15)
    ap.add_argument("--lr", type=float, default=1e-3)
    run(ap.parse_args())
