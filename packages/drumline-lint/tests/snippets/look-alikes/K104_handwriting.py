import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LineReader(nn.Module):
    def __init__(self, chars):
        super().__init__()
        self.cnn = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                                 nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d((2, 1)))
        self.rnn = nn.LSTM(64 * 8, 256, 2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(512, chars)

    def forward(self, x):
        h = self.cnn(x)
        h = h.permute(0, 3, 1, 2).flatten(2)
        return self.out(self.rnn(h)[0]).log_softmax(-1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="iam_lines.pt")
    ap.add_argument("--epochs", type=int, default=60)
    ap.add_argument("--out", default="reader.pt")
    ap.add_argument("--resume")
    args = ap.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    d = torch.load(args.data, map_location="cpu")
    loader = DataLoader(TensorDataset(d["img"], d["text"], d["len"]), batch_size=32,
                        shuffle=True, num_workers=4, drop_last=True)
    net = LineReader(d["n_chars"] + 1).to(device)
    opt = torch.optim.Adam(net.parameters(), lr=5e-4)
    if args.resume:
        net.load_state_dict(torch.load(args.resume, map_location=device))
    ctc = nn.CTCLoss(zero_infinity=True)
    for epoch in range(args.epochs):
        total = 0.0
        for img, text, n in loader:
            lp = net(img.to(device)).transpose(0, 1)
            steps = torch.full((img.size(0),), lp.size(0), dtype=torch.long)
            loss = ctc(lp, text.to(device), steps, n)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item()
        torch.save(net.state_dict(), args.out)
        print(f"epoch {epoch} loss {total / len(loader):.3f}")


if __name__ == "__main__":
    main()
