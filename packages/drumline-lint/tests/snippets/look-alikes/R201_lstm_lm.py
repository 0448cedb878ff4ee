import argparse
import collections
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from lm1b.data import LineDataset
from lm1b.model import LSTMLanguageModel


def count_vocab(path, min_count):
    counter = collections.Counter()
    with open(path, encoding="utf-8") as f:
        for line in f:
            counter.update(line.split())
    words = [w for w, c in counter.most_common() if c >= min_count]
    return {w: i for i, w in enumerate(["<pad>", "<unk>", "<s>", "</s>"] + words)}


def shared_vocab(path, min_count):
    box = [None]
    if dist.get_rank() == 0:
        box[0] = count_vocab(path, min_count)
        print(f"vocabulary: {len(box[0])} words", flush=True)
    dist.broadcast_object_list(box, src=0)
    return box[0]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("corpus")
    p.add_argument("--min-count", type=int, default=5)
    p.add_argument("--epochs", type=int, default=10)
    p.add_argument("--batch", type=int, default=128)
    p.add_argument("--lr", type=float, default=1e-3)
    args = p.parse_args()

    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    vocab = shared_vocab(args.corpus, args.min_count)
    ds = LineDataset(args.corpus, vocab, max_len=64)
    sampler = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, args.batch, sampler=sampler, num_workers=4, drop_last=True, pin_memory=True)
    model = DDP(LSTMLanguageModel(len(vocab)).cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    ce = nn.CrossEntropyLoss(ignore_index=0)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for ids in loader:
            ids = ids.cuda(non_blocking=True)
            loss = ce(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.3f}", flush=True)
            torch.save({"model": model.module.state_dict(), "vocab": vocab}, "lm.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
