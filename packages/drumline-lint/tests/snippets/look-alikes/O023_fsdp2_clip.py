import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lm.blocks import Transformer
from lm.data import packed_loader


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    mesh = init_device_mesh("cuda", (world,))
    torch.manual_seed(11)
    model = Transformer(vocab=32000, dim=1024, layers=16).cuda()
    mp_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=mp_policy)
    fully_shard(model, mesh=mesh, mp_policy=mp_policy)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4)

    loader = packed_loader("/data/packed", batch_size=8, rank=rank, world_size=world)
    for step, (x, y) in zip(range(50_000), loader):
        logits = model(x.cuda(non_blocking=True))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.cuda().flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        if step % 100 == 0:
            avg = loss.detach().clone()
            dist.all_reduce(avg)
            if rank == 0:
                print(step, (avg / world).item(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
