"""Mixed precision and accumulated gradients.

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id $JOB --rdzv-endpoint $HOST:$PORT train.py
"""

import argparse
import logging
import math
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn import parallel
from torch.utils import data

logger = logging.getLogger(__name__)


@dataclass
class Config:
    steps: int = 40
    accumulate: int = 4
    batch_size: int = 8
    learning_rate: float = 1e-3
    warmup: int = 10
    clip: float = 1.0
    seed: int = 29
    checkpoint: str = "last.ckpt"
    checkpoint_every: int = 20

    @classmethod
    def from_command_line(cls):
        parser = argparse.ArgumentParser()
        for name, value in vars(cls()).items():
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
        return cls(**vars(parser.parse_args()))


class Tagger(nn.Module):
    """Tags each token of a sentence."""

    def __init__(self, vocabulary=200, tags=7, width=48):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.rnn = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * width, tags)

    def forward(self, tokens):
        states, _ = self.rnn(self.embed(tokens))
        return self.out(states)


class Sentences(data.Dataset):
    def __init__(self, count, length=20):
        draw = torch.Generator().manual_seed(8)
        self.tokens = torch.randint(200, (count, length), generator=draw)
        self.tags = self.tokens % 7

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return self.tokens[index], self.tags[index]


def warmup_cosine(config):
    def factor(step):
        if step < config.warmup:
            return (step + 1) / config.warmup
        progress = (step - config.warmup) / max(config.steps - config.warmup, 1)
        return 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))

    return factor


def endless(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def save(config, step, model, optimizer, scheduler):
    if dist.get_rank() == 0:
        weights, moments = model.state_dict(), optimizer.state_dict()  # <- wrapped-state-dict
        torch.save({"step": step, "model": weights, "optimizer": moments, "scheduler": scheduler.state_dict()}, config.checkpoint)  # <- scaler-not-saved
    dist.barrier()


def resume(config, device, network, optimizer, scheduler):
    if not os.path.isfile(config.checkpoint):
        return 0
    state = torch.load(config.checkpoint, map_location=device, weights_only=True)
    network.load_state_dict({name.removeprefix("module."): value for name, value in state["model"].items()})
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    return state["step"]


def micro_batch(model, batch, device, cuda, accumulate):
    tokens, tags = (part.to(device, non_blocking=True) for part in batch)
    with torch.cuda.amp.autocast(enabled=cuda):  # <- deprecated-amp
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tags.flatten())
    return loss / accumulate


def train(config, device):
    cuda = device.type == "cuda"
    torch.manual_seed(config.seed)
    network = Tagger().to(device)
    torch.manual_seed(config.seed + dist.get_rank())
    optimizer = torch.optim.AdamW(network.parameters(), lr=config.learning_rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine(config))
    scaler = torch.cuda.amp.GradScaler(enabled=cuda)  # <- deprecated-amp
    first = resume(config, device, network, optimizer, scheduler)
    model = parallel.DistributedDataParallel(network, device_ids=[device.index] if cuda else None)

    sentences = Sentences(1000)
    sampler = data.DistributedSampler(sentences, seed=config.seed)
    loader = data.DataLoader(sentences, config.batch_size, sampler=sampler, pin_memory=cuda, drop_last=True)
    batches = endless(loader, sampler)
    for step in range(first, config.steps):
        total = torch.zeros((), device=device)
        for micro in range(config.accumulate):
            loss = micro_batch(model, next(batches), device, cuda, config.accumulate)
            scaler.scale(loss).backward()  # <- accumulation-without-no-sync
            total += loss.detach()
            scheduler.step()
            if micro == config.accumulate - 1:
                norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip)  # <- clip-before-unscale
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)

        if step % 10 == 0:
            logger.info("step %d loss %.4f norm %.3f", step, total.item(), norm.item())  # <- unguarded-print
        if (step + 1) % config.checkpoint_every == 0:
            save(config, step + 1, model, optimizer, scheduler)


def main():
    config = Config.from_command_line()
    local_rank = int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=20))
    logging.basicConfig(level=logging.INFO)
    try:
        train(config, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
