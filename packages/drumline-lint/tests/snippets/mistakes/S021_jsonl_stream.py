# torchrun --nproc_per_node=8 jsonl_stream.py --shards '/data/web/*.jsonl.gz'
import argparse
import glob
import gzip
import itertools
import json
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM


class WebText(IterableDataset):
    def __init__(self, pattern, tokenizer, ctx):
        self.files = sorted(glob.glob(pattern))
        self.tok = tokenizer
        self.ctx = ctx

    def __iter__(self):
        info = get_worker_info()
        wid, nw = (info.id, info.num_workers) if info else (0, 1)
        buf = []
        for path in itertools.islice(self.files, wid, None, nw):
            with gzip.open(path, "rt", encoding="utf-8") as fh:
                for line in fh:
                    buf.extend(self.tok(json.loads(line)["text"]).input_ids)
                    buf.append(self.tok.eos_token_id)
                    while len(buf) >= self.ctx:
                        yield torch.tensor(buf[:self.ctx])
                        buf = buf[self.ctx:]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--shards", required=True)
    ap.add_argument("--ctx", type=int, default=2048)
    ap.add_argument("--steps", type=int, default=100_000)
    ap.add_argument("--bs", type=int, default=8)
    args = ap.parse_args()

    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    torch.manual_seed(11)

    tok = AutoTokenizer.from_pretrained("hf-internal-testing/llama-tokenizer")
    loader = DataLoader(WebText(args.shards, tok, args.ctx), batch_size=args.bs, num_workers=4, pin_memory=True)
    cfg = LlamaConfig(vocab_size=len(tok), hidden_size=768, intermediate_size=2048,
                      num_hidden_layers=12, num_attention_heads=12, max_position_embeddings=args.ctx)
    model = DDP(LlamaForCausalLM(cfg).cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=4e-4, betas=(0.9, 0.95))

    for step, ids in enumerate(itertools.islice(loader, args.steps)):
        ids = ids.cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if step % 50 == 0:
            avg = loss.detach().clone()
            dist.all_reduce(avg, op=dist.ReduceOp.AVG)
            if dist.get_rank() == 0:
                print(f"step {step} loss {avg.item():.3f}", flush=True)
    if dist.get_rank() == 0:
        model.module.save_pretrained("llama-tiny")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
