import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from qa.data import Questions
from qa.model import Reader

OUT = Path("/shared/preds")


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    OUT.mkdir(parents=True, exist_ok=True)

    model = Reader.from_pretrained("/models/reader").cuda().eval()
    questions = Questions("/data/nq/dev.jsonl")
    preds = []
    with torch.inference_mode():
        for i in range(rank, len(questions), world):
            q = questions[i]
            preds.append({"id": q["id"], "answer": model.answer(q)})

    with open(OUT / f"part-{rank:03d}.json", "w") as f:
        json.dump(preds, f)
    torch.save(torch.tensor([len(preds)]), OUT / f"count-{rank}.pt")
    dist.barrier()

    if rank == 0:
        merged = []
        for r in range(world):
            merged += json.loads((OUT / f"part-{r:03d}.json").read_text())
        merged.sort(key=lambda p: p["id"])
        (OUT / "predictions.json").write_text(json.dumps(merged))
        print(f"{len(merged)} predictions")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
