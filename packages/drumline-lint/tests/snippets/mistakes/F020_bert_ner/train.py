import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoModelForTokenClassification, get_linear_schedule_with_warmup


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--train", required=True)
    parser.add_argument("--out", default="ner_model")
    parser.add_argument("--model", default="bert-base-cased")
    parser.add_argument("--num_labels", type=int, default=9)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--local_rank", type=int, default=0)
    return parser.parse_args()


def main():
    args = parse_args()
    dist.init_process_group(backend="nccl")
    torch.cuda.set_device(args.local_rank)
    device = torch.device("cuda", args.local_rank)

    blob = torch.load(args.train, map_location="cpu")
    dataset = TensorDataset(blob["input_ids"], blob["attention_mask"], blob["labels"])
    sampler = DistributedSampler(dataset, shuffle=True, seed=42)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)

    model = AutoModelForTokenClassification.from_pretrained(args.model, num_labels=args.num_labels)
    model = DistributedDataParallel(model.to(device), device_ids=[args.local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    total = args.epochs * len(loader)
    scheduler = get_linear_schedule_with_warmup(optimizer, total // 10, total)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for step, (ids, mask, labels) in enumerate(loader):
            out = model(input_ids=ids.to(device), attention_mask=mask.to(device), labels=labels.to(device))
            optimizer.zero_grad()
            out.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            if dist.get_rank() == 0 and step % 50 == 0:
                print(f"epoch {epoch} step {step}/{len(loader)} loss {out.loss.item():.4f}", flush=True)

    if dist.get_rank() == 0:
        model.module.save_pretrained(args.out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
