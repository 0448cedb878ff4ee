import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def epoch_indices(n, epoch, rank, world, batch, seed=11):
    g = np.random.default_rng([seed, epoch])
    perm = g.permutation(n)
    usable = n // (world * batch) * world * batch
    return perm[:usable][rank::world].reshape(-1, batch)


class NextEvent(nn.Module):
    def __init__(self, vocab=4096, d=256):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.rnn = nn.LSTM(d, d, num_layers=2, batch_first=True)
        self.out = nn.Linear(d, vocab)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()

    data = np.load("events.npy", mmap_mode="r")
    model = DDP(NextEvent().cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), 1e-3)

    for epoch in range(20):
        losses = torch.zeros(2, device="cuda")
        for rows in epoch_indices(len(data), epoch, rank, world, batch=128):
            x = torch.from_numpy(data[np.sort(rows)].astype(np.int64)).cuda()
            loss = nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            losses += torch.stack([loss.detach(), torch.ones_like(loss)])
        dist.all_reduce(losses)
        if rank == 0:
            print(f"epoch {epoch} loss {(losses[0] / losses[1]).item():.4f}")
            torch.save(model.module.state_dict(), "events.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()  # torchrun --nproc_per_node=4
