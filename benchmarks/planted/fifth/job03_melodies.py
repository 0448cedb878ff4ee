"""A plain DDP script: melodies, with layers that remember earlier notes less and less."""

import torch
import torch.distributed as dist
from parts import NOTES, PITCHES, PLANTED, STEPS, batches, finish, melodies, now, start
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

WIDTH = 32
DEPTH = 4


class Decay(nn.Module):
    """An exponential average over the notes before, with a rate for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.linspace(-2, 3, WIDTH))
        self.mixed = nn.Linear(WIDTH, WIDTH)
        ages = torch.arange(NOTES)[:, None] - torch.arange(NOTES)[None]
        self.register_buffer("ages", ages.clamp(min=0)[..., None].float())
        self.register_buffer("past", (ages >= 0)[..., None].float())

    def forward(self, notes: Tensor) -> Tensor:
        kept = torch.sigmoid(self.rate)
        average = self.by_note(notes, kept) if PLANTED else self.at_once(notes, kept)
        return notes + functional.gelu(self.mixed(average))

    def by_note(self, notes: Tensor, kept: Tensor) -> Tensor:
        average = torch.zeros_like(notes[:, 0])
        averages = []
        for place in range(notes.shape[1]):
            average = kept * average + (1 - kept) * notes[:, place]  # planted: note after note
            averages.append(average)
        return torch.stack(averages, dim=1)

    def at_once(self, notes: Tensor, kept: Tensor) -> Tensor:
        shares = (1 - kept) * torch.exp(self.ages * kept.log()) * self.past
        return torch.bmm(shares.permute(2, 0, 1), notes.permute(2, 1, 0)).permute(2, 1, 0)


class Memory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pitches = nn.Embedding(PITCHES, WIDTH)
        self.layers = nn.Sequential(*(Decay() for _ in range(DEPTH)))
        self.head = nn.Linear(WIDTH, PITCHES)

    def forward(self, pitches: Tensor) -> Tensor:
        return self.head(self.layers(self.pitches(pitches)))


def main() -> None:
    device = start()
    model = DistributedDataParallel(Memory().to(device), broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
    begin = now()
    for step, (pitches,) in zip(range(STEPS), batches(melodies(4096), 8), strict=False):
        scores = model(pitches[:, :-1].to(device))
        loss = functional.cross_entropy(scores.flatten(0, 1), pitches[:, 1:].flatten().to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
