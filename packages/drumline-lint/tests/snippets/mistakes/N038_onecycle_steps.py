import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from audio.data import AudioSetTags
from audio.models import Cnn14


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)

    batch_size, epochs = 32, 30
    ds = AudioSetTags("/data/audioset/balanced")
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    loader = DataLoader(ds, batch_size=batch_size, sampler=sampler,
                        num_workers=6, pin_memory=True, drop_last=True)

    model = DDP(Cnn14(527).to(device), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps_per_epoch = len(ds) // batch_size
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-3, total_steps=epochs * steps_per_epoch, pct_start=0.1)
    loss_fn = torch.nn.BCEWithLogitsLoss()

    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        for mel, tags in loader:
            mel, tags = mel.to(device, non_blocking=True), tags.to(device, non_blocking=True)
            loss = loss_fn(model(mel), tags)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            scheduler.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} lr {scheduler.get_last_lr()[0]:.2e}")
            torch.save(model.module.state_dict(), "cnn14.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
