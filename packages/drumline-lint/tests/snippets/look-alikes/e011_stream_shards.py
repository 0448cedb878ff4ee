import glob
import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import LlamaConfig, LlamaForCausalLM

STEPS = 60_000
BLOCK = 2048


class TokenShards(IterableDataset):
    def __init__(self, pattern, seed=0):
        self.files = sorted(glob.glob(pattern))
        self.seed = seed

    def __iter__(self):
        info = get_worker_info()
        wid, nw = (info.id, info.num_workers) if info else (0, 1)
        slot = dist.get_rank() * nw + wid
        files = self.files[slot::dist.get_world_size() * nw]
        if not files:
            raise RuntimeError("fewer shards than data workers")
        rng = random.Random(self.seed + slot)
        while True:
            rng.shuffle(files)
            for f in files:
                data = np.memmap(f, dtype=np.uint16, mode="r")
                starts = list(range(0, len(data) - BLOCK, BLOCK))
                rng.shuffle(starts)
                for s in starts:
                    yield torch.from_numpy(data[s:s + BLOCK].astype(np.int64))


def main():
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)

    loader = DataLoader(TokenShards("/data/fineweb/*.bin"), batch_size=8,
                        num_workers=4, pin_memory=True)
    cfg = LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=16,
                      num_attention_heads=16, vocab_size=50304)
    torch.manual_seed(1)
    model = DDP(LlamaForCausalLM(cfg).cuda(), device_ids=[local])
    opt = torch.optim.AdamW(model.parameters(), 4e-4, betas=(0.9, 0.95), weight_decay=0.1)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 4e-4, total_steps=STEPS, pct_start=0.02)

    for step, ids in zip(range(STEPS), loader):
        ids = ids.cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        opt.zero_grad(set_to_none=True)
        if step % 2000 == 0 and dist.get_rank() == 0:
            print(step, round(loss.item(), 3), flush=True)
            model.module.save_pretrained(f"ckpt/{step}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
