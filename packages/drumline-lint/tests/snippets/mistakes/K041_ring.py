"""Ring exchange of key/value blocks for long-context attention, forward pass only."""
import os

import torch
import torch.distributed as dist


def rotate(block):
    rank, world = dist.get_rank(), dist.get_world_size()
    incoming = torch.empty_like(block)
    dist.send(block, dst=(rank + 1) % world)
    dist.recv(incoming, src=(rank - 1) % world)
    return incoming


@torch.no_grad()
def ring_attention(q, k, v):
    world = dist.get_world_size()
    scale = q.size(-1) ** -0.5
    num = torch.zeros_like(q)
    den = torch.zeros(*q.shape[:-1], 1, device=q.device)
    top = torch.full_like(den, float("-inf"))
    for hop in range(world):
        s = q @ k.transpose(-1, -2) * scale
        new_top = torch.maximum(top, s.amax(-1, keepdim=True))
        old, cur = (top - new_top).exp(), (s - new_top).exp()
        num = num * old + cur @ v
        den = den * old + cur.sum(-1, keepdim=True)
        top = new_top
        if hop + 1 < world:
            k, v = rotate(k), rotate(v)
    return num / den


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    torch.manual_seed(dist.get_rank())
    shape = (1, 16, 8192, 64)
    q, k, v = (torch.randn(shape, device="cuda") for _ in range(3))
    out = ring_attention(q, k, v)
    norm = out.pow(2).sum()
    dist.all_reduce(norm)
    if dist.get_rank() == 0:
        print("norm", norm.sqrt().item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
