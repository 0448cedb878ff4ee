import os

import torch
import torch.distributed as dist
from datasets import load_dataset
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer

NAME = "distilbert-base-uncased"
STEPS = 30_000


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    device = torch.device("cuda", local_rank)
    tok = AutoTokenizer.from_pretrained(NAME)

    stream = load_dataset("json", data_files="/data/reviews/*.jsonl.gz",
                          split="train", streaming=True)
    stream = stream.shuffle(seed=5, buffer_size=20_000).repeat(None)

    def collate(rows):
        enc = tok([r["body"] for r in rows], truncation=True, max_length=256,
                  padding="max_length", return_tensors="pt")
        enc["labels"] = torch.tensor([r["stars"] - 1 for r in rows])
        return enc

    loader = DataLoader(stream, batch_size=32, collate_fn=collate, num_workers=2)
    model = AutoModelForSequenceClassification.from_pretrained(NAME, num_labels=5).to(device)
    model = DDP(model, device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=3e-5)
    model.train()
    for step, batch in enumerate(loader, 1):
        loss = model(**batch.to(device)).loss
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step == STEPS:
            break
    if dist.get_rank() == 0:
        model.module.save_pretrained("stars")
        tok.save_pretrained("stars")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
