import os
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclass
class Config:
    block_size: int = 256
    vocab_size: int = 256
    n_embd: int = 384
    n_head: int = 6
    n_layer: int = 6
    batch_size: int = 64
    epochs: int = 10
    lr: float = 3e-4
    seed: int = 1337
    corpus: str = "data/shakespeare.txt"


class ByteDataset(Dataset):
    def __init__(self, path, block):
        raw = open(path, "rb").read()
        self.data = torch.tensor(list(raw), dtype=torch.long)
        self.block = block

    def __len__(self):
        return (len(self.data) - 1) // self.block

    def __getitem__(self, i):
        s = i * self.block
        chunk = self.data[s:s + self.block + 1]
        return chunk[:-1], chunk[1:]


class TinyGPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok = nn.Embedding(c.vocab_size, c.n_embd)
        self.pos = nn.Parameter(torch.zeros(1, c.block_size, c.n_embd))
        layer = nn.TransformerEncoderLayer(c.n_embd, c.n_head, 4 * c.n_embd, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, c.n_layer)
        self.head = nn.Linear(c.n_embd, c.vocab_size)

    def forward(self, idx):
        t = idx.size(1)
        mask = nn.Transformer.generate_square_subsequent_mask(t, device=idx.device)
        h = self.blocks(self.tok(idx) + self.pos[:, :t], mask=mask, is_causal=True)
        return self.head(h)


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.rank = int(os.environ["RANK"])
        torch.cuda.set_device(self.local_rank)
        dist.init_process_group("nccl")
        torch.manual_seed(cfg.seed)

        model = TinyGPT(cfg).cuda()
        self.model = DistributedDataParallel(model, device_ids=[self.local_rank])
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr)

        self.dataset = ByteDataset(cfg.corpus, cfg.block_size)
        self.sampler = DistributedSampler(self.dataset, seed=cfg.seed)
        self.loader = DataLoader(
            self.dataset,
            batch_size=cfg.batch_size,
            shuffle=True,
            num_workers=4,
            pin_memory=True,
            drop_last=True,
        )

    def fit(self):
        for epoch in range(self.cfg.epochs):
            self.sampler.set_epoch(epoch)
            self.model.train()
            total, n = 0.0, 0
            for x, y in self.loader:
                x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
                logits = self.model(x)
                loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
                self.opt.zero_grad(set_to_none=True)
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.opt.step()
                total += loss.item()
                n += 1
            if self.rank == 0:
                print(f"epoch {epoch}: loss {total / n:.4f}")
                torch.save(self.model.module.state_dict(), "gpt.pt")


if __name__ == "__main__":
    # torchrun --standalone --nproc_per_node=4 Q002_char_gpt.py
    Trainer(Config()).fit()
    dist.destroy_process_group()
