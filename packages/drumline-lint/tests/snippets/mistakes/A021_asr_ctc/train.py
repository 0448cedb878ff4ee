import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from asr.loader import get_loader
from asr.model import CTCModel
from asr.run import Run


class Trainer:
    def __init__(self, run: Run):
        self.run = run
        self.model = DDP(CTCModel(n_mels=80, vocab=128).to(run.device), device_ids=[run.local_rank])
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=run.lr)
        self.loader, self.sampler = get_loader(run.manifest, run.batch_size)

    def step(self, batch):
        batch = {k: v.to(self.run.device) for k, v in batch.items()}
        loss = self.model.module.compute_loss(**batch)
        self.optim.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.optim.step()

    def train(self):
        for epoch in range(self.run.epochs):
            self.sampler.set_epoch(epoch)
            self.model.train()
            for batch in self.loader:
                self.step(batch)
            if self.run.rank == 0:
                torch.save(self.model.module.state_dict(), f"ctc_{epoch}.pt")


if __name__ == "__main__":
    run = Run.from_env()
    Trainer(run).train()
    dist.destroy_process_group()
