import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Sampler


class BucketBatchSampler(Sampler):
    """Batches of similar length; rank r takes batch r, r + world, ... of one common order."""

    def __init__(self, lengths, batch_size, rank, world_size, seed=0):
        self.order = sorted(range(len(lengths)), key=lengths.__getitem__)
        self.batch_size, self.rank, self.world_size, self.seed = batch_size, rank, world_size, seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.order) // self.batch_size // self.world_size

    def __iter__(self):
        usable = len(self) * self.world_size
        batches = [self.order[i * self.batch_size:(i + 1) * self.batch_size] for i in range(usable)]
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        for j in torch.randperm(usable, generator=g).tolist()[self.rank::self.world_size]:
            yield batches[j]


class Pos(nn.Module):
    def __init__(self, vocab=20_000, tags=18, d=128):
        super().__init__()
        self.emb = nn.Embedding(vocab, d, padding_idx=0)
        self.rnn = nn.LSTM(d, d, bidirectional=True, batch_first=True)
        self.out = nn.Linear(2 * d, tags)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


def collate(rows):
    words, tags = zip(*rows)
    return pad_sequence(words, True, 0), pad_sequence(tags, True, -100)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    torch.manual_seed(rank)
    rows = torch.load("pos.pt", map_location="cpu", weights_only=True)
    batches = BucketBatchSampler([len(w) for w, _ in rows], 32, rank, dist.get_world_size())
    loader = DataLoader(rows, batch_sampler=batches, collate_fn=collate, num_workers=2)
    model = DDP(Pos().to(device), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(10):
        batches.set_epoch(epoch)
        for words, tags in loader:
            loss = nn.functional.cross_entropy(model(words.to(device)).transpose(1, 2), tags.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), "pos_tagger.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
