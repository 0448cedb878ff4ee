"""Makes token files of texts, with as many processes as there are cores. Nothing is trained here."""

import argparse
import hashlib
import logging
import multiprocessing as mp
import os
import random
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import numpy as np
import torch

log = logging.getLogger("prepare")


def start_worker(level):
    logging.basicConfig(level=level, format="%(processName)s %(message)s")
    random.seed(os.getpid())
    torch.set_num_threads(1)


def tokenize(text):
    return [int.from_bytes(hashlib.blake2s(word.encode(), digest_size=2).digest(), "big") for word in text.split()]


def convert(path, out, validation_share):
    """One text file becomes one file of tokens."""
    tokens = tokenize(path.read_text(errors="replace"))
    if not tokens:
        print(f"{path} is empty")
        return path, 0, "none"
    part = "val" if random.random() < validation_share else "train"
    target = out / part / f"{path.stem}.pt"
    torch.save(torch.tensor(tokens, dtype=torch.int32), target)
    print(f"{path.name}: {len(tokens)} tokens")
    return path, len(tokens), part


def check(folder):
    total = 0
    for file in sorted(folder.glob("*.pt")):
        tokens = torch.load(file)
        assert tokens.dtype == torch.int32
        total += tokens.numel()
        print(file.name, tokens.float().mean().item())
    return total


def count_lines(queue, results):
    while (path := queue.get()) is not None:
        with open(path, errors="replace") as lines:
            results.put((path, sum(1 for _ in lines)))


def lines_of_all(paths, processes):
    queue, results = mp.Queue(), mp.Queue()
    workers = [mp.Process(target=count_lines, args=(queue, results)) for _ in range(processes)]
    for worker in workers:
        worker.start()
    for path in [*paths, *[None] * processes]:
        queue.put(path)
    found = dict(results.get() for _ in paths)
    for worker in workers:
        worker.join()
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("texts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--validation-share", type=float, default=0.01)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    for part in ("train", "val"):
        (args.out / part).mkdir(parents=True, exist_ok=True)
    paths = sorted(args.texts.glob("**/*.txt"))
    log.info("%d files, %d lines", len(paths), sum(lines_of_all(paths, args.processes).values()))
    sums = {"train": 0, "val": 0, "none": 0}
    with ProcessPoolExecutor(args.processes, initializer=start_worker, initargs=(logging.INFO,)) as pool:
        jobs = [pool.submit(convert, path, args.out, args.validation_share) for path in paths]
        for job in as_completed(jobs):
            path, count, part = job.result()
            sums[part] += count
            log.info("%s is done", path)
    np.save(args.out / "sums.npy", np.array([sums["train"], sums["val"]]))
    print(sums, check(args.out / "train"))


if __name__ == "__main__":
    main()
