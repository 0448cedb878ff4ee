import torch.nn as nn
from torchvision.models import resnet34


def build(num_classes):
    net = resnet34(weights=None)
    net.fc = nn.Linear(net.fc.in_features, num_classes)
    return nn.SyncBatchNorm.convert_sync_batchnorm(net)
