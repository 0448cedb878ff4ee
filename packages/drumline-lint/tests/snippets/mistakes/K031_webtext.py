import glob
import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import GPT2Config, GPT2LMHeadModel


class TokenShards(IterableDataset):
    def __init__(self, pattern, block):
        self.files = sorted(glob.glob(pattern))
        self.block = block

    def __iter__(self):
        info = get_worker_info()
        files = self.files[info.id::info.num_workers] if info else list(self.files)
        rng = random.Random(99)
        while True:
            rng.shuffle(files)
            for f in files:
                arr = np.load(f, mmap_mode="r")
                for i in range(0, len(arr) - self.block, self.block):
                    yield torch.from_numpy(arr[i:i + self.block].astype(np.int64))


def main(max_steps=100_000):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    loader = DataLoader(TokenShards("/data/owt/*.npy", 1024), batch_size=12, num_workers=4, pin_memory=True)
    model = DDP(GPT2LMHeadModel(GPT2Config()).cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
    sched = torch.optim.lr_scheduler.LinearLR(opt, 0.01, 1.0, total_iters=2000)
    for step, ids in enumerate(loader):
        if step == max_steps:
            break
        ids = ids.cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        opt.zero_grad(set_to_none=True)
        if step % 5000 == 0 and dist.get_rank() == 0:
            torch.save(model.module.state_dict(), f"gpt2_{step}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
