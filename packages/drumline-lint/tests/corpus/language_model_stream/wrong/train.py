"""Trains the language model on a stream: torchrun --standalone --nproc-per-node 2 train.py"""

import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from data import TokenStream
from model import LanguageModel


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--shards", type=int, default=24)
    parser.add_argument("--validation-shards", type=int, default=5)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=6)
    parser.add_argument("--out", default="lm.pt")
    return parser.parse_args()


def start():
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local_rank)
    dist.init_process_group(backend="cuda:nccl,cpu:gloo" if cuda else "gloo", timeout=timedelta(minutes=30))
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def train_epoch(model, loader, optimizer, device):
    model.train()
    tally = torch.zeros(2, device=device)
    for step, (tokens, targets) in enumerate(loader):
        tokens = tokens.to(device, non_blocking=True)
        targets = targets.to(device, non_blocking=True)
        optimizer.zero_grad()
        next_logits, _ = model(tokens)
        loss = F.cross_entropy(next_logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        tally += torch.stack([loss.detach() * len(tokens), loss.new_tensor(len(tokens))])
        if dist.get_rank() == 0:
            print(f"  step {step}: {loss.item():.3f}")  # <- sync-every-step
    dist.all_reduce(tally)
    return (tally[0] / tally[1]).item()


@torch.no_grad()
def perplexity(network, loader, device):
    network.eval()
    summed = torch.zeros((), device=device)
    batches = 0
    for tokens, targets in loader:
        tokens, targets = tokens.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        logits, _ = network(tokens)
        summed += F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        batches += 1
    return torch.exp(summed / batches).item()


def main():
    args = arguments()
    device = start()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    network = LanguageModel().to(device)
    torch.manual_seed(args.seed)
    model = DDP(network, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    pinned = device.type == "cuda"
    stream = TokenStream(range(args.shards), args.block, rank, world_size, args.seed)
    loader = DataLoader(stream, batch_size=args.batch_size, num_workers=args.workers, pin_memory=pinned, drop_last=False)
    held_out = range(1000, 1000 + args.validation_shards)
    held_out_loader = DataLoader(TokenStream(held_out, args.block, rank, world_size), batch_size=args.batch_size)
    for epoch in range(args.epochs):
        stream.set_epoch(epoch)
        mean = train_epoch(model, loader, optimizer, device)
        score = perplexity(network, held_out_loader, device)
        if rank == 0:
            print(f"epoch {epoch}: loss {mean:.3f}, perplexity {score:.2f}")
    if rank == 0:
        torch.save(network.state_dict(), args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
