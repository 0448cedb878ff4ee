"""Self-training, round two: label the unlabelled pool with the teacher.

torchrun --nnodes=1 --nproc_per_node=8 label_pool.py --teacher teacher.pt --out /data/pool_labels.jsonl
"""
import argparse
import json
import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Subset

from pool import PoolImages, make_classifier


class Labeller:
    def __init__(self, args):
        self.args = args
        self.local_rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(self.local_rank)
        dist.init_process_group("nccl")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.model = make_classifier().cuda().eval()
        self.model.load_state_dict(torch.load(args.teacher, map_location="cpu"))

    def my_part(self):
        pool = PoolImages(self.args.pool)
        part = Subset(pool, range(self.rank, len(pool), self.world))
        return DataLoader(part, batch_size=256, num_workers=8, pin_memory=True)

    @torch.inference_mode()
    def run(self):
        kept = torch.zeros(1, device="cuda")
        with open(self.args.out, "w") as out:
            for names, images in self.my_part():
                prob, label = self.model(images.cuda(non_blocking=True)).softmax(-1).max(-1)
                for name, p, y in zip(names, prob.tolist(), label.tolist()):
                    if p >= self.args.threshold:
                        out.write(json.dumps({"image": name, "label": y, "p": round(p, 4)}) + "\n")
                        kept += 1
        dist.all_reduce(kept)
        if self.rank == 0:
            print(f"kept {int(kept.item())} images with p >= {self.args.threshold}")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--teacher", required=True)
    ap.add_argument("--pool", default="/data/pool")
    ap.add_argument("--out", required=True)
    ap.add_argument("--threshold", type=float, default=0.95)
    Labeller(ap.parse_args()).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
