import torch
import torch.nn as nn
import torch.nn.functional as F


class Translator(nn.Module):
    def __init__(self, domains, w=64):
        super().__init__()
        self.domains = domains
        self.enc = nn.Sequential(nn.Conv2d(3 + domains, w, 7, 1, 3), nn.ReLU(), nn.Conv2d(w, 2 * w, 4, 2, 1), nn.ReLU())
        self.mid = nn.Sequential(*[nn.Sequential(nn.Conv2d(2 * w, 2 * w, 3, 1, 1), nn.ReLU()) for _ in range(6)])
        self.dec = nn.Sequential(nn.ConvTranspose2d(2 * w, w, 4, 2, 1), nn.ReLU(), nn.Conv2d(w, 3, 7, 1, 3), nn.Tanh())

    def forward(self, x, y):
        m = F.one_hot(y, self.domains)[:, :, None, None].expand(-1, -1, *x.shape[2:]).to(x)
        return self.dec(self.mid(self.enc(torch.cat([x, m], 1))))


class Critic(nn.Module):
    def __init__(self, domains, w=64):
        super().__init__()
        chans = [3, w, 2 * w, 4 * w, 8 * w]
        self.body = nn.Sequential(*[nn.Sequential(nn.Conv2d(a, b, 4, 2, 1), nn.LeakyReLU(0.2))
                                    for a, b in zip(chans, chans[1:])])
        self.head = nn.Linear(8 * w, domains)

    def forward(self, x, y):
        h = self.body(x).mean((2, 3))
        return self.head(h).gather(1, y[:, None]).squeeze(1)
