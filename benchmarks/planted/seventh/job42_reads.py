"""A plain DDP script: reads of DNA of unequal length, of which each base is corrected."""

import torch
from parts import ON_GPU, STEPS, finish, start
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

BATCH = 192 if ON_GPU else 6
LENGTH = 400 if ON_GPU else 40
WIDTH = 128 if ON_GPU else 16
BASES = 4


class ReadNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bases = nn.Embedding(BASES + 1, WIDTH)
        self.layers = nn.ModuleList(
            nn.Conv1d(WIDTH, WIDTH, 5, padding=2 * spread, dilation=spread)
            for spread in (1, 2, 4, 8, 4, 1)
        )
        self.scores = nn.Linear(WIDTH, BASES)

    def forward(self, reads: Tensor) -> Tensor:
        values = self.bases(reads).transpose(1, 2)
        for layer in self.layers:
            values = values + functional.relu(layer(values))
        return self.scores(values.transpose(1, 2))


def loss_of_reads(scores: Tensor, truth: Tensor, known: Tensor) -> Tensor:
    """Each read counts the same, however long it is."""
    losses = []
    for guesses, bases, here in zip(scores, truth, known, strict=True):
        loss = functional.cross_entropy(guesses[here], bases[here])  # planted
        losses.append(loss)
    return torch.stack(losses).mean()


def main() -> None:
    device = start()
    model = DistributedDataParallel(ReadNet().to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
    all_truth = torch.randint(BASES, (16 * BATCH, LENGTH), device=device)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (16 * BATCH, 1), device=device)
    all_known = torch.arange(LENGTH, device=device) < lengths
    all_reads = torch.where(all_known, all_truth, BASES)

    for step in range(STEPS):
        chosen = torch.randint(len(all_reads), (BATCH,), device=device)
        scores = model(all_reads[chosen])

        # What is behind the end of a read does not count.

        loss = loss_of_reads(scores, all_truth[chosen], all_known[chosen])  # planted

        # Long reads count as much as short ones,
        # since each has a mean of its own.
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    finish()


if __name__ == "__main__":
    main()
