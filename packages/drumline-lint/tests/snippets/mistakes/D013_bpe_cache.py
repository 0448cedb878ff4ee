"""Language model on a tokenised cache that the first process makes."""
import os

import numpy as np
import sentencepiece as spm
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lm.model import GPT, GPTConfig

CORPUS = "/shared/corpus/books.txt"
CACHE = "/shared/cache/books.u16"
SEQ = 1024


def make_cache():
    sp = spm.SentencePieceProcessor(model_file="/shared/spm/32k.model")
    with open(CORPUS, encoding="utf-8") as src, open(CACHE, "wb") as dst:
        for line in src:
            np.asarray(sp.encode(line) + [sp.eos_id()], dtype=np.uint16).tofile(dst)


class Blocks(Dataset):
    def __init__(self, path):
        self.tokens = np.memmap(path, dtype=np.uint16, mode="r")

    def __len__(self):
        return (len(self.tokens) - 1) // SEQ

    def __getitem__(self, i):
        chunk = torch.from_numpy(self.tokens[i * SEQ:(i + 1) * SEQ + 1].astype(np.int64))
        return chunk[:-1], chunk[1:]


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)

    if rank == 0 and not os.path.exists(CACHE):
        os.makedirs(os.path.dirname(CACHE), exist_ok=True)
        make_cache()

    data = Blocks(CACHE)
    sampler = DistributedSampler(data, shuffle=True, seed=1, drop_last=True)
    loader = DataLoader(data, batch_size=12, sampler=sampler, num_workers=2, pin_memory=True, drop_last=True)
    model = DDP(GPT(GPTConfig(vocab=32000, n_layer=12, n_head=12, dim=768)).cuda(), device_ids=[local])
    opt = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)

    for epoch in range(3):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                logits = model(x.cuda(non_blocking=True))
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.cuda().flatten())
            opt.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            if step % 50 == 0 and rank == 0:
                print(f"{epoch}/{step} {loss.item():.3f}", flush=True)
        if rank == 0:
            torch.save(model.module.state_dict(), f"/shared/ckpt/gpt-{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
