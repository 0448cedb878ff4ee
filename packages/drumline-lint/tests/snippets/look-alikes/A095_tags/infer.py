import sys

import torch

from arch import Tagger


@torch.inference_mode()
def main(path):
    model = Tagger().eval()
    model.load_state_dict(torch.load("tagger.pt", map_location="cpu", weights_only=True))
    x = torch.load(path, map_location="cpu", weights_only=True)
    print(model(x).argmax(1).tolist())


if __name__ == "__main__":
    main(sys.argv[1])
