import glob
import itertools

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from env import launch, reduce_mean
from stream import JsonlStream

MAX_STEPS = 50_000


def pretrain(env):
    torch.manual_seed(1234)
    tok = AutoTokenizer.from_pretrained("tokenizer")
    ds = JsonlStream(glob.glob("corpus/*.jsonl.gz"), tok, block_size=1024)
    loader = DataLoader(ds, batch_size=16, drop_last=True, pin_memory=True)
    cfg = LlamaConfig(vocab_size=len(tok), hidden_size=768, intermediate_size=2048, num_hidden_layers=12)
    model = DDP(LlamaForCausalLM(cfg).to(env.device), device_ids=[env.local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
    step = 0
    for epoch in itertools.count():
        ds.set_epoch(epoch)
        for block in loader:
            block = block.to(env.device, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                logits = model(input_ids=block[:, :-1]).logits
                loss = F.cross_entropy(logits.flatten(0, 1).float(), block[:, 1:].flatten())
            opt.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            step += 1
            if step % 50 == 0:
                value = reduce_mean(loss.item(), env)
                if env.is_main:
                    print(step, round(value, 4))
            if step == MAX_STEPS:
                if env.is_main:
                    model.module.save_pretrained("out/final")
                return


if __name__ == "__main__":
    launch(pretrain)
