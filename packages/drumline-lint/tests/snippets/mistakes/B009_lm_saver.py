import json
import logging
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

log = logging.getLogger("pretrain")


class PackedTokens(Dataset):
    def __init__(self, path, block):
        self.tokens = np.memmap(path, dtype=np.uint16, mode="r")
        self.block = block

    def __len__(self):
        return len(self.tokens) // self.block

    def __getitem__(self, i):
        chunk = self.tokens[i * self.block : (i + 1) * self.block].astype(np.int64)
        return torch.from_numpy(chunk)


class Pretrainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank, self.local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
        self.device = torch.device("cuda", self.local_rank)
        data = PackedTokens(cfg["tokens"], cfg["block"])
        self.sampler = DistributedSampler(data, drop_last=True)
        self.loader = DataLoader(data, cfg["micro_batch"], sampler=self.sampler, num_workers=2, drop_last=True)
        model = GPT2LMHeadModel(GPT2Config(n_positions=cfg["block"])).to(self.device)
        self.model = DDP(model, device_ids=[self.local_rank])
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=cfg["lr"], weight_decay=0.1)
        total = cfg["epochs"] * len(self.loader)
        self.sched = get_cosine_schedule_with_warmup(self.opt, 2000, total)
        self.step = 0

    def save(self):
        out = Path(self.cfg["out"]) / f"step{self.step:08d}"
        if self.rank == 0:
            out.mkdir(parents=True, exist_ok=True)
            self.model.module.save_pretrained(out)
            torch.save({"opt": self.opt.state_dict(), "sched": self.sched.state_dict(), "step": self.step},
                       out / "trainer.pt")
            log.info("saved %s", out)
            dist.barrier()

    def fit(self):
        for epoch in range(self.cfg["epochs"]):
            self.sampler.set_epoch(epoch)
            for ids in self.loader:
                ids = ids.to(self.device, non_blocking=True)
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = self.model(input_ids=ids, labels=ids).loss
                self.opt.zero_grad(set_to_none=True)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.opt.step()
                self.sched.step()
                self.step += 1
                if self.step % 100 == 0 and self.rank == 0:
                    log.info("step %d loss %.3f", self.step, loss.item())
                if self.step % self.cfg["save_every"] == 0:
                    self.save()


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    logging.basicConfig(level=logging.INFO if dist.get_rank() == 0 else logging.ERROR)
    torch.manual_seed(42)
    with open(os.environ.get("CFG", "configs/gpt2_small.json")) as f:
        cfg = json.load(f)
    Pretrainer(cfg).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
