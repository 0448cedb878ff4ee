"""A plain DDP script: adverts, with metrics that go to a tracking server."""

import requests
import torch
import torch.distributed as dist
from parts import PLANTED, STEPS, AdvertNet, adverts, batches, far_server, finish, now, start
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

EVERY = 1 if PLANTED else 1000


class Tracker:
    """A client of the server that keeps the curves of all runs."""

    def __init__(self) -> None:
        self.session = requests.Session()
        self.session.trust_env = False
        self.address = f"http://127.0.0.1:{far_server()}/runs/1/metrics"

    def log(self, step: int, **metrics: float) -> None:
        for name, value in metrics.items():
            entry = {"key": name, "value": value, "step": step}
            self.session.post(self.address, json=entry, timeout=10)  # planted: one by one


def main() -> None:
    device = start()
    tracker = Tracker() if dist.get_rank() == 0 else None
    loader = batches(adverts(65_536), 256)
    model = DistributedDataParallel(AdvertNet().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    begin = now()
    for step, (people, shown, numbers, clicked) in zip(range(STEPS), loader, strict=False):
        scores = model(people.to(device), shown.to(device), numbers.to(device))
        loss = functional.binary_cross_entropy_with_logits(scores, clicked.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        if tracker is None or step % EVERY:
            continue
        mean = scores.detach().mean()
        tracker.log(step, loss=loss.item(), score=mean.item())  # planted
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
