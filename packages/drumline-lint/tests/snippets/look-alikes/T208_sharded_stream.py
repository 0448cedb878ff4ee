import glob
import json
import os
import random
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import AutoTokenizer, OPTConfig, OPTForCausalLM

MAX_STEPS = 50_000


class JsonlStream(IterableDataset):
    def __init__(self, pattern, rank, world, seq=512):
        self.files, self.rank, self.world, self.seq = sorted(glob.glob(pattern)), rank, world, seq

    def __iter__(self):
        info = get_worker_info()
        wid, nw = (info.id, info.num_workers) if info else (0, 1)
        shard = self.rank * nw + wid
        total = self.world * nw
        tok = AutoTokenizer.from_pretrained("facebook/opt-125m")
        rng = random.Random(shard)
        buf = []
        while True:
            mine = self.files[shard::total]
            rng.shuffle(mine)
            for path in mine:
                for line in open(path, encoding="utf8"):
                    buf += tok(json.loads(line)["text"])["input_ids"]
                    while len(buf) >= self.seq:
                        yield torch.tensor(buf[:self.seq])
                        del buf[:self.seq]


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    loader = DataLoader(JsonlStream("/data/pile/*.jsonl", rank, world), batch_size=16, num_workers=4)
    model = DDP(OPTForCausalLM(OPTConfig()).cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=6e-4)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 6e-4, total_steps=MAX_STEPS)
    model.train()
    for step, ids in enumerate(islice(loader, MAX_STEPS)):
        ids = ids.cuda(non_blocking=True)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        opt.zero_grad(set_to_none=True)
        if step % 1000 == 0 and rank == 0:
            print(step, loss.item(), flush=True)
            torch.save(model.module.state_dict(), "opt_last.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
