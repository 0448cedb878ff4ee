import glob
import gzip
import json
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

SEQ = 1024
STEPS = 50_000


class WebText(IterableDataset):
    """Endless packed sequences; never runs out, so all ranks take the same number of steps."""

    def __init__(self, pattern, tokenizer, rank, world_size):
        self.files = sorted(glob.glob(pattern))
        self.tokenizer = tokenizer
        self.rank, self.world_size = rank, world_size

    def documents(self):
        info = get_worker_info()
        workers = info.num_workers if info else 1
        part = self.rank * workers + (info.id if info else 0)
        parts = self.world_size * workers
        n = 0
        while True:
            for name in self.files:
                with gzip.open(name, "rt", encoding="utf-8") as f:
                    for line in f:
                        if n % parts == part:
                            yield json.loads(line)["text"]
                        n += 1

    def __iter__(self):
        buffer = []
        for text in self.documents():
            buffer += self.tokenizer(text)["input_ids"] + [self.tokenizer.eos_token_id]
            while len(buffer) >= SEQ:
                yield torch.tensor(buffer[:SEQ])
                buffer = buffer[SEQ:]


def main():
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    tokenizer = AutoTokenizer.from_pretrained("gpt2")
    tokenizer.model_max_length = int(1e9)
    data = WebText("/data/openwebtext/*.jsonl.gz", tokenizer, rank, world_size)
    loader = DataLoader(data, batch_size=12, num_workers=2, pin_memory=True)

    torch.manual_seed(rank)
    model = DDP(GPT2LMHeadModel(GPT2Config()).cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-4, total_steps=STEPS, pct_start=0.02)

    for step, ids in zip(range(STEPS), loader):
        ids = ids.cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if rank == 0 and step % 100 == 0:
            print(f"{step} {loss.item():.3f}", flush=True)
        if rank == 0 and step % 5000 == 4999:
            model.module.save_pretrained(f"ckpt/step{step + 1}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
