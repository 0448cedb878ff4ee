"""A plain DDP script: spoken commands in packed shards, which are shuffled one by one."""

import lzma
from collections.abc import Iterator

import torch
import torch.distributed as dist
from parts import BANDS, COMMANDS, FRAMES, PLANTED, STEPS, SpeechNet, finish, now, seeded, start
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

BATCH = 40
SHARD = 5 * BATCH
RATE = 4  # recorded frames for each one that the network gets


class Shards:
    """Recordings of one byte for each number, of which a shard is kept in memory at a time."""

    def __init__(self, rank: int) -> None:
        random = seeded(rank)
        levels = torch.randint(64, (SHARD, BANDS, RATE * FRAMES), generator=random)
        self.levels = levels.to(torch.uint8)
        self.packed = lzma.compress(self.levels.numpy().tobytes(), preset=0)

    def opened(self) -> Tensor:
        if not PLANTED:
            return self.levels[:, :, ::RATE]
        content = bytearray(lzma.decompress(self.packed))  # planted: while the loop waits
        shape = SHARD, BANDS, RATE * FRAMES
        return torch.frombuffer(content, dtype=torch.uint8).view(shape)[:, :, ::RATE]

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            shard = self.opened()  # planted: for one step of five
            order = torch.randperm(SHARD)
            for begin in range(0, SHARD, BATCH):
                yield shard[order[begin : begin + BATCH]].float() / 32 - 1


def main() -> None:
    device = start()
    shards = Shards(dist.get_rank())
    model = DistributedDataParallel(SpeechNet().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    commands = torch.randint(COMMANDS, (BATCH,), device=device)
    begin = now()
    for _, sounds in zip(range(STEPS), shards, strict=False):
        loss = functional.cross_entropy(model(sounds.to(device)), commands)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
