import argparse
import json
import os
import pathlib

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Subset
from transformers import AutoModel, AutoTokenizer


def load_docs(path):
    with open(path) as f:
        return [json.loads(line) for line in f]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("corpus")
    p.add_argument("out", type=pathlib.Path)
    p.add_argument("--model", default="intfloat/e5-base-v2")
    p.add_argument("--batch-size", type=int, default=256)
    args = p.parse_args()

    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    args.out.mkdir(parents=True, exist_ok=True)

    tok = AutoTokenizer.from_pretrained(args.model)
    model = AutoModel.from_pretrained(args.model).half().to(device).eval()

    def collate(rows):
        enc = tok(["passage: " + r["text"] for r in rows], padding=True, truncation=True,
                  max_length=512, return_tensors="pt")
        return [r["id"] for r in rows], enc

    docs = load_docs(args.corpus)
    mine = Subset(docs, range(rank, len(docs), world))
    loader = DataLoader(mine, args.batch_size, shuffle=False, collate_fn=collate, num_workers=4)

    ids, vecs = [], []
    with torch.inference_mode():
        for batch_ids, enc in loader:
            enc = enc.to(device)
            h = model(**enc).last_hidden_state
            m = enc["attention_mask"].unsqueeze(-1)
            e = (h * m).sum(1) / m.sum(1)
            vecs.append(torch.nn.functional.normalize(e, dim=-1).float().cpu().numpy())
            ids += batch_ids

    np.save(args.out / f"part{rank:03d}.npy", np.concatenate(vecs))
    (args.out / f"part{rank:03d}.json").write_text(json.dumps(ids))
    print(f"rank {rank}: {len(ids)} documents")
    dist.barrier()

    if rank == 0:
        all_ids = []
        for r in range(world):
            all_ids += json.loads((args.out / f"part{r:03d}.json").read_text())
        merged = np.concatenate([np.load(args.out / f"part{r:03d}.npy") for r in range(world)])
        np.save(args.out / "embeddings.npy", merged)
        (args.out / "ids.json").write_text(json.dumps(all_ids))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
