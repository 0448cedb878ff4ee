import glob
import json
import os
import random

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


class JsonlStream(IterableDataset):
    def __init__(self, pattern, tokenizer, seq_len, seed=0):
        self.files = sorted(glob.glob(pattern))
        self.tokenizer = tokenizer
        self.seq_len = seq_len
        self.seed = seed
        self.epoch = 0

    def __iter__(self):
        order = list(self.files)
        random.Random(self.seed + self.epoch).shuffle(order)
        info = get_worker_info()
        if info is not None:
            order = order[info.id::info.num_workers]
        buf = []
        while True:
            for path in order:
                with open(path) as f:
                    for line in f:
                        ids = self.tokenizer(json.loads(line)["text"])["input_ids"]
                        buf.extend(ids + [self.tokenizer.eos_token_id])
                        while len(buf) >= self.seq_len:
                            yield torch.tensor(buf[: self.seq_len])
                            buf = buf[self.seq_len:]


def setup():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    return local_rank


def main():
    cfg = OmegaConf.merge(OmegaConf.load("configs/pretrain.yaml"), OmegaConf.from_cli())
    local_rank = setup()
    rank = dist.get_rank()
    torch.manual_seed(cfg.seed)

    tok = AutoTokenizer.from_pretrained(cfg.tokenizer_dir, local_files_only=True)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(cfg.model_dir, local_files_only=True))
    model = DDP(model.cuda(), device_ids=[local_rank])
    optim = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.1)
    sched = torch.optim.lr_scheduler.OneCycleLR(optim, max_lr=cfg.lr, total_steps=cfg.max_steps)

    ds = JsonlStream(cfg.train_glob, tok, cfg.seq_len, seed=cfg.seed)
    loader = iter(DataLoader(ds, batch_size=cfg.micro_batch, num_workers=cfg.workers, pin_memory=True))

    for step in range(cfg.max_steps):
        ids = next(loader).cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        sched.step()
        optim.zero_grad(set_to_none=True)
        if step % cfg.log_every == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean, op=dist.ReduceOp.AVG)
            if rank == 0:
                print(f"step {step} loss {mean.item():.4f} lr {sched.get_last_lr()[0]:.2e}", flush=True)
        if rank == 0 and step and step % cfg.save_every == 0:
            torch.save(model.module.state_dict(), f"{cfg.out}/step{step}.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
