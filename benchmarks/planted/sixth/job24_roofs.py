"""A plain DDP script: roofs in small bytes, with clipped gradients, without a bottleneck."""

import torch
import torch.distributed as dist
from parts import STEPS, RoofNet, batches, finish, now, roofs, start
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset


def main() -> None:
    device = start()
    pictures, kinds = roofs(6144).tensors
    data = TensorDataset((255 * pictures).byte(), kinds)
    model = DistributedDataParallel(RoofNet(depth=2).to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    begin = now()
    for step, (some, their_kinds) in zip(range(STEPS), batches(data, 40), strict=False):
        scores = model(some.to(device).float() / 255)
        loss = functional.cross_entropy(scores, their_kinds.to(device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        if step % 25 == 24 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
