import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from protlm.data import token_batches
from protlm.model import ProteinLM, ProteinLMConfig


def shard(model, mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def export(model, path):
    sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(sd, path)


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("dp",))

    torch.manual_seed(0)
    model = ProteinLM(ProteinLMConfig(layers=33, dim=1280)).cuda()
    shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, betas=(0.9, 0.98), weight_decay=0.01)

    for step, batch in enumerate(token_batches("/data/uniref50", rank, world, max_steps=100_000)):
        tokens, targets = (t.cuda(non_blocking=True) for t in batch)
        logits = model(tokens)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            norm = norm.full_tensor()
            if rank == 0:
                print(f"{step} loss {loss.item():.4f} grad {norm.item():.3f}")
        if step and step % 20_000 == 0:
            export(model, f"/ckpt/protlm_{step}.pt")

    export(model, "/ckpt/protlm_final.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
