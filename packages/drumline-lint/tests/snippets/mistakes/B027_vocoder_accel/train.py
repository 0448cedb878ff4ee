import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

from nets import Vocoder


def stft_loss(pred, real, n_fft):
    window = torch.hann_window(n_fft, device=pred.device)
    spec = [
        torch.stft(w.float(), n_fft, n_fft // 4, window=window, return_complex=True).abs().clamp_min(1e-5)
        for w in (pred, real)
    ]
    return (spec[0].log() - spec[1].log()).abs().mean()


class VocoderTrainer:
    def __init__(self, path="data/lj.pt", epochs=300):
        self.accelerator = Accelerator(mixed_precision="fp16", log_with="tensorboard", project_dir="runs")
        set_seed(77, device_specific=True)
        blob = torch.load(path, map_location="cpu", weights_only=True)
        data = TensorDataset(blob["mel"], blob["wav"])
        loader = DataLoader(data, batch_size=32, shuffle=True, num_workers=4, drop_last=True)
        net = Vocoder()
        opt = torch.optim.AdamW(net.parameters(), lr=2e-4, betas=(0.8, 0.99))
        self.net, self.opt, self.loader = self.accelerator.prepare(net, opt, loader)
        self.epochs = epochs

    def step(self, mel, wav):
        pred = self.net(mel)
        n = min(pred.size(-1), wav.size(-1))
        loss = sum(stft_loss(pred[..., :n], wav[..., :n], k) for k in (512, 1024, 2048))
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return loss.detach()

    def fit(self):
        self.accelerator.init_trackers("vocoder")
        step = 0
        for epoch in range(self.epochs):
            for mel, wav in self.loader:
                loss = self.step(mel, wav)
                step += 1
                if step % 50 == 0:
                    mean = self.accelerator.gather(loss).mean().item()
                    self.accelerator.log({"stft": mean}, step=step)
            self.accelerator.save_state(f"runs/epoch{epoch}")
        self.accelerator.end_training()


if __name__ == "__main__":
    VocoderTrainer().fit()
