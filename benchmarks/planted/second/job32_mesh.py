"""A plain DDP script for a GPU: a mesh, with messages that go round node after node."""

import torch
from parts import ON_GPU, PLANTED, STEPS, MeshNet, batches, finish, meshes, now, start
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

NODES = 256 if ON_GPU else 64
WIDTH = 512 if ON_GPU else 32
BATCH = 32 if ON_GPU else 8


class CircleNet(MeshNet):
    def passed_on(self, values: Tensor) -> Tensor:
        messages = []
        for node in range(NODES):
            left, right = values[:, node - 1], values[:, (node + 1) % NODES]
            messages.append(torch.tanh(0.5 * (left + right)))  # planted: one node at a time
        return torch.stack(messages, dim=1)

    def messages(self, values: Tensor) -> Tensor:
        if PLANTED:
            return self.passed_on(values)  # planted
        return torch.tanh(0.5 * (values.roll(1, dims=1) + values.roll(-1, dims=1)))


def main() -> None:
    device = start()
    model = DistributedDataParallel(CircleNet(width=WIDTH, nodes=NODES).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = meshes(2 * BATCH * STEPS, nodes=NODES)
    begin = now()
    for values, classes in batches(data, BATCH, pin_memory=ON_GPU):
        scores = model(values.to(device, non_blocking=True))
        targets = classes.to(device, non_blocking=True).flatten()
        loss = functional.cross_entropy(scores.flatten(0, 1), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
