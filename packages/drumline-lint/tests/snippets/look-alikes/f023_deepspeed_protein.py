"""Masked protein language model with DeepSpeed ZeRO-1.  deepspeed f023_deepspeed_protein.py"""
import argparse
import os

import deepspeed
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset

CONFIG = {
    "train_micro_batch_size_per_gpu": 32,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 4e-4, "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2000, "warmup_max_lr": 4e-4}},
}
MASK, PAD = 31, 0


class Proteins(Dataset):
    def __init__(self, path):
        self.tokens = torch.load(path, map_location="cpu")

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        seq = self.tokens[i].long()
        chosen = (torch.rand(seq.shape) < 0.15) & (seq != PAD)
        return seq.masked_fill(chosen, MASK), seq.masked_fill(~chosen, -100)


class Encoder(nn.Module):
    def __init__(self, vocab=32, dim=1024, depth=24, length=512):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(length, dim)
        layer = nn.TransformerEncoderLayer(dim, 16, 4 * dim, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.out = nn.Linear(dim, vocab)

    def forward(self, x):
        pos = torch.arange(x.size(1), device=x.device)
        return self.out(self.blocks(self.emb(x) + self.pos(pos)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="data/uniref.pt")
    parser.add_argument("--out", default="ckpt/protein")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args()

    deepspeed.init_distributed()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    model = Encoder()
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=Proteins(args.data), config=CONFIG
    )

    for epoch in range(args.epochs):
        loader.data_sampler.set_epoch(epoch)
        for x, y in loader:
            x, y = x.to(engine.device), y.to(engine.device)
            loss = F.cross_entropy(engine(x).float().flatten(0, 1), y.flatten(), ignore_index=-100)
            engine.backward(loss)
            engine.step()
            if dist.get_rank() == 0 and engine.global_steps % 100 == 0:
                print(f"epoch {epoch} step {engine.global_steps} loss {loss.item():.4f}", flush=True)
        engine.save_checkpoint(args.out, tag=f"epoch{epoch}", client_state={"epoch": epoch})


if __name__ == "__main__":
    main()
