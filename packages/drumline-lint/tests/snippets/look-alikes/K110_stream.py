import glob
import itertools
import json
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import AutoTokenizer, T5ForConditionalGeneration


class Lines(IterableDataset):
    def __init__(self, pattern, rank, world):
        self.files, self.rank, self.world = sorted(glob.glob(pattern)), rank, world

    def lines(self):
        for f in itertools.cycle(self.files):
            with open(f) as fh:
                yield from fh

    def __iter__(self):
        info = get_worker_info()
        w, n = (info.id, info.num_workers) if info else (0, 1)
        mine = itertools.islice(self.lines(), self.rank * n + w, None, self.world * n)
        for line in mine:
            yield json.loads(line)


def main(steps=50_000):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    tok = AutoTokenizer.from_pretrained("t5-base")

    def collate(rows):
        x = tok([r["question"] for r in rows], padding=True, truncation=True, max_length=256, return_tensors="pt")
        y = tok([r["answer"] for r in rows], padding=True, truncation=True, max_length=64, return_tensors="pt")
        x["labels"] = y.input_ids.masked_fill(y.input_ids == tok.pad_token_id, -100)
        return x

    data = Lines("/data/qa/*.jsonl", dist.get_rank(), dist.get_world_size())
    loader = DataLoader(data, batch_size=16, collate_fn=collate, num_workers=4)
    model = DDP(T5ForConditionalGeneration.from_pretrained("t5-base").cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step, batch in enumerate(itertools.islice(loader, steps)):
        loss = model(**batch.to(local_rank)).loss
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 5000 == 0 and dist.get_rank() == 0:
            model.module.save_pretrained("t5_qa")
    if dist.get_rank() == 0:
        model.module.save_pretrained("t5_qa")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
