"""Multi-task text encoder: one shared BERT, one head per GLUE task, tasks in turn."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from datasets import load_from_disk
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoModel

TASKS = {"mnli": 3, "qqp": 2, "sst2": 2, "qnli": 2}


class MultiTask(nn.Module):
    def __init__(self, name="bert-base-uncased"):
        super().__init__()
        self.encoder = AutoModel.from_pretrained(name, add_pooling_layer=False)
        dim = self.encoder.config.hidden_size
        self.heads = nn.ModuleDict({task: nn.Linear(dim, n) for task, n in TASKS.items()})

    def forward(self, task, input_ids, attention_mask):
        h = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state[:, 0]
        return self.heads[task](h)


def endless(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def main():
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)

    streams = {}
    for task in TASKS:
        data = load_from_disk(f"data/glue/{task}")["train"].with_format("torch")
        sampler = DistributedSampler(data, shuffle=True, drop_last=True)
        loader = DataLoader(data, 32, sampler=sampler, num_workers=2, drop_last=True)
        streams[task] = endless(loader, sampler)

    model = DDP(MultiTask().to(device), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    names = list(TASKS)

    model.train()
    for step in range(40000):
        task = names[step % len(names)]  # the same task on every rank
        batch = next(streams[task])
        logits = model(task, batch["input_ids"].to(device), batch["attention_mask"].to(device))
        loss = F.cross_entropy(logits, batch["label"].to(device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if rank == 0 and step % 500 == 0:
            print(f"{step} {task} {loss.item():.4f}", flush=True)
        if rank == 0 and step % 5000 == 4999:
            torch.save(model.module.state_dict(), "multitask.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
