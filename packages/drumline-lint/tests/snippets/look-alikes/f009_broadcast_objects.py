import collections
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

TRAIN = "data/reviews/train.tsv"
MAX_LEN = 200


def build_vocab(size=30000):
    counts = collections.Counter()
    with open(TRAIN, encoding="utf-8") as f:
        for line in f:
            counts.update(line.rstrip("\n").split("\t")[1].lower().split())
    return {w: i + 2 for i, (w, _) in enumerate(counts.most_common(size))}


def share_vocab(rank):
    if rank == 0:
        vocab = build_vocab()
        dist.broadcast_object_list([vocab], src=0)
    else:
        box = [None]
        dist.broadcast_object_list(box, src=0)
        vocab = box[0]
    return vocab


class Reviews(Dataset):
    def __init__(self, vocab):
        with open(TRAIN, encoding="utf-8") as f:
            self.rows = [line.rstrip("\n").split("\t") for line in f]
        self.vocab = vocab

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        label, text = self.rows[i]
        ids = [self.vocab.get(w, 1) for w in text.lower().split()][:MAX_LEN]
        return torch.tensor(ids + [0] * (MAX_LEN - len(ids))), int(label)


class TextCNN(nn.Module):
    def __init__(self, vocab, dim=256, classes=5):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, padding_idx=0)
        self.convs = nn.ModuleList(nn.Conv1d(dim, 128, k) for k in (3, 4, 5))
        self.out = nn.Linear(3 * 128, classes)

    def forward(self, x):
        e = self.emb(x).transpose(1, 2)
        return self.out(torch.cat([F.relu(c(e)).amax(-1) for c in self.convs], dim=1))


def main():
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    vocab = share_vocab(rank)
    data = Reviews(vocab)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, 128, sampler=sampler, num_workers=4)
    model = DDP(TextCNN(len(vocab) + 2).cuda(), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    for epoch in range(8):
        sampler.set_epoch(epoch)
        for ids, label in loader:
            loss = F.cross_entropy(model(ids.cuda()), label.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "vocab": vocab}, "textcnn.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
