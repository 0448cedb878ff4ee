"""A loss per token, with padding and accumulated micro-batches: Accelerate."""

from contextlib import nullcontext
from itertools import islice

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import RANKS, Words, pad, sentences, show
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

accelerator = Accelerator()
set_seed(0)
net = Words()
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
train_loader = DataLoader(sentences(330, seed=1), batch_size=16 // RANKS, collate_fn=pad)
eval_loader = DataLoader(sentences(333, seed=2), batch_size=32 // RANKS, collate_fn=pad)
net, optimizer, train_loader, eval_loader = accelerator.prepare(net, optimizer, train_loader, eval_loader)

for _epoch in range(3):
    net.train()
    batches = iter(train_loader)
    while group := list(islice(batches, 2)):
        tokens = accelerator.reduce(sum((batch["labels"] != -100).sum() for batch in group))
        for number, batch in enumerate(group, start=1):
            with nullcontext() if number == len(group) else accelerator.no_sync(net):
                total = cross_entropy(net(batch["tokens"]).transpose(1, 2), batch["labels"], reduction="sum")
                accelerator.backward(total * accelerator.num_processes / tokens)
        optimizer.step()
        optimizer.zero_grad()

    net.eval()
    total = tokens = 0
    for batch in eval_loader:
        with torch.no_grad():
            losses = cross_entropy(net(batch["tokens"]).transpose(1, 2), batch["labels"], reduction="none")
        per_sample = losses.sum(1), (batch["labels"] != -100).sum(1)
        per_sample = accelerator.gather_for_metrics(per_sample)
        total, tokens = total + per_sample[0].sum(), tokens + per_sample[1].sum()
    accelerator.print(f"loss {total / tokens:.4f}")

show(accelerator.unwrap_model(net), loss=total / tokens, counted=tokens)
accelerator.end_training()
