"""Clusters points with numpy alone; `rank` and `world` are words of the subject here."""

import argparse
import json
from pathlib import Path

import numpy as np


def rank_by_size(labels, count):
    """The place of each cluster in the order of sizes, the largest first."""
    sizes = np.bincount(labels, minlength=count)
    order = np.argsort(-sizes, kind="stable")
    rank = np.empty(count, dtype=int)
    rank[order] = np.arange(count)
    return rank


def start(points, count, draw):
    """Far from each other, by chance."""
    centres = [points[draw.integers(len(points))]]
    for _ in range(count - 1):
        distance = np.min([((points - centre) ** 2).sum(1) for centre in centres], axis=0)
        centres.append(points[draw.choice(len(points), p=distance / distance.sum())])
    return np.array(centres)


def assign(points, centres):
    return ((points[:, None] - centres[None]) ** 2).sum(-1).argmin(1)


def reduce_means(points, labels, centres):
    means = centres.copy()
    for number in range(len(centres)):
        mine = points[labels == number]
        if len(mine) == 0:
            continue
        means[number] = mine.mean(0)
    return means


def barrier(points, centres, limit=1e-6):
    """Whether the energy is low enough to pass."""
    return ((points - centres) ** 2).sum() < limit


def kmeans(points, count, rounds, seed):
    draw = np.random.default_rng(seed)
    centres = start(points, count, draw)
    for round_number in range(rounds):
        labels = assign(points, centres)
        moved = reduce_means(points, labels, centres)
        shift = float(np.abs(moved - centres).max())
        loss = ((points - moved[labels]) ** 2).mean()
        print(f"round {round_number}: loss {loss.item():.5f}, moved {shift:.5f}")
        if barrier(moved, centres):
            break
        centres = moved
    return centres, labels


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--points", type=int, default=3000)
    parser.add_argument("--clusters", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("clusters.json"))
    args = parser.parse_args()
    draw = np.random.default_rng(args.seed)
    true_centres = draw.uniform(-5, 5, (args.clusters, 2))
    points = true_centres[draw.integers(args.clusters, size=args.points)] + draw.normal(0, 0.4, (args.points, 2))
    centres, labels = kmeans(points, args.clusters, args.rounds, args.seed)
    for rank, centre in zip(rank_by_size(labels, args.clusters), centres):
        if rank == 0:
            print("the largest is at", centre)
    np.save("centres.npy", centres)
    args.out.write_text(json.dumps(centres.tolist()))


if __name__ == "__main__":
    main()
