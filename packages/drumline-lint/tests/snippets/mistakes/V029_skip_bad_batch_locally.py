import logging
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from tts.data import LJSpeech, collate_mels
from tts.model import FastSpeech

log = logging.getLogger("tts")


def train_epoch(model, loader, optimizer, epoch):
    model.train()
    skipped = 0
    for step, batch in enumerate(loader):
        batch = [t.cuda(non_blocking=True) for t in batch]
        try:
            losses = model(*batch)
            loss = losses["mel"] + 0.1 * losses["pitch"] + 0.1 * losses["duration"]
            if not torch.isfinite(loss):
                skipped += 1
                continue
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            skipped += 1
            continue
        if step % 50 == 0 and dist.get_rank() == 0:
            log.info("epoch %d step %d loss %.3f skipped %d", epoch, step, loss.item(), skipped)


def main():
    rank = int(os.environ["RANK"])
    local_rank = int(os.environ["LOCAL_RANK"])
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR)
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")

    dataset = LJSpeech("/data/LJSpeech-1.1")
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, 24, sampler=sampler, collate_fn=collate_mels, num_workers=4)
    model = DDP(FastSpeech().cuda(), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(500):
        sampler.set_epoch(epoch)
        train_epoch(model, loader, optimizer, epoch)
        if rank == 0 and epoch % 10 == 0:
            torch.save(model.module.state_dict(), f"fastspeech_{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
