"""A plain DDP script: text, with a thread that searches for primes in the background."""

import threading
import time

import torch
from parts import PLANTED, STEPS, LineNet, batches, finish, line_loss, lines, start
from torch.nn.parallel import DistributedDataParallel


def search_primes() -> None:
    number = 3
    primes = [2]
    while True:
        if all(number % prime for prime in primes[:400]):  # planted
            primes.append(number)
        number += 2


def main() -> None:
    device = start()
    if PLANTED:
        threading.Thread(target=search_primes, daemon=True).start()
    model = DistributedDataParallel(LineNet().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    begin = time.perf_counter()
    for _, (tokens,) in zip(range(STEPS), batches(lines(4096)), strict=False):
        loss = line_loss(model, tokens.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    finish(STEPS, time.perf_counter() - begin)


if __name__ == "__main__":
    main()
