import torch
import torch.nn as nn
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms

DATA = "/data/pets"


def build():
    net = models.resnet50(weights="IMAGENET1K_V2")
    net.fc = nn.Linear(net.fc.in_features, 37)
    if torch.cuda.device_count() > 1:
        print("using", torch.cuda.device_count(), "GPUs")
        net = nn.DataParallel(net)
    return net.cuda()


def main():
    tf = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor()])
    train = datasets.OxfordIIITPet(DATA, split="trainval", transform=tf, download=True)
    loader = DataLoader(train, batch_size=256, shuffle=True, num_workers=16, pin_memory=True)
    net = build()
    opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    ce = nn.CrossEntropyLoss()
    for epoch in range(20):
        net.train()
        total = 0.0
        for x, y in loader:
            loss = ce(net(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item()
        print(f"epoch {epoch} {total / len(loader):.4f}")
        inner = net.module if isinstance(net, nn.DataParallel) else net
        torch.save(inner.state_dict(), "pets.pt")


if __name__ == "__main__":
    main()
