from torch import nn


class Generator(nn.Module):
    def __init__(self, z=128, w=256):
        super().__init__()
        self.fc = nn.Linear(z, w * 8 * 8)
        self.up = nn.Sequential(
            nn.Unflatten(1, (w, 8, 8)), nn.Upsample(scale_factor=4), nn.Conv2d(w, 64, 3, padding=1), nn.ReLU(),
            nn.Upsample(scale_factor=2), nn.Conv2d(64, 3, 3, padding=1), nn.Sigmoid())

    def forward(self, z):
        return self.up(self.fc(z))


class Critic(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(64, 128, 4, 2, 1),
                         nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(128 * 16 * 16, 1))
