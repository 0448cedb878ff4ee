# torchrun --nproc_per_node=8 fsdp2_clip.py --clip 1.0
import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM


def windows(rank, batch=4, length=2048):
    tokens = np.memmap("/data/web/train.bin", dtype=np.uint16, mode="r")
    rng = np.random.default_rng([7, rank])
    while True:
        at = rng.integers(0, len(tokens) - length, size=batch)
        yield torch.stack([torch.from_numpy(tokens[i:i + length].astype(np.int64)) for i in at])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--clip", type=float, default=1.0)
    ap.add_argument("--steps", type=int, default=10000)
    args = ap.parse_args()
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(hidden_size=1024, num_hidden_layers=16, intermediate_size=4096,
                                         num_attention_heads=16)).cuda()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
    stream = windows(dist.get_rank())
    for step in range(args.steps):
        ids = next(stream).cuda()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip).full_tensor()
        opt.step()
        opt.zero_grad(set_to_none=True)
        if step % 100 == 0 and dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.3f} grad norm {norm.item():.2f}")
    dcp.save({"model": model.state_dict()}, checkpoint_id="/ckpt/llama")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
