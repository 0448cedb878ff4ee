"""Knowledge distillation of a ResNet-50 into a ResNet-18 on several GPUs (torchrun)."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms


def kd_loss(student, teacher, target, T=4.0, alpha=0.7):
    soft = F.kl_div(F.log_softmax(student / T, 1), F.softmax(teacher / T, 1), reduction="batchmean") * T * T
    return alpha * soft + (1 - alpha) * F.cross_entropy(student, target)


class Distiller:
    def __init__(self, args):
        self.args = args
        self.rank = dist.get_rank()
        self.teacher = models.resnet50(weights=models.ResNet50_Weights.IMAGENET1K_V2).cuda().eval()
        self.teacher.requires_grad_(False)
        self.student = DDP(models.resnet18(weights=None).cuda())
        self.opt = torch.optim.SGD(self.student.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
        tf = transforms.Compose([
            transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ])
        data = datasets.ImageFolder(os.path.join(args.data, "train"), tf)
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, args.batch_size, sampler=self.sampler, num_workers=8, pin_memory=True,
                                 drop_last=True)

    def epoch(self, e):
        self.sampler.set_epoch(e)
        self.student.train()
        for i, (x, y) in enumerate(self.loader):
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            with torch.no_grad():
                t = self.teacher(x)
            loss = kd_loss(self.student(x), t, y)
            self.opt.zero_grad(set_to_none=True)
            loss.backward()
            self.opt.step()
            if i % 200 == 0 and self.rank == 0:
                print(f"{e} {i}/{len(self.loader)} {loss.item():.3f}", flush=True)

    def run(self):
        for e in range(self.args.epochs):
            self.epoch(e)
            if self.rank == 0:
                torch.save(self.student.module.state_dict(), "student.pt")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="/data/imagenet")
    ap.add_argument("--epochs", type=int, default=100)
    ap.add_argument("--batch-size", type=int, default=128)
    ap.add_argument("--lr", type=float, default=0.2)
    args = ap.parse_args()
    dist.init_process_group(backend="nccl")
    torch.manual_seed(dist.get_rank())
    Distiller(args).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
