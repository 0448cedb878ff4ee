import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class BirdCNN(nn.Module):
    def __init__(self, species):
        super().__init__()
        self.f = nn.Sequential(
            nn.Conv2d(1, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.SiLU(),
            nn.Conv2d(32, 96, 3, 2, 1), nn.BatchNorm2d(96), nn.SiLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, species))

    def forward(self, spec):
        return self.f(spec)


def dataset(split):
    d = torch.load(f"/data/birdclef/{split}.pt", map_location="cpu")
    return TensorDataset(d["spec"], d["label"])


def main():
    set_seed(11)
    accelerator = Accelerator()
    train_dl = DataLoader(dataset("train"), 64, shuffle=True, drop_last=True, num_workers=4)
    val_dl = DataLoader(dataset("val"), 128, num_workers=2)
    model = BirdCNN(264).to(accelerator.device)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
    opt, train_dl, val_dl = accelerator.prepare(opt, train_dl, val_dl)

    for epoch in range(30):
        model.train()
        for spec, label in train_dl:
            loss = nn.functional.cross_entropy(model(spec), label)
            accelerator.backward(loss)
            opt.step()
            opt.zero_grad()
        model.eval()
        right, seen = 0, 0
        for spec, label in val_dl:
            with torch.no_grad():
                pred = model(spec).argmax(1)
            pred, label = accelerator.gather_for_metrics((pred, label))
            right += (pred == label).sum().item()
            seen += label.numel()
        accelerator.print(f"epoch {epoch}: accuracy {right / seen:.4f}")
    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "birds.pt")


if __name__ == "__main__":
    main()
