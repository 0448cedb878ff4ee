import os
import sys

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from datasets import load_from_disk
from transformers import (AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding,
                          get_linear_schedule_with_warmup)

DEFAULTS = OmegaConf.create({
    "model": "roberta-large",
    "data": "data/mnli_tok",
    "num_labels": 3,
    "per_gpu_batch": 16,
    "epochs": 3,
    "lr": 1e-5,
    "warmup_ratio": 0.06,
    "out": "out/mnli",
})


class Runner:
    def __init__(self, cfg):
        self.cfg = cfg
        self.local_rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(self.local_rank)
        dist.init_process_group("nccl")
        self.is_main = dist.get_rank() == 0

        tok = AutoTokenizer.from_pretrained(cfg.model)
        data = load_from_disk(cfg.data)
        self.train_ds, self.dev_ds = data["train"], data["validation_matched"]
        collate = DataCollatorWithPadding(tok, pad_to_multiple_of=8)
        self.sampler = DistributedSampler(self.train_ds, shuffle=True, drop_last=True)
        self.train_dl = DataLoader(self.train_ds, cfg.per_gpu_batch, sampler=self.sampler, collate_fn=collate,
                                   num_workers=4, drop_last=True)
        self.dev_dl = DataLoader(self.dev_ds, 64, sampler=DistributedSampler(self.dev_ds, shuffle=False),
                                 collate_fn=collate)

        model = AutoModelForSequenceClassification.from_pretrained(cfg.model, num_labels=cfg.num_labels)
        self.model = DDP(model.cuda(), device_ids=[self.local_rank])
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr, weight_decay=0.1)
        steps_per_epoch = len(self.train_ds) // cfg.per_gpu_batch
        total = steps_per_epoch * cfg.epochs
        self.sched = get_linear_schedule_with_warmup(self.opt, int(cfg.warmup_ratio * total), total)

    def train(self):
        for epoch in range(self.cfg.epochs):
            self.sampler.set_epoch(epoch)
            self.model.train()
            for batch in self.train_dl:
                batch = {k: v.cuda(non_blocking=True) for k, v in batch.items()}
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = self.model(**batch).loss
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.opt.step()
                self.sched.step()
                self.opt.zero_grad(set_to_none=True)
            acc = self.evaluate()
            if self.is_main:
                print(f"epoch {epoch} dev acc {acc:.4f}")
                self.model.module.save_pretrained(f"{self.cfg.out}/epoch{epoch}")

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        c = torch.zeros(2, device="cuda")
        for batch in self.dev_dl:
            batch = {k: v.cuda() for k, v in batch.items()}
            pred = self.model(**batch).logits.argmax(-1)
            c[0] += (pred == batch["labels"]).sum()
            c[1] += pred.numel()
        dist.all_reduce(c)
        return (c[0] / c[1]).item()


if __name__ == "__main__":
    # torchrun --nproc_per_node=8 Q030_roberta_cls.py lr=2e-5 epochs=5
    runner = Runner(OmegaConf.merge(DEFAULTS, OmegaConf.from_cli(sys.argv[1:])))
    runner.train()
    dist.destroy_process_group()
