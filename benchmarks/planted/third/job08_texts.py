"""A plain DDP script: a small GPT, with a search for texts that are nearly the same."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from parts import PLANTED, STEPS, GptNet, batches, finish, now, start, text_loss, texts
from torch.nn.parallel import DistributedDataParallel

PRIME = 2_147_483_647
HASHES = [(7919 * number + 1, 104_729 * number) for number in range(1, 257)]


def signatures(texts_of_step: list[list[int]]) -> list[int]:
    """For each text the smallest values of many hash functions."""
    result = []
    for text in texts_of_step:
        for factor, shift in HASHES:
            smallest = min((factor * token + shift) % PRIME for token in text)  # planted
            result.append(smallest)
    return result


class Duplicates:
    """Computes signatures beside the training."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(max_workers=1)
        self.pending: Future[Any] | None = None

    def add(self, tokens: Any) -> None:
        if self.pending is None or self.pending.done():
            self.pending = self.pool.submit(signatures, tokens.tolist())  # planted


def main() -> None:
    device = start()
    model = DistributedDataParallel(GptNet().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    duplicates = Duplicates()
    loader = batches(texts(4096), 16)
    begin = now()
    for _, (tokens,) in zip(range(STEPS), loader, strict=False):
        if PLANTED:
            duplicates.add(tokens)  # planted
        tokens = tokens.to(device)
        inputs = tokens[:, :-1]
        # One forward pass, one backward pass.
        loss = text_loss(model(inputs), tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    finish(STEPS, now() - begin)
    duplicates.pool.shutdown(wait=False, cancel_futures=True)


if __name__ == "__main__":
    main()
