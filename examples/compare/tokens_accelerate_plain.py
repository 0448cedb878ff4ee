"""How many tokens a plain evaluation loop on Accelerate counts: sums on every rank, added up in the end."""

import torch
from accelerate import Accelerator
from common import RANKS, Words, pad, sentences, show
from torch.utils.data import DataLoader

accelerator = Accelerator()
eval_loader = accelerator.prepare(DataLoader(sentences(333, seed=2), batch_size=32 // RANKS, collate_fn=pad))
tokens = torch.zeros((), device=accelerator.device)
for batch in eval_loader:
    tokens += (batch["labels"] != -100).sum()
show(Words(), counted=accelerator.reduce(tokens))
accelerator.end_training()
