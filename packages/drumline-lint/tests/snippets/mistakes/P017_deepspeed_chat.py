"""Supervised fine-tuning, ZeRO-3 via the deepspeed launcher:

    deepspeed --num_gpus 8 sft.py --deepspeed_config zero3.json
"""
import argparse
import json
import time

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer


class ChatDataset(Dataset):
    def __init__(self, path, tok, max_len):
        self.items = []
        with open(path) as f:
            for line in f:
                turn = json.loads(line)
                text = f"### User:\n{turn['prompt']}\n### Assistant:\n{turn['answer']}{tok.eos_token}"
                self.items.append(tok(text, max_length=max_len, truncation=True, padding="max_length",
                                      return_tensors="pt"))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        ids = self.items[i]["input_ids"][0]
        mask = self.items[i]["attention_mask"][0]
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class SFT:
    def __init__(self, args):
        self.args = args
        self.tok = AutoTokenizer.from_pretrained(args.model)
        self.tok.pad_token = self.tok.eos_token
        data = ChatDataset(args.data, self.tok, args.max_len)
        model = AutoModelForCausalLM.from_pretrained(args.model)
        model.gradient_checkpointing_enable()
        self.engine, _, self.loader, self.sched = deepspeed.initialize(
            args=args, model=model, model_parameters=model.parameters(), training_data=data)
        self.rank = dist.get_rank()

    def train(self):
        step = 0
        for epoch in range(self.args.epochs):
            if hasattr(self.loader.data_sampler, "set_epoch"):
                self.loader.data_sampler.set_epoch(epoch)
            t = time.perf_counter()
            for batch in self.loader:
                batch = {k: v.to(self.engine.device) for k, v in batch.items()}
                loss = self.engine(**batch, use_cache=False).loss
                self.engine.backward(loss)
                self.engine.step()
                step += 1
                if step % self.args.log_every == 0:
                    self.log(epoch, step, loss, time.perf_counter() - t)
                    t = time.perf_counter()
                if step % self.args.save_every == 0:
                    self.save(step)
            self.save(step)

    def log(self, epoch, step, loss, seconds):
        avg = loss.detach().float()
        dist.all_reduce(avg)
        avg /= dist.get_world_size()
        if self.rank == 0:
            print(f"ep {epoch} step {step} loss {avg.item():.4f} {seconds:.1f}s", flush=True)

    def save(self, step):
        if self.rank == 0:
            self.tok.save_pretrained(self.args.output)
            self.engine.save_checkpoint(self.args.output, tag=f"step{step}")


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", default="mistralai/Mistral-7B-v0.1")
    ap.add_argument("--data", default="chat.jsonl")
    ap.add_argument("--max_len", type=int, default=1024)
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--log_every", type=int, default=10)
    ap.add_argument("--save_every", type=int, default=400)
    ap.add_argument("--output", default="sft-out")
    ap.add_argument("--local_rank", type=int, default=-1)
    ap = deepspeed.add_config_arguments(ap)
    cli = ap.parse_args()
    deepspeed.init_distributed()
    torch.cuda.set_device(cli.local_rank)
    SFT(cli).train()
    dist.destroy_process_group()
