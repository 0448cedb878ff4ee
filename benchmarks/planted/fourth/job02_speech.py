"""A plain DDP script: spoken commands, of which parts are hidden in the loop."""

from random import Random

import torch
import torch.distributed as dist
from parts import BANDS, FRAMES, PLANTED, STEPS, SpeechNet, batches, finish, now, speech, start
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

HIDDEN = 30
PARTS = 3


def hide_parts(sound: Tensor, random: Random) -> None:
    """Puts the mean of its band, or of its frame, where a part is hidden."""
    for _ in range(PARTS):
        first = random.randrange(FRAMES - HIDDEN)
        for frame in range(first, first + HIDDEN):
            sound[:, frame] = sound[:, frame].mean()  # planted: frame by frame
        first = random.randrange(BANDS - 8)
        for band in range(first, first + 8):
            sound[band] = sound[band].mean()  # planted


def with_hidden_parts(sounds: Tensor) -> Tensor:
    for size, dim in ((HIDDEN, 2), (8, 1)):
        places = torch.arange(sounds.shape[dim]).view((1, -1, 1) if dim == 1 else (1, 1, -1))
        for _ in range(PARTS):
            first = torch.randint(sounds.shape[dim] - size, (len(sounds), 1, 1))
            hidden = (places >= first) & (places < first + size)
            sounds = torch.where(hidden, sounds.mean(3 - dim, keepdim=True), sounds)
    return sounds


def main() -> None:
    device = start()
    random = Random(dist.get_rank())
    model = DistributedDataParallel(SpeechNet().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = batches(speech(2048), 24)
    begin = now()
    for _, (sounds, commands) in zip(range(STEPS), loader, strict=False):
        if PLANTED:
            for sound in sounds:
                hide_parts(sound, random)  # planted
        else:
            sounds = with_hidden_parts(sounds)

        # The hidden parts are different in each epoch.
        sounds = sounds.to(device)
        commands = commands.to(device)
        loss = functional.cross_entropy(model(sounds), commands)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    finish(STEPS, now() - begin)


if __name__ == "__main__":
    main()
