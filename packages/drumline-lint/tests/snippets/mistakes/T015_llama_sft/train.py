import argparse

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from checkpoint import save_model
from data import PackedDataset
from model import build_model


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--base", default="meta-llama/Llama-2-7b-hf")
    ap.add_argument("--data", default="/fsx/sft/packed.npy")
    ap.add_argument("--out", default="/fsx/sft/out")
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--save_every", type=int, default=500)
    args = ap.parse_args()

    dist.init_process_group("nccl")
    local_rank = dist.get_rank() % torch.cuda.device_count()
    torch.cuda.set_device(local_rank)

    model = build_model(args.base, local_rank)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-5, betas=(0.9, 0.95))
    ds = PackedDataset(args.data)
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, batch_size=2, sampler=sampler, num_workers=2)

    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for ids in loader:
            ids = ids.to(local_rank)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            model.clip_grad_norm_(1.0)
            opt.step()
            opt.zero_grad(set_to_none=True)
            step += 1
            if dist.get_rank() == 0 and step % 10 == 0:
                print(f"step {step} loss {loss.item():.4f}", flush=True)
            if step % args.save_every == 0:
                save_model(model, f"{args.out}/step{step}.pt")
    save_model(model, f"{args.out}/final.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
