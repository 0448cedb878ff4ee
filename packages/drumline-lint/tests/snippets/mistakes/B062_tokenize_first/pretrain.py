import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoTokenizer, GPTNeoXConfig, GPTNeoXForCausalLM, get_cosine_schedule_with_warmup

from prepare import get_corpus


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group(backend="nccl")
    torch.manual_seed(7)
    device = torch.device("cuda", local_rank)
    tok = AutoTokenizer.from_pretrained("tokenizer")
    data = get_corpus("dump/*.jsonl", tok, 2048, "dump/packed")
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, 8, sampler=sampler, num_workers=4, drop_last=True)
    cfg = GPTNeoXConfig(vocab_size=len(tok), hidden_size=1024, num_hidden_layers=16, num_attention_heads=16)
    model = DDP(GPTNeoXForCausalLM(cfg).to(device), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    sched = get_cosine_schedule_with_warmup(opt, 1000, len(loader))
    sampler.set_epoch(0)
    for step, batch in enumerate(loader):
        ids = batch["input_ids"].to(device, non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        if step % 100 == 0 and dist.get_rank() == 0:
            print(step, loss.item(), flush=True)
        if step % 5000 == 4999 and dist.get_rank() == 0:
            model.module.save_pretrained(f"out/step{step + 1}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
