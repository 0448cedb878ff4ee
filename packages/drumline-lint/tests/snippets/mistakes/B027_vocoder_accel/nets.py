from torch import nn
from torch.nn.functional import leaky_relu


class ResStack(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(ch, ch, 3, padding=d, dilation=d) for d in (1, 3, 9))

    def forward(self, x):
        for c in self.convs:
            x = x + c(leaky_relu(x, 0.2))
        return x


class Vocoder(nn.Module):
    def __init__(self, mels=80, ch=256):
        super().__init__()
        self.inp = nn.Conv1d(mels, ch, 7, padding=3)
        ups = []
        for r in (8, 8, 4):
            ups += [nn.LeakyReLU(0.2), nn.ConvTranspose1d(ch, ch // 2, 2 * r, r, r // 2), ResStack(ch // 2)]
            ch //= 2
        self.ups = nn.Sequential(*ups)
        self.out = nn.Sequential(nn.LeakyReLU(0.2), nn.Conv1d(ch, 1, 7, padding=3), nn.Tanh())

    def forward(self, mel):
        return self.out(self.ups(self.inp(mel))).squeeze(1)
