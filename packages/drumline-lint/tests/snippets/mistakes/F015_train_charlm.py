import math
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

BLOCK = 512
BATCH = 24  # per process
EPOCHS = 5
LR = 6e-4


class TokenBlocks(Dataset):
    def __init__(self, path):
        self.tokens = np.memmap(path, dtype=np.uint16, mode="r")

    def __len__(self):
        return (len(self.tokens) - 1) // BLOCK

    def __getitem__(self, i):
        chunk = torch.from_numpy(self.tokens[i * BLOCK:(i + 1) * BLOCK + 1].astype(np.int64))
        return chunk[:-1], chunk[1:]


class TinyLM(nn.Module):
    def __init__(self, vocab=50304, dim=512, depth=8, heads=8):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(BLOCK, dim)
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, idx):
        t = idx.size(1)
        mask = nn.Transformer.generate_square_subsequent_mask(t, device=idx.device)
        x = self.tok(idx) + self.pos(torch.arange(t, device=idx.device))
        return self.head(self.blocks(x, mask=mask, is_causal=True))


def lr_at(step, total):
    if step < 500:
        return LR * step / 500
    return LR * 0.5 * (1 + math.cos(math.pi * (step - 500) / max(1, total - 500)))


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    torch.manual_seed(1337 + rank)

    train_data = TokenBlocks("data/openwebtext/train.bin")
    loader = DataLoader(train_data, batch_size=BATCH, shuffle=True, num_workers=4,
                        pin_memory=True, drop_last=True)

    model = DDP(TinyLM().cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    total = EPOCHS * len(loader)
    step = 0
    for epoch in range(EPOCHS):
        for x, y in loader:
            for group in optimizer.param_groups:
                group["lr"] = lr_at(step, total)
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                logits = model(x)
                loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if rank == 0 and step % 100 == 0:
                print(f"step {step}/{total} loss {loss.item():.3f}", flush=True)
            step += 1
        if rank == 0:
            torch.save({"model": model.module.state_dict(), "epoch": epoch}, "ckpt.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
