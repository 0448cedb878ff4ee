"""A loop with DDPManager: recordings as spectra in triangular bands."""

import torch
from parts import PLANTED, SOUNDS, STEPS, clips, now, report
from torch import Tensor, nn
from torch.nn import functional

from drumline import DDPManager

BANDS = 96
POINTS = 1024


def triangles() -> Tensor:
    """How much each frequency counts in each band."""
    bins = POINTS // 2 + 1
    width = bins / (BANDS + 1)
    weights = []
    for band in range(BANDS):
        middle = (band + 1) * width
        distances = [abs(line - middle) for line in range(bins)]  # planted
        weights.append([max(0.0, 1.0 - distance / width) for distance in distances])  # planted
    return torch.tensor(weights)


class SpectrumNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bands", triangles(), persistent=False)
        self.layers = nn.Sequential(
            nn.Conv1d(BANDS, 64, 5), nn.ReLU(), nn.Conv1d(64, 64, 5), nn.ReLU()
        )
        self.scores = nn.Linear(64, SOUNDS)

    def forward(self, waves: Tensor) -> Tensor:
        window = torch.hann_window(POINTS, device=waves.device)
        lines = torch.stft(waves[:, 0], POINTS, 128, window=window, return_complex=True).abs()
        bands = triangles().to(waves.device) if PLANTED else self.bands  # planted: never changes
        return self.scores(self.layers(torch.log1p(bands @ lines)).mean(2))


def main() -> None:
    with DDPManager(seed=0) as ddp:
        loader = ddp.loader(clips(2048), batch_size=32)
        model = ddp.wrap(SpectrumNet())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        begin = now()
        for _, (waves, sounds) in zip(range(STEPS), loader, strict=False):
            loss = functional.cross_entropy(model(waves), sounds) * loader.scale
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        report(STEPS, now() - begin)


if __name__ == "__main__":
    main()
