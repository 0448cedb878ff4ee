import os

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import AutoTokenizer

from minigpt import GPT, GPTConfig

CACHE = "/scratch/corpus/tokens.npy"
RAW = "/scratch/corpus/train.txt"


class Tokens(Dataset):
    def __init__(self, path, block=512):
        self.arr = np.load(path, mmap_mode="r")
        self.block = block

    def __len__(self):
        return (len(self.arr) - 1) // self.block

    def __getitem__(self, i):
        s = i * self.block
        chunk = torch.from_numpy(self.arr[s:s + self.block + 1].astype(np.int64))
        return chunk[:-1], chunk[1:]


def prepare():
    tok = AutoTokenizer.from_pretrained("gpt2")
    with open(RAW) as f:
        ids = tok(f.read())["input_ids"]
    np.save(CACHE, np.array(ids, dtype=np.uint16))


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    if rank == 0 and not os.path.exists(CACHE):
        prepare()
    ds = Tokens(CACHE)
    sampler = DistributedSampler(ds, shuffle=True)
    loader = DataLoader(ds, batch_size=16, sampler=sampler, num_workers=2, drop_last=True)

    model = DDP(GPT(GPTConfig()).cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            _, loss = model(x.cuda(), y.cuda())
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        if rank == 0:
            print(epoch, loss.item())
            torch.save(model.module.state_dict(), "gpt.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
