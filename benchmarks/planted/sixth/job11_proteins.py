"""A plain DDP script: proteins, with metrics for each family that are means over the ranks."""

import torch
import torch.distributed as dist
from parts import FAMILIES, PLANTED, STEPS, ProteinNet, batches, finish, now, proteins, start
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

Metrics = dict[str, Tensor]


def metrics_of(scores: Tensor, families: Tensor) -> Metrics:
    """How sure the network is, and how often it is right, by family."""
    chances = scores.detach().softmax(1)
    right = (chances.argmax(1) == families).float()
    metrics = {}
    for family in range(FAMILIES):
        members = (families == family).float()
        metrics[f"count/{family}"] = members.sum()
        metrics[f"right/{family}"] = (right * members).mean()
        metrics[f"sure/{family}"] = chances[:, family].mean()
        metrics[f"most/{family}"] = chances[:, family].max()
    return metrics


def mean_over_ranks(metrics: Metrics) -> Metrics:
    if PLANTED:
        for value in metrics.values():
            dist.barrier()  # planted
            dist.all_reduce(value)  # planted: for each of 40 metrics
            value /= dist.get_world_size()
        return metrics
    together = torch.stack(list(metrics.values()))
    dist.all_reduce(together)
    return dict(zip(metrics, together / dist.get_world_size(), strict=True))


def main() -> None:
    device = start()
    loader = batches(proteins(4096), 12)
    model = DistributedDataParallel(ProteinNet(width=48, depth=1).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
    begin = now()
    for step, (letters, families) in zip(range(STEPS), loader, strict=False):
        families = families.to(device)
        scores = model(letters.to(device))
        loss = functional.cross_entropy(scores, families)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        metrics = metrics_of(scores, families)

        # The mean over all ranks; rank 0 prints some of it.
        metrics = mean_over_ranks(metrics)  # planted
        if step % 50 == 49 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}, sure {metrics['sure/0'].item():.3f}")
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
