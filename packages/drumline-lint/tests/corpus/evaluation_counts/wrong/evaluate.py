"""How good a saved model is, over all ranks: torchrun --standalone --nproc-per-node 4 evaluate.py --weights model.pt"""

import argparse
import json
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CLASSES = ("bass", "snare", "tenor", "cymbal")


class Hits(Dataset):
    """Short sounds of four instruments: a decaying tone each."""

    def __init__(self, count, length=64):
        self.count = count
        self.time = torch.arange(length) / length

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        label = int(torch.randint(len(CLASSES), (), generator=draw))
        tone = torch.sin(self.time * (4 + 9 * label)) * torch.exp(-self.time * (1 + label))
        return tone + 0.3 * torch.randn(len(self.time), generator=draw), label


class Listener(nn.Module):
    def __init__(self, length=64, width=64):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(length, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, len(CLASSES))
        )

    def forward(self, sounds):
        return self.layers(sounds)


class Counts:
    """Sums that can be added over batches, then over ranks, and divided at the very end."""

    def __init__(self, device):
        self.confusion = torch.zeros(len(CLASSES), len(CLASSES), device=device)
        self.loss = torch.zeros(2, device=device)

    def add(self, logits, labels):
        size = len(CLASSES)
        cells = labels * size + logits.argmax(dim=1)
        self.confusion += torch.bincount(cells, minlength=size * size).view(size, size)
        self.loss[0] += nn.functional.cross_entropy(logits, labels, reduction="sum")
        self.loss[1] += labels.numel()

    def add_other_ranks(self):
        if dist.get_rank() == 0:
            dist.all_reduce(self.confusion)  # <- collective-on-some-ranks
            dist.all_reduce(self.loss)  # <- collective-on-some-ranks

    def summary(self):
        right = self.confusion.diagonal()
        return {
            "samples": int(self.loss[1].item()),
            "loss": (self.loss[0] / self.loss[1]).item(),
            "accuracy": (right.sum() / self.confusion.sum()).item(),
            "recall": dict(zip(CLASSES, (right / self.confusion.sum(dim=1).clamp(min=1)).tolist())),
        }


def setup():
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl", timeout=timedelta(minutes=5))
        return torch.device("cuda", local_rank)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    return torch.device("cpu")


def load_model(path, device):
    torch.manual_seed(0)
    model = Listener().to(device)
    if path is not None:
        model.load_state_dict(torch.load(path, weights_only=True))  # <- load-without-map-location
    return model.eval()


@torch.inference_mode()
def evaluate(model, loader, device):
    counts = Counts(device)
    for sounds, labels in loader:
        sounds = sounds.to(device, non_blocking=True)
        labels = labels.to(device)  # <- blocking-copy
        counts.add(model(sounds), labels)
    counts.add_other_ranks()
    return counts.summary()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--samples", type=int, default=1003)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--report", type=Path)
    args = parser.parse_args()

    device = setup()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = load_model(args.weights, device)
    dataset = Hits(args.samples)
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=False)  # <- metric-over-padding
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, pin_memory=True)
    summary = evaluate(model, loader, device)
    if rank == 0:
        text = json.dumps(summary, indent=2)
        if args.report is not None:
            args.report.write_text(text)
    print(summary["accuracy"])  # <- unguarded-print
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
