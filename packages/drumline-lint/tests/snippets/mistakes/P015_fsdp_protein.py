import logging
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import yaml
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, StateDictType, FullStateDictConfig
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

log = logging.getLogger("protein-mlm")
VOCAB, MASK, PAD = 33, 32, 1


class Sequences(Dataset):
    def __init__(self, path, max_len):
        self.seqs = torch.load(path, map_location="cpu", mmap=True)
        self.max_len = max_len

    def __len__(self):
        return len(self.seqs)

    def __getitem__(self, i):
        s = self.seqs[i][: self.max_len].long()
        return nn.functional.pad(s, (0, self.max_len - len(s)), value=PAD)


class ProteinLM(nn.Module):
    def __init__(self, dim, layers, heads, max_len):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.pos = nn.Embedding(max_len, dim)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, heads, 4 * dim, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        h = self.tok(ids) + self.pos.weight[: ids.size(1)]
        for blk in self.blocks:
            h = blk(h, src_key_padding_mask=ids.eq(PAD))
        return self.head(self.norm(h))


def mask_tokens(ids, p=0.15):
    noise = torch.rand(ids.shape, device=ids.device)
    picked = (noise < p) & ids.ne(PAD)
    labels = ids.masked_fill(~picked, -100)
    return ids.masked_fill(picked, MASK), labels


def consolidate(model, path):
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(True, True)):
        sd = model.state_dict()
    if dist.get_rank() == 0:
        torch.save(sd, path)


def main(cfg):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    log.setLevel(logging.INFO if dist.get_rank() == 0 else logging.ERROR)

    ds = Sequences(cfg["train"], cfg["max_len"])
    sampler = DistributedSampler(ds, seed=cfg["seed"], drop_last=True)
    dl = DataLoader(ds, cfg["batch"], sampler=sampler, num_workers=4, drop_last=True)

    torch.manual_seed(cfg["seed"])
    net = ProteinLM(cfg["dim"], cfg["layers"], cfg["heads"], cfg["max_len"])
    model = FSDP(net, auto_wrap_policy=ModuleWrapPolicy({nn.TransformerEncoderLayer}), device_id=local_rank,
                 mixed_precision=MixedPrecision(param_dtype=torch.bfloat16), use_orig_params=True)
    torch.manual_seed(cfg["seed"] + 1 + dist.get_rank())
    opt = torch.optim.AdamW(model.parameters(), lr=cfg["lr"], weight_decay=0.01)
    warm = torch.optim.lr_scheduler.LinearLR(opt, 0.01, 1.0, cfg["warmup"])

    it = 0
    for epoch in range(cfg["epochs"]):
        sampler.set_epoch(epoch)
        for ids in dl:
            ids, labels = mask_tokens(ids.cuda(non_blocking=True))
            logits = model(ids)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
            opt.zero_grad()
            loss.backward()
            gnorm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg["clip"])
            opt.step()
            warm.step()
            it += 1
            if it % 50 == 0:
                log.info("epoch %d it %d loss %.4f gnorm %.2f", epoch, it, loss.item(), gnorm.item())
        consolidate(model, f"{cfg['out']}/epoch{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stdout, format="%(asctime)s %(message)s")
    with open(sys.argv[1]) as fh:
        main(yaml.safe_load(fh))
