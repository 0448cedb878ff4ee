# torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=$HEAD:29400 N019_rank_as_device.py
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from seq2seq.data import WMTPairs, collate
from seq2seq.transformer import Transformer


def setup():
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world)
    return rank, torch.device(f"cuda:{rank}")


def main(amp=True):
    rank, device = setup()
    pairs = WMTPairs("/data/wmt14/en-de")
    sampler = DistributedSampler(pairs)
    loader = DataLoader(pairs, batch_size=64, sampler=sampler, collate_fn=collate, num_workers=4)

    model = Transformer(vocab=37000).to(device)
    model = DDP(model, device_ids=[rank])
    opt = torch.optim.Adam(model.parameters(), lr=7e-4, betas=(0.9, 0.98))
    ctx = torch.autocast("cuda", dtype=torch.bfloat16) if amp else nullcontext()

    for epoch in range(30):
        sampler.set_epoch(epoch)
        for src, tgt in loader:
            src, tgt = src.to(device), tgt.to(device)
            with ctx:
                loss = model(src, tgt)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"{epoch}: {loss.item():.3f}")
            torch.save(model.module.state_dict(), "transformer.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
