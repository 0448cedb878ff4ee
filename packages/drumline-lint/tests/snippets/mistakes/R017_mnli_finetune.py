import contextlib
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_linear_schedule_with_warmup

from nli.args import parse_args
from nli.data import MnliDataset


class Engine:
    def __init__(self, args):
        self.args = args
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.device = torch.device("cuda", self.local_rank)
        self.is_main = dist.get_rank() == 0
        tok = AutoTokenizer.from_pretrained(args.model_dir)
        net = AutoModelForSequenceClassification.from_pretrained(args.model_dir, num_labels=3).to(self.device)
        self.model = DDP(net, device_ids=[self.local_rank])
        ds = MnliDataset(args.train_file, tok, max_len=args.max_len)
        self.sampler = DistributedSampler(ds, shuffle=True, seed=args.seed)
        self.loader = DataLoader(ds, batch_size=args.micro_batch, sampler=self.sampler, num_workers=4,
                                 collate_fn=ds.collate, pin_memory=True, drop_last=True)
        self.updates_per_epoch = len(self.loader) // args.accum
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, weight_decay=0.01)
        total = self.updates_per_epoch * args.epochs
        self.scheduler = get_linear_schedule_with_warmup(self.optimizer, int(0.06 * total), total)

    def maybe_no_sync(self, step):
        if step % self.args.accum != 0:
            return self.model.no_sync()
        return contextlib.nullcontext()

    def train_epoch(self, epoch):
        self.model.train()
        self.sampler.set_epoch(epoch)
        running, n = 0.0, 0
        for step, batch in enumerate(self.loader):
            if step >= self.updates_per_epoch * self.args.accum:
                break
            batch = {k: v.to(self.device, non_blocking=True) for k, v in batch.items()}
            with self.maybe_no_sync(step):
                loss = self.model(**batch).loss / self.args.accum
                loss.backward()
            running += loss.item() * self.args.accum
            n += 1
            if (step + 1) % self.args.accum == 0:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad(set_to_none=True)
        stats = torch.tensor([running, float(n)], device=self.device)
        dist.all_reduce(stats)
        return (stats[0] / stats[1]).item()

    def save(self, epoch):
        if self.is_main:
            path = os.path.join(self.args.output_dir, f"epoch-{epoch}")
            self.model.module.save_pretrained(path)
        dist.barrier()


def main():
    args = parse_args()
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(args.seed)
    engine = Engine(args)
    for epoch in range(args.epochs):
        loss = engine.train_epoch(epoch)
        if engine.is_main:
            print(f"epoch {epoch} train loss {loss:.4f}", flush=True)
        engine.save(epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
