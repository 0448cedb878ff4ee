import torch
import torch.nn as nn
import torch.nn.functional as F


class SpeechVAE(nn.Module):
    def __init__(self, mels=80, hidden=512, latent=64):
        super().__init__()
        self.enc = nn.GRU(mels, hidden, 2, batch_first=True)
        self.mu = nn.Linear(hidden, latent)
        self.logvar = nn.Linear(hidden, latent)
        self.dec = nn.GRU(latent, hidden, 2, batch_first=True)
        self.out = nn.Linear(hidden, mels)

    def forward(self, mel):
        h, _ = self.enc(mel)
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.out(self.dec(z)[0]), mu, logvar

    def compute_loss(self, mel, beta):
        recon, mu, logvar = self(mel)
        rec = F.l1_loss(recon, mel)
        kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).mean()
        return rec + beta * kl, {"rec": rec.detach(), "kl": kl.detach()}
