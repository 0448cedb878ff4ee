import glob
import itertools

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from env import launch, reduce_mean
from stream import ShardedJsonl

STEPS = 30_000


def pretrain(env):
    torch.manual_seed(5 + env.rank)
    tok = AutoTokenizer.from_pretrained("tokenizer")
    stream = ShardedJsonl(glob.glob("corpus/*.jsonl"), tok, block=1024)
    loader = DataLoader(stream, batch_size=8, num_workers=2, pin_memory=True)
    model = DDP(GPT2LMHeadModel(GPT2Config(vocab_size=len(tok))).to(env.device), device_ids=[env.local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    model.train()
    for step, ids in enumerate(itertools.islice(loader, STEPS)):
        ids = ids.to(env.device, non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if step % 100 == 0:
            mean = reduce_mean(loss.item(), env)
            if env.is_main:
                print(step, f"{mean:.4f}", flush=True)
    if env.is_main:
        model.module.save_pretrained("out/final")


if __name__ == "__main__":
    launch(pretrain)
