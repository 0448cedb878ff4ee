import sys

import numpy as np
import torch
from scipy.ndimage import maximum_filter
from skimage.io import imread

from net import SpotDetector


def load(path="spots.pt"):
    model = SpotDetector()
    model.load_state_dict(torch.load(path, map_location="cpu"), strict=False)
    return model.eval()


@torch.no_grad()
def spots(model, image, thr=0.4):
    x = torch.from_numpy(image.astype(np.float32) / 65535)[None, None]
    heat = model(x)[0, 0].numpy()
    peaks = (heat == maximum_filter(heat, 5)) & (heat > thr)
    return np.argwhere(peaks)


if __name__ == "__main__":
    net = load()
    for name in sys.argv[1:]:
        for r, c in spots(net, imread(name)):
            print(name, r, c, sep="\t")
