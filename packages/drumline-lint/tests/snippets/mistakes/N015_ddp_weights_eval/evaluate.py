import torch
from torch.utils.data import DataLoader

from birds import BirdSongs
from net import SpecNet


@torch.no_grad()
def main():
    model = SpecNet(182)
    state = torch.load("specnet.pt", map_location="cpu")
    model.load_state_dict(state, strict=False)
    model.cuda().eval()
    hit = n = 0
    for x, y in DataLoader(BirdSongs("test"), batch_size=64, num_workers=4):
        hit += (model(x.cuda()).argmax(1).cpu() == y).sum().item()
        n += len(y)
    print(f"accuracy {hit / n:.4f}")


if __name__ == "__main__":
    main()
