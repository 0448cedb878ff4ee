import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from depthnet.data import DepthPairs
from depthnet.losses import scale_invariant_loss
from depthnet.model import DepthNet


class Trainer:
    def __init__(self, data_root, out_dir, epochs=40):
        self.rank = dist.get_rank()
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.device = torch.device("cuda", self.local_rank)
        self.epochs = epochs
        self.out_dir = Path(out_dir)
        self.out_dir.mkdir(parents=True, exist_ok=True)

        dataset = DepthPairs(data_root)
        self.sampler = DistributedSampler(dataset)
        self.loader = DataLoader(dataset, batch_size=12, sampler=self.sampler,
                                 num_workers=6, pin_memory=True)
        self.model = DDP(DepthNet().to(self.device), device_ids=[self.local_rank])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-4)

    def save(self, epoch):
        state = {
            "epoch": epoch,
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        torch.save(state, self.out_dir / "last.pt")

    def fit(self):
        for epoch in range(self.epochs):
            self.sampler.set_epoch(epoch)
            self.model.train()
            for image, depth in self.loader:
                image = image.to(self.device, non_blocking=True)
                depth = depth.to(self.device, non_blocking=True)
                self.optimizer.zero_grad(set_to_none=True)
                loss = scale_invariant_loss(self.model(image), depth)
                loss.backward()
                self.optimizer.step()
            self.save(epoch)
            if self.rank == 0:
                print(f"epoch {epoch} done, last loss {loss.item():.4f}")


if __name__ == "__main__":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend="nccl")
    Trainer("/datasets/nyu", "/scratch/depth/run7").fit()
    dist.destroy_process_group()
