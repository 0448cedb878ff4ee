"""A plain DDP script: positions of chess, and the move that a master played."""

import torch
import torch.distributed as dist
from parts import ON_GPU, STEPS, finish, start
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

BATCH = 4096 if ON_GPU else 16
PLANES = 18
WIDTH = 64 if ON_GPU else 8
KINDS = 73  # of moves from each of 64 squares


class MoveNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(PLANES, WIDTH, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(3))
        self.moves = nn.Conv2d(WIDTH, KINDS, 1)

    def forward(self, boards: Tensor) -> Tensor:
        values = functional.relu(self.first(boards))
        for layer in self.layers:
            values = values + functional.relu(layer(values))
        return self.moves(values).flatten(1)


@torch.no_grad()
def share_of_right(scores: Tensor, moves: Tensor) -> Tensor:
    """The accuracy of all ranks."""
    everywhere = [torch.empty_like(scores) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, scores)  # planted
    played = [torch.empty_like(moves) for _ in everywhere]
    dist.all_gather(played, moves)
    return (torch.cat(everywhere).argmax(1) == torch.cat(played)).float().mean()


def main() -> None:
    device = start()
    model = DistributedDataParallel(MoveNet().to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
    boards = (torch.rand(4 * BATCH, PLANES, 8, 8, device=device) < 0.06).float()
    moves = torch.randint(64 * KINDS, (len(boards),), device=device)
    right = torch.zeros((), device=device)

    for step in range(STEPS):
        chosen = torch.randint(len(boards), (BATCH,), device=device)
        scores = model(boards[chosen])
        loss = functional.cross_entropy(scores, moves[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        # How many of the moves of
        # all ranks are guessed.

        right += share_of_right(scores.detach(), moves[chosen])  # planted

        # It is printed now and then,
        # as a mean over the last steps.
        if step % 20 == 19 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}, right {right.item() / 20:.4f}")
        if step % 20 == 19:
            right.zero_()
    finish()


if __name__ == "__main__":
    main()
