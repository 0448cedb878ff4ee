"""Fine-tune a sentence classifier on all GPUs of one machine (torchrun)."""
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForSequenceClassification, get_linear_schedule_with_warmup

from data.reviews import ReviewDataset, collate

EPOCHS = 6
LR = 2e-5


class Runner:
    def __init__(self):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(self.local_rank)
        dist.init_process_group("nccl")
        self.is_main = dist.get_rank() == 0

        train_set = ReviewDataset("train")
        self.sampler = DistributedSampler(train_set, shuffle=True, seed=17)
        self.loader = DataLoader(train_set, batch_size=32, sampler=self.sampler,
                                 collate_fn=collate, num_workers=4, drop_last=True)
        net = AutoModelForSequenceClassification.from_pretrained("roberta-base", num_labels=5)
        self.model = DDP(net.cuda(), device_ids=[self.local_rank])
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=LR)
        total = EPOCHS * len(self.loader)
        self.sched = get_linear_schedule_with_warmup(self.optim, int(0.06 * total), total)

    def train_one_epoch(self, epoch):
        self.model.train()
        running = 0.0
        for i, batch in enumerate(self.loader):
            batch = {k: v.cuda(non_blocking=True) for k, v in batch.items()}
            loss = self.model(**batch).loss
            loss.backward()
            self.optim.step()
            self.sched.step()
            self.optim.zero_grad()
            running += loss.detach().item()
            if self.is_main and i % 50 == 49:
                print(f"[{epoch}:{i + 1}] {running / 50:.4f}")
                running = 0.0

    def fit(self):
        for epoch in range(EPOCHS):
            self.train_one_epoch(epoch)
            if self.is_main:
                self.model.module.save_pretrained(f"out/epoch{epoch}")
        dist.destroy_process_group()


if __name__ == "__main__":
    Runner().fit()
