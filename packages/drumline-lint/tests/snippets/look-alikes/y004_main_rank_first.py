# one machine: torchrun --standalone --nproc_per_node=4 wiki_lm.py
import os
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from wikilm import SmallGPT, TokenBlocks, tokenize_dump

DUMP = Path("/data/simplewiki/dump.jsonl")
TOKENS = Path("/data/simplewiki/tokens.bin")


@contextmanager
def rank_zero_first(rank):
    """Rank 0 runs the block first, then all the others."""
    if rank != 0:
        dist.barrier()
    yield
    if rank == 0:
        dist.barrier()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()

    with rank_zero_first(rank):
        if not TOKENS.exists():
            # about a minute for Simple English
            tokenize_dump(DUMP, TOKENS)
        data = TokenBlocks(TOKENS, block=512)

    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler, num_workers=2, pin_memory=True,
                        drop_last=True)
    model = DDP(SmallGPT().cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)

    for epoch in range(8):
        sampler.set_epoch(epoch)
        for tokens in loader:
            tokens = tokens.cuda(non_blocking=True)
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(epoch, loss.item(), flush=True)
            torch.save(model.module.state_dict(), "wiki_lm.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
