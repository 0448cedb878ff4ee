import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
import yaml
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from codelm.data import PackedCode
from codelm.model import CodeLM, Config


def parallelize(model, mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def main():
    with open(sys.argv[1]) as f:
        cfg = yaml.safe_load(f)
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("dp",))
    torch.manual_seed(cfg["seed"])

    with torch.device("meta"):
        model = CodeLM(Config(**cfg["model"]))
    parallelize(model, mesh)
    model.to_empty(device=device)
    model.init_weights()
    opt = torch.optim.AdamW(model.parameters(), lr=cfg["lr"], betas=(0.9, 0.95), fused=True)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, cfg["steps"])
    batches = PackedCode(cfg["data"], cfg["micro_batch"], cfg["seq_len"], rank=rank, world_size=world)

    for step, (x, y) in zip(range(1, cfg["steps"] + 1), batches):
        logits = model(x.to(device, non_blocking=True))
        loss = F.cross_entropy(logits.flatten(0, 1).float(), y.to(device, non_blocking=True).flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        opt.zero_grad(set_to_none=True)
        if step % 50 == 0:
            total = norm.full_tensor() if isinstance(norm, DTensor) else norm
            mean = loss.detach().clone()
            dist.all_reduce(mean, op=dist.ReduceOp.AVG)
            if rank == 0:
                print(f"{step} loss {mean.item():.4f} grad norm {total.item():.3f}", flush=True)
        if step % cfg["save_every"] == 0:
            model_sd, opt_sd = get_state_dict(model, opt)
            dcp.save({"model": model_sd, "opt": opt_sd}, checkpoint_id=os.path.join(cfg["out"], f"step{step}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
