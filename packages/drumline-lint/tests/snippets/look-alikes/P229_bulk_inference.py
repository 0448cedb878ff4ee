import argparse
import json
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModel, AutoTokenizer


class Documents(Dataset):
    def __init__(self, path, rank, world):
        with open(path) as f:
            self.rows = [json.loads(line) for i, line in enumerate(f) if i % world == rank]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]["id"], self.rows[i]["text"]


def merge(out, world):
    with open(out / "embeddings.jsonl", "w") as dst:
        for r in range(world):
            part = out / f"part-{r:04d}.jsonl"
            with open(part) as src:
                for line in src:
                    dst.write(line)
            part.unlink()


@torch.inference_mode()
def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--docs", required=True)
    ap.add_argument("--model", default="intfloat/e5-base-v2")
    ap.add_argument("--bs", type=int, default=128)
    ap.add_argument("--out", type=Path, required=True)
    args = ap.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", timeout=timedelta(hours=3))
    rank, world = dist.get_rank(), dist.get_world_size()
    args.out.mkdir(parents=True, exist_ok=True)

    tok = AutoTokenizer.from_pretrained(args.model)
    model = AutoModel.from_pretrained(args.model, torch_dtype=torch.float16).cuda().eval()

    def collate(rows):
        ids, texts = zip(*rows)
        return ids, tok(["passage: " + t for t in texts], padding=True, truncation=True, max_length=512,
                        return_tensors="pt")

    loader = DataLoader(Documents(args.docs, rank, world), args.bs, collate_fn=collate, num_workers=4)
    with open(args.out / f"part-{rank:04d}.jsonl", "w") as f:
        for n, (ids, enc) in enumerate(loader):
            enc = enc.to("cuda")
            h = model(**enc).last_hidden_state.masked_fill(~enc["attention_mask"][..., None].bool(), 0.0)
            vec = torch.nn.functional.normalize(h.sum(1) / enc["attention_mask"].sum(1, keepdim=True), dim=-1)
            for doc, v in zip(ids, vec.float().cpu().tolist()):
                f.write(json.dumps({"id": doc, "vec": [round(x, 5) for x in v]}) + "\n")
            if n % 50 == 0:
                print(f"[rank {rank}] {n}/{len(loader)}", flush=True)

    dist.barrier()
    if rank == 0:
        merge(args.out, world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
