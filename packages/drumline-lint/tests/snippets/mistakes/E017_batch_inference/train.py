"""Fine-tune the toxicity classifier for one pass, then label the unlabelled pool."""
import argparse
import json
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from writer import PredictionWriter


def read(path):
    with open(path) as f:
        return [json.loads(x) for x in f]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--train", required=True)
    ap.add_argument("--pool", required=True)
    ap.add_argument("--out-dir", required=True)
    args = ap.parse_args()

    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    os.makedirs(args.out_dir, exist_ok=True)

    tok = AutoTokenizer.from_pretrained("roberta-base")
    net = AutoModelForSequenceClassification.from_pretrained("roberta-base", num_labels=2).cuda()
    ddp = DDP(net, device_ids=[local])
    opt = torch.optim.AdamW(ddp.parameters(), 1e-5)

    def collate(rows):
        enc = tok([r["text"] for r in rows], padding=True, truncation=True,
                  max_length=256, return_tensors="pt")
        return rows, enc.to("cuda")

    train = read(args.train)
    sampler = DistributedSampler(train, shuffle=True, drop_last=True)
    sampler.set_epoch(0)
    for rows, enc in DataLoader(train, 16, sampler=sampler, collate_fn=collate):
        y = torch.tensor([r["label"] for r in rows], device="cuda")
        loss = ddp(**enc, labels=y).loss
        opt.zero_grad()
        loss.backward()
        opt.step()

    pool = read(args.pool)
    mine = Subset(pool, range(rank, len(pool), world))
    out = PredictionWriter(os.path.join(args.out_dir, "predictions.jsonl"))
    net.eval()
    with torch.no_grad():
        for rows, enc in DataLoader(mine, 64, collate_fn=collate):
            probs = net(**enc).logits.float().softmax(-1)
            for r, p in zip(rows, probs.tolist()):
                out.write(r["id"], int(p[1] > 0.5), p[1])
    out.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
