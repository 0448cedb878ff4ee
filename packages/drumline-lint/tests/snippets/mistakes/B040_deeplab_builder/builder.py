from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torchvision.models.segmentation import deeplabv3_resnet50


class Segmenter(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.net = deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=num_classes)

    def forward(self, x):
        return self.net(x)["out"]


def build_model(cfg, device):
    model = Segmenter(cfg.num_classes).to(device)
    model = DDP(model, device_ids=[device.index])
    if cfg.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return model
