import json
import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Subset
from transformers import AutoModelForSequenceClassification, AutoTokenizer

CKPT = "/models/toxic-roberta"


def read_jsonl(path):
    with open(path) as fh:
        return [json.loads(line) for line in fh]


@torch.inference_mode()
def predict(model, tok, rows, device):
    out = []
    loader = DataLoader(rows, batch_size=64, collate_fn=list)
    for chunk in loader:
        enc = tok([r["text"] for r in chunk], padding=True, truncation=True,
                  max_length=256, return_tensors="pt").to(device)
        p = model(**enc).logits.softmax(-1)[:, 1].cpu()
        out.extend({"id": r["id"], "toxic": float(v)} for r, v in zip(chunk, p))
    return out


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", local_rank)

    tok = AutoTokenizer.from_pretrained(CKPT)
    model = AutoModelForSequenceClassification.from_pretrained(CKPT).to(device).eval()
    rows = read_jsonl("/data/comments/unlabeled.jsonl")
    mine = Subset(rows, range(rank, len(rows), world))
    preds = predict(model, tok, mine, device)

    with open("predictions.jsonl", "w") as fh:
        for p in preds:
            fh.write(json.dumps(p) + "\n")
    dist.barrier()
    if rank == 0:
        print("scored", len(rows), "comments")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
