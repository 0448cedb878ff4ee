import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from small.lenet import LeNet


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--gpu", type=int, default=0)
    ap.add_argument("--epochs", type=int, default=10)
    ap.add_argument("--resume")
    args = ap.parse_args()

    device = torch.device("cuda", args.gpu)
    torch.cuda.set_device(device)
    tf = transforms.ToTensor()
    train = datasets.MNIST("data", train=True, download=True, transform=tf)
    loader = DataLoader(train, batch_size=64, shuffle=True, num_workers=2)

    model = LeNet().to(device)
    opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    start = 0
    if args.resume:
        ckpt = torch.load(args.resume, map_location=device)
        model.load_state_dict(ckpt["model"])
        opt.load_state_dict(ckpt["opt"])
        start = ckpt["epoch"] + 1

    for epoch in range(start, args.epochs):
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")
        torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "epoch": epoch}, "lenet.pt")


if __name__ == "__main__":
    main()
