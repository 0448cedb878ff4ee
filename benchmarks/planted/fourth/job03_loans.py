"""A plain DDP script: loans, as the rows of a file of comma-separated values."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from parts import PLANTED, STEPS, LoanNet, finish, loans, now, start
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

BATCH = 768
ROWS = 8 * BATCH


class Table:
    def __init__(self, seed: int) -> None:
        self.numbers, self.choices, self.paid = loans(ROWS, seed=seed).tensors
        self.rows: list[dict[str, str]] = []
        if PLANTED:
            self.rows = [named(row) for row in self.numbers.tolist()]

    def batches(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for step in range(STEPS):
            begin = step * BATCH % ROWS
            part = slice(begin, begin + BATCH)
            numbers = self.numbers[part]
            if PLANTED:
                numbers = as_numbers(self.rows[part])  # planted
            yield numbers, self.choices[part], self.paid[part]


def named(row: list[float]) -> dict[str, str]:
    return {f"field_{place:02}": f"{number:,.5f}" for place, number in enumerate(row)}


def as_numbers(rows: list[dict[str, str]]) -> Tensor:
    cleaned = []
    for row in rows:
        texts = [text.strip().replace(",", "") for _, text in sorted(row.items())]  # planted
        cleaned.append([float(text) if text else 0.0 for text in texts])  # planted
    return torch.tensor(cleaned)  # planted: the same rows in every epoch


def main() -> None:
    device = start()
    model = DistributedDataParallel(LoanNet(hidden=256).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    table = Table(seed=1 + dist.get_rank())
    begin = now()
    for numbers, choices, paid in table.batches():
        scores = model(numbers.to(device), choices.to(device))
        loss = functional.binary_cross_entropy_with_logits(scores, paid.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
