import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from data import ShardedLoader
from voices import EmotionNet, VoiceClips

EPOCHS = 45


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")

    loader = ShardedLoader(VoiceClips("/data/voices"), batch_size=64, num_workers=8)
    model = DDP(EmotionNet(8).cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=2e-4, total_steps=EPOCHS * len(loader))

    for epoch in range(EPOCHS):
        model.train()
        for clip, emotion in loader:
            loss = F.cross_entropy(model(clip.cuda(non_blocking=True)), emotion.cuda(non_blocking=True))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            scheduler.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
            torch.save(model.module.state_dict(), f"/checkpoints/voices/{epoch:02d}.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
