import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModel

from multitask.data import TASKS, task_dataset


class MultiTask(nn.Module):
    def __init__(self, name="microsoft/deberta-v3-base"):
        super().__init__()
        self.encoder = AutoModel.from_pretrained(name)
        hidden = self.encoder.config.hidden_size
        self.heads = nn.ModuleDict({t.name: nn.Linear(hidden, t.num_labels) for t in TASKS})

    def forward(self, task, input_ids, attention_mask):
        h = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state[:, 0]
        return self.heads[task](h)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")

    loaders, samplers = {}, {}
    for t in TASKS:
        ds = task_dataset(t.name, "train")
        samplers[t.name] = DistributedSampler(ds, drop_last=True)
        loaders[t.name] = DataLoader(ds, batch_size=16, sampler=samplers[t.name], num_workers=2)

    model = DDP(MultiTask().cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ce = nn.CrossEntropyLoss()

    for epoch in range(5):
        for s in samplers.values():
            s.set_epoch(epoch)
        order = [name for name, dl in loaders.items() for _ in range(len(dl))]
        random.Random(epoch).shuffle(order)
        its = {name: iter(dl) for name, dl in loaders.items()}
        model.train()
        for step, name in enumerate(order):
            batch = {k: v.cuda(non_blocking=True) for k, v in next(its[name]).items()}
            logits = model(name, batch["input_ids"], batch["attention_mask"])
            loss = ce(logits, batch["labels"])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            if step % 100 == 0 and dist.get_rank() == 0:
                print(f"{epoch}/{step} {name} {loss.item():.4f}")
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), f"mt_{epoch}.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
