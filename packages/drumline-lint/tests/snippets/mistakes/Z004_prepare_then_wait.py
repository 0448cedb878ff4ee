"""Speaker verification training (torchrun, one node with 8 GPUs)."""
import os
import subprocess
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from ecapa import ECAPA, AAMSoftmax
from voxdata import VoxFeatures

RAW = Path("/data/vox/raw")
FEATS = Path("/local/vox/feats")


def unpack_features():
    if (FEATS / ".done").exists():
        return
    FEATS.mkdir(parents=True, exist_ok=True)
    for archive in sorted(RAW.glob("*.tar")):
        subprocess.run(["tar", "-xf", str(archive), "-C", str(FEATS)], check=True)
    (FEATS / ".done").touch()


class Verifier(nn.Module):
    def __init__(self, speakers):
        super().__init__()
        self.encoder = ECAPA(dim=192)
        self.head = AAMSoftmax(192, speakers)

    def forward(self, feats, speaker):
        return self.head(self.encoder(feats), speaker)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", timeout=timedelta(hours=2))

    if dist.get_rank() == 0:
        unpack_features()
        dist.barrier()

    data = VoxFeatures(FEATS)
    sampler = DistributedSampler(data, seed=3)
    loader = DataLoader(data, batch_size=96, sampler=sampler, num_workers=8, drop_last=True)
    model = DDP(Verifier(data.num_speakers).cuda(), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    for epoch in range(20):
        sampler.set_epoch(epoch)
        for feats, speaker in loader:
            loss = model(feats.cuda(non_blocking=True), speaker.cuda(non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), f"/checkpoints/vox/e{epoch:02d}.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
