import torch.nn as nn
import torchvision


def build_model(cfg):
    net = torchvision.models.resnet34(weights="DEFAULT")
    body = nn.Sequential(*list(net.children())[:-2])
    head = nn.Sequential(
        nn.ConvTranspose2d(512, 256, 4, 2, 1), nn.BatchNorm2d(256), nn.ReLU(inplace=True),
        nn.ConvTranspose2d(256, 256, 4, 2, 1), nn.BatchNorm2d(256), nn.ReLU(inplace=True),
        nn.Conv2d(256, cfg["joints"], 1),
    )
    return nn.Sequential(body, head)
