import contextlib
import os
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import AutoModelForMaskedLM, AutoTokenizer, DataCollatorForLanguageModeling

ARGS = SimpleNamespace(
    model="bert-base-uncased", tokens="data/wiki_blocks.npy", out="bert-dapt",
    micro_batch=16, accum=8, epochs=1, lr=5e-5, seed=2024,
)


class Blocks(Dataset):
    def __init__(self, path):
        self.blocks = np.load(path, mmap_mode="r")

    def __len__(self):
        return len(self.blocks)

    def __getitem__(self, i):
        return {"input_ids": self.blocks[i].astype(np.int64).tolist()}


class AccumTrainer:
    def __init__(self, args, local_rank):
        self.args = args
        self.device = torch.device("cuda", local_rank)
        tok = AutoTokenizer.from_pretrained(args.model)
        data = Blocks(args.tokens)
        self.sampler = DistributedSampler(data, seed=args.seed, drop_last=True)
        self.loader = DataLoader(data, args.micro_batch, sampler=self.sampler, num_workers=4, drop_last=True,
                                 collate_fn=DataCollatorForLanguageModeling(tok, mlm_probability=0.15))
        model = AutoModelForMaskedLM.from_pretrained(args.model).to(self.device)
        self.model = DDP(model, device_ids=[local_rank])
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=args.lr, weight_decay=0.01)

    def train_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        self.model.train()
        accum = self.args.accum
        for i, batch in enumerate(self.loader):
            batch = {k: v.to(self.device) for k, v in batch.items()}
            ctx = self.model.no_sync() if i % accum != 0 else contextlib.nullcontext()
            with ctx:
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = self.model(**batch).loss / accum
                loss.backward()
            if (i + 1) % accum == 0:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.opt.step()
                self.opt.zero_grad(set_to_none=True)
        self.opt.zero_grad(set_to_none=True)


def main(args):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    torch.manual_seed(args.seed + dist.get_rank())
    trainer = AccumTrainer(args, local_rank)
    for epoch in range(args.epochs):
        trainer.train_epoch(epoch)
    if dist.get_rank() == 0:
        trainer.model.module.save_pretrained(args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(ARGS)
