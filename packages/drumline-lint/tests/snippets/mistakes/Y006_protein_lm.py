"""Masked language model on UniRef50.

    srun torchrun --nnodes 4 --nproc_per_node 4 --rdzv_backend c10d \
        --rdzv_endpoint $HEAD:29400 --rdzv_id $SLURM_JOB_ID protein_lm.py
"""
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from plm.data import UniRefMasked
from plm.model import ProteinBert

CKPT_DIR = Path("/scratch/shared/protein_lm")


class Trainer:
    def __init__(self):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.rank = int(os.environ["RANK"])
        self.device = torch.device("cuda", self.local_rank)
        self.epoch = 0
        net = ProteinBert(layers=12, width=768).to(self.device)
        self.model = DistributedDataParallel(net, device_ids=[self.local_rank])
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=4e-4)
        self.loss_fn = nn.CrossEntropyLoss(ignore_index=-100)
        data = UniRefMasked("/data/uniref50")
        self.sampler = DistributedSampler(data, drop_last=True)
        self.loader = DataLoader(data, batch_size=32, sampler=self.sampler,
                                 num_workers=4, pin_memory=True)
        self.resume()

    def resume(self):
        path = CKPT_DIR / "last.pt"
        if path.exists():
            state = torch.load(path, map_location=self.device)
            self.model.module.load_state_dict(state["model"])
            self.optim.load_state_dict(state["optim"])
            self.epoch = state["epoch"] + 1

    def save(self):
        state = {
            "model": self.model.module.state_dict(),
            "optim": self.optim.state_dict(),
            "epoch": self.epoch,
        }
        torch.save(state, CKPT_DIR / "last.pt")

    def fit(self, epochs):
        while self.epoch < epochs:
            self.sampler.set_epoch(self.epoch)
            for tokens, labels in self.loader:
                logits = self.model(tokens.to(self.device, non_blocking=True))
                loss = self.loss_fn(logits.flatten(0, 1), labels.flatten().to(self.device))
                self.optim.zero_grad(set_to_none=True)
                loss.backward()
                self.optim.step()
            if self.rank == 0:
                print(f"epoch {self.epoch} done, last loss {loss.item():.3f}")
            self.save()
            self.epoch += 1


if __name__ == "__main__":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    CKPT_DIR.mkdir(parents=True, exist_ok=True)
    Trainer().fit(epochs=30)
    dist.destroy_process_group()
