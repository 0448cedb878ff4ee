import lightning.pytorch as pl
import torch
from torchmetrics.detection import MeanAveragePrecision
from torchvision.models.detection import fcos_resnet50_fpn


class FcosModule(pl.LightningModule):
    def __init__(self, num_classes=21, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = fcos_resnet50_fpn(weights=None, weights_backbone=None, num_classes=num_classes)
        self.map = MeanAveragePrecision(box_format="xyxy")

    def training_step(self, batch, _):
        images, targets = batch
        losses = self.net(list(images), list(targets))
        total = sum(losses.values())
        self.log("train/loss", total, prog_bar=True, batch_size=len(images))
        return total

    def validation_step(self, batch, _):
        images, targets = batch
        preds = self.net(list(images))
        self.map.update(preds, list(targets))

    def on_validation_epoch_end(self):
        scores = self.map.compute()
        self.map.reset()
        if self.trainer.is_global_zero:
            self.log("val/map", scores["map"].to(self.device), prog_bar=True, sync_dist=True)
            self.log("val/map50", scores["map_50"].to(self.device), sync_dist=True)

    def configure_optimizers(self):
        opt = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9, weight_decay=1e-4)
        return [opt], [torch.optim.lr_scheduler.MultiStepLR(opt, [8, 11])]
