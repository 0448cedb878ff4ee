"""A plain DDP script: loans, with a histogram of each gradient that nobody looks at any more."""

from collections import deque
from collections.abc import Callable

import numpy
import torch
from parts import PLANTED, STEPS, LoanNet, batches, finish, loans, now, start
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

KEPT = 100


class Watch:
    """Histograms of the latest gradients of each parameter."""

    def __init__(self, network: nn.Module) -> None:
        self.kept: dict[str, deque[numpy.ndarray]] = {}
        for name, parameter in network.named_parameters():
            self.kept[name] = deque(maxlen=KEPT)
            if PLANTED:
                parameter.register_hook(self.keeper(name))  # planted: in every backward pass

    def keeper(self, name: str) -> Callable[[Tensor], None]:
        def keep(gradient: Tensor) -> None:
            sizes = numpy.log10(numpy.abs(gradient.cpu().numpy()) + 1e-12)  # planted
            edges = numpy.percentile(sizes, [1, 99])  # planted
            counts, _ = numpy.histogram(sizes, bins=64, range=tuple(edges))  # planted
            self.kept[name].append(counts)

        return keep


def main() -> None:
    device = start()
    network = LoanNet().to(device)
    watch = Watch(network)
    model = DistributedDataParallel(network)

    # The loop knows nothing of the histograms.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = batches(loans(65_536), 384)
    begin = now()
    for _, (numbers, choices, paid) in zip(range(STEPS), loader, strict=False):
        scores = model(numbers.to(device), choices.to(device))
        loss = functional.binary_cross_entropy_with_logits(scores, paid.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    finish(STEPS, now() - begin)
    assert len(watch.kept) > 1


if __name__ == "__main__":
    main()
