import torch.nn as nn
from torchvision.models import resnet50


class BirdNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.backbone = resnet50(weights=None)
        self.backbone.fc = nn.Identity()
        self.fc = nn.Linear(2048, classes)

    def freeze_backbone(self):
        for p in self.backbone.parameters():
            p.requires_grad = False

    def unfreeze_backbone(self):
        for p in self.backbone.parameters():
            p.requires_grad = True

    def forward(self, x):
        return self.fc(self.backbone(x))
