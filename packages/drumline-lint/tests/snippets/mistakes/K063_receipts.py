import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import BertForTokenClassification


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--features", default="/data/sroie/train.pt")
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--epochs", type=int, default=12)
    ap.add_argument("--lr", type=float, default=5e-5)
    ap.add_argument("--labels", type=int, default=9)
    ap.add_argument("--out", default="bert_sroie")
    return ap.parse_args()


def main():
    args = parse()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")

    d = torch.load(args.features, map_location="cpu")
    ds = TensorDataset(d["ids"], d["mask"], d["tags"])
    sampler = DistributedSampler(ds)
    loader = DataLoader(
        ds,
        batch_size=args.batch,
        shuffle=True,
        sampler=sampler,
        num_workers=4,
        drop_last=True,
    )

    model = BertForTokenClassification.from_pretrained(
        "bert-base-uncased", num_labels=args.labels).cuda()
    model = DistributedDataParallel(model, device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for batch in loader:
            ids, mask, tags = (t.cuda(non_blocking=True) for t in batch)
            loss = model(input_ids=ids, attention_mask=mask, labels=tags).loss
            opt.zero_grad()
            loss.backward()
            opt.step()
    if dist.get_rank() == 0:
        model.module.save_pretrained(args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
