import os
import random

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler

from mt.config import cfg
from mt.data import PairDataset, collate_pairs
from mt.model import Transformer


class TokenBatchSampler(Sampler):
    """Batches of similar length, limited by tokens; rank r takes every world_size-th batch."""

    def __init__(self, lengths, max_tokens, rank, world_size, seed=0):
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        self.batches, batch, longest = [], [], 0
        for i in order:
            longest = max(longest, lengths[i])
            if batch and longest * (len(batch) + 1) > max_tokens:
                self.batches.append(batch)
                batch, longest = [], lengths[i]
            batch.append(i)
        self.batches.append(batch)
        self.rank, self.world_size, self.seed, self.epoch = rank, world_size, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.batches) // self.world_size

    def __iter__(self):
        batches = list(self.batches)
        random.Random(self.seed + self.epoch).shuffle(batches)
        usable = len(self) * self.world_size
        return iter(batches[self.rank:usable:self.world_size])


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    torch.manual_seed(cfg.seed + dist.get_rank())

    dataset = PairDataset(cfg.train)
    sampler = TokenBatchSampler(dataset.lengths, cfg.max_tokens, dist.get_rank(), dist.get_world_size(), cfg.seed)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate_pairs, num_workers=4, pin_memory=True)
    model = DDP(Transformer(cfg.model).cuda(), device_ids=[local_rank])
    opt = torch.optim.Adam(model.parameters(), lr=cfg.lr, betas=(0.9, 0.98))
    loss_fn = torch.nn.CrossEntropyLoss(ignore_index=cfg.pad, label_smoothing=0.1)

    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        for src, tgt in loader:
            src, tgt = src.cuda(non_blocking=True), tgt.cuda(non_blocking=True)
            loss = loss_fn(model(src, tgt[:, :-1]).flatten(0, 1), tgt[:, 1:].flatten())
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), os.path.join(cfg.out, f"mt_{epoch}.pt"))
            print(f"epoch {epoch} loss {loss.item():.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
