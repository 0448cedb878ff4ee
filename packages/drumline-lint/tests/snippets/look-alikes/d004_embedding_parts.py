"""Embed a corpus with all GPUs; each process writes its own parts."""
import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Subset
from transformers import AutoModel, AutoTokenizer

from corpus.reader import Paragraphs

MODEL = "/models/e5-large"
PART = 500_000


@torch.inference_mode()
def embed(net, tok, texts, device):
    enc = tok(texts, padding=True, truncation=True, max_length=512, return_tensors="pt").to(device)
    h = net(**enc).last_hidden_state
    m = enc["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((h * m).sum(1) / m.sum(1), dim=-1).half().cpu()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--corpus", required=True)
    ap.add_argument("--out", type=Path, required=True)
    args = ap.parse_args()

    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)

    tok = AutoTokenizer.from_pretrained(MODEL)
    net = AutoModel.from_pretrained(MODEL, torch_dtype=torch.float16).to(device).eval()
    paragraphs = Paragraphs(args.corpus)
    mine = Subset(paragraphs, range(rank, len(paragraphs), world))
    loader = DataLoader(mine, batch_size=256, num_workers=4)

    folder = args.out / f"shard-{rank:03d}-of-{world:03d}"
    folder.mkdir(parents=True, exist_ok=True)
    ids, vecs, part, held = [], [], 0, 0
    for batch_ids, texts in loader:
        vecs.append(embed(net, tok, list(texts), device))
        ids.extend(batch_ids)
        held += len(texts)
        if held >= PART:
            torch.save({"ids": ids, "vec": torch.cat(vecs)}, folder / f"part-{part:04d}.pt")
            ids, vecs, part, held = [], [], part + 1, 0
    if held:
        torch.save({"ids": ids, "vec": torch.cat(vecs)}, folder / f"part-{part:04d}.pt")
    (folder / "DONE").touch()
    print(f"rank {rank}: {len(mine)} paragraphs", flush=True)

    dist.barrier()
    if rank == 0:
        done = len(list(args.out.glob("shard-*/DONE")))
        assert done == world, f"{done} of {world} shards"
        (args.out / "_SUCCESS").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
