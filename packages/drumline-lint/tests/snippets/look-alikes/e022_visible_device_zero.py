import os

# One visible GPU per process; must come before torch touches CUDA.
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset  # noqa: E402


class KnowledgeGraph(nn.Module):
    """RotatE-like scoring with uniform negatives."""

    def __init__(self, n_ent, n_rel, dim=256, gamma=9.0):
        super().__init__()
        self.ent = nn.Embedding(n_ent, 2 * dim)
        self.rel = nn.Embedding(n_rel, dim)
        self.gamma, self.n_ent = gamma, n_ent
        nn.init.uniform_(self.ent.weight, -0.05, 0.05)
        nn.init.uniform_(self.rel.weight, -3.14, 3.14)

    def score(self, h, r, t):
        hr, hi = self.ent(h).chunk(2, -1)
        tr, ti = self.ent(t).chunk(2, -1)
        c, s = self.rel(r).cos(), self.rel(r).sin()
        d = torch.stack([hr * c - hi * s - tr, hr * s + hi * c - ti]).pow(2).sum(0).add(1e-9).sqrt()
        return self.gamma - d.sum(-1)

    def forward(self, h, r, t, n_neg=64):
        pos = self.score(h, r, t)
        neg_t = torch.randint(self.n_ent, (len(h), n_neg), device=h.device)
        neg = self.score(h[:, None], r[:, None], neg_t)
        return -(nn.functional.logsigmoid(pos).mean() + nn.functional.logsigmoid(-neg).mean()) / 2


def main():
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    rank = dist.get_rank()

    kg = torch.load("/data/fb15k237/triples.pt", map_location="cpu")
    ds = TensorDataset(*kg["train"].unbind(1))
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    loader = DataLoader(ds, 1024, sampler=sampler, drop_last=True)

    torch.manual_seed(5 + rank)
    model = KnowledgeGraph(kg["n_ent"], kg["n_rel"]).to("cuda:0")
    model = DDP(model, device_ids=[0])
    opt = torch.optim.Adam(model.parameters(), 5e-4)

    for epoch in range(500):
        sampler.set_epoch(epoch)
        for h, r, t in loader:
            loss = model(h.to("cuda:0"), r.to("cuda:0"), t.to("cuda:0"))
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0 and epoch % 20 == 0:
            print(epoch, round(loss.item(), 4), flush=True)
            torch.save(model.module.state_dict(), "rotate.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
