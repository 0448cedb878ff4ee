"""Rank 0 reads a vocabulary and sends it to the others.  torchrun --nproc_per_node=4 branch_broadcast.py"""
import collections
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Dataset


class Lines(Dataset):
    def __init__(self, path, vocab, n=64):
        self.vocab, self.n = vocab, n
        with open(path, encoding="utf-8") as fh:
            self.rows = [line.rstrip("\n").split("\t") for line in fh]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        label, text = self.rows[i]
        ids = [self.vocab.get(w, 1) for w in text.split()][: self.n]
        return torch.tensor(ids + [0] * (self.n - len(ids))), int(label)


def shared_vocab(path, size=20_000):
    if dist.get_rank() == 0:
        c = collections.Counter()
        with open(path, encoding="utf-8") as fh:
            for line in fh:
                c.update(line.rstrip("\n").split("\t")[1].split())
        box = [{w: i + 2 for i, (w, _) in enumerate(c.most_common(size))}]
        dist.broadcast_object_list(box, src=0)
    else:
        box = [None]
        dist.broadcast_object_list(box, src=0)
    return box[0]


def main():
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    vocab = shared_vocab("train.tsv")
    ds = Lines("train.tsv", vocab)
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 256, sampler=sampler, num_workers=2)
    net = nn.Sequential(nn.EmbeddingBag(len(vocab) + 2, 128, padding_idx=0), nn.Linear(128, 4)).cuda()
    model = DDP(net, device_ids=[local])
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for ids, y in loader:
            loss = nn.functional.cross_entropy(model(ids.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            print(epoch, loss.item())
    if dist.get_rank() == 0:
        torch.save({"vocab": vocab, "model": model.module.state_dict()}, "bag.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
