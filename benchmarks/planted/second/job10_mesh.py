"""A plain DDP script: a mesh, with the memory of all tensors after every step."""

import gc

import torch
from parts import PLANTED, STEPS, MeshNet, batches, finish, meshes, now, start
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


def bytes_of_tensors() -> int:
    tensors = (thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor))  # planted
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def main() -> None:
    device = start()
    model = DistributedDataParallel(MeshNet().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    largest = 0
    begin = now()
    for _, (values, classes) in zip(range(STEPS), batches(meshes(4096), 32), strict=False):
        scores = model(values.to(device))
        loss = functional.cross_entropy(scores.flatten(0, 1), classes.to(device).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if PLANTED:
            largest = max(largest, bytes_of_tensors())  # planted
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
