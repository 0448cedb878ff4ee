import sys

import torch

from network import CellCounter, Wells


@torch.inference_mode()
def main(path):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = CellCounter().to(device).eval()
    net.load_state_dict(torch.load("cellcounter.pt", map_location=device))
    for img, n in torch.utils.data.DataLoader(Wells(path), batch_size=32):
        est = net(img.to(device)).exp().round().cpu()
        for a, b in zip(est.tolist(), n.tolist()):
            print(int(a), b, sep="\t")


if __name__ == "__main__":
    main(sys.argv[1])
