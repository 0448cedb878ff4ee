import json
import os
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from sentence_transformers import SentenceTransformer

OUT = "/shared/emb"


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", timeout=timedelta(hours=6))
    rank, world = dist.get_rank(), dist.get_world_size()
    os.makedirs(OUT, exist_ok=True)

    with open("/shared/wiki/passages.jsonl") as fh:
        rows = [json.loads(line) for k, line in enumerate(fh) if k % world == rank]
    model = SentenceTransformer("/models/gte-base", device=f"cuda:{local_rank}")
    vecs = model.encode([r["text"] for r in rows], batch_size=256, show_progress_bar=False,
                        normalize_embeddings=True)
    np.save(f"{OUT}/part{rank:03d}.npy", vecs.astype(np.float16))
    with open(f"{OUT}/part{rank:03d}.ids", "w") as fh:
        fh.writelines(f"{r['id']}\n" for r in rows)

    dist.barrier()
    if rank == 0:
        parts = [np.load(f"{OUT}/part{r:03d}.npy") for r in range(world)]
        np.save(f"{OUT}/all.npy", np.concatenate(parts))
        with open(f"{OUT}/all.ids", "w") as out:
            for r in range(world):
                with open(f"{OUT}/part{r:03d}.ids") as fh:
                    out.write(fh.read())
        print("passages:", sum(len(p) for p in parts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
