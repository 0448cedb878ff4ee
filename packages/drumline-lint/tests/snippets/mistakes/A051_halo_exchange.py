"""1-D domain decomposition of a learned PDE solver; each rank owns a strip of the grid."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn

HALO = 4
STEPS = 500


class Stepper(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(1, width, 2 * HALO + 1), nn.GELU(), nn.Conv1d(width, 1, 1))

    def forward(self, padded):
        return padded[..., HALO:-HALO] + self.net(padded)


def shift(edge, dst, src):
    received = torch.empty_like(edge)
    dist.send(edge.contiguous(), dst=dst)
    dist.recv(received, src=src)
    return received


def exchange(strip, rank, world_size):
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    from_left = shift(strip[..., -HALO:], right, left)
    from_right = shift(strip[..., :HALO], left, right)
    return torch.cat([from_left, strip, from_right], dim=-1)


@torch.inference_mode()
def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    model = Stepper()
    model.load_state_dict(torch.load("stepper.pt", map_location="cpu", weights_only=True))
    model.to(device).eval()
    grid = torch.load("initial.pt", map_location="cpu", weights_only=True)
    strip = grid.chunk(world_size, dim=-1)[rank].to(device)
    for _ in range(STEPS):
        strip = model(exchange(strip, rank, world_size))
    torch.save(strip.cpu(), f"strip_{rank:03d}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
