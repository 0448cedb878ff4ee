import argparse

import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms as T


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default="/data/flowers")
    ap.add_argument("--epochs", type=int, default=20)
    ap.add_argument("--out", default="flowers.pt")
    args = ap.parse_args()

    tf = T.Compose([T.RandomResizedCrop(224), T.ToTensor()])
    train = torchvision.datasets.ImageFolder(f"{args.root}/train", tf)
    test = torchvision.datasets.ImageFolder(f"{args.root}/test",
                                            T.Compose([T.Resize((224, 224)), T.ToTensor()]))
    train_dl = DataLoader(train, batch_size=256, shuffle=True, num_workers=16, drop_last=True)
    test_dl = DataLoader(test, batch_size=512, num_workers=8)

    net = torchvision.models.resnet50(num_classes=len(train.classes)).cuda()
    model = nn.DataParallel(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    best = 0.0
    for epoch in range(args.epochs):
        model.train()
        for x, y in train_dl:
            loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        model.eval()
        right = 0
        with torch.no_grad():
            for x, y in test_dl:
                right += (model(x.cuda()).argmax(1).cpu() == y).sum().item()
        acc = right / len(test)
        print(f"epoch {epoch}: {acc:.4f}")
        if acc > best:
            best = acc
            torch.save(model.module.state_dict(), args.out)


if __name__ == "__main__":
    main()
