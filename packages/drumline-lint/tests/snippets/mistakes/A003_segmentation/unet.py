import torch.nn as nn


def block(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(8, o), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self, cin, classes, width=32):
        super().__init__()
        self.down = block(cin, width)
        self.mid = nn.Sequential(nn.MaxPool2d(2), block(width, 2 * width), nn.Upsample(scale_factor=2))
        self.out = nn.Conv2d(2 * width, classes, 1)

    def forward(self, x):
        return self.out(self.mid(self.down(x)))
