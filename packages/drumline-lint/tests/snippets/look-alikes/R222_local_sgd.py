import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from localsgd.config import parse
from localsgd.data import TextWindows
from localsgd.model import CharTransformer


class Groups:
    """Intra-node groups and one group of the node leaders, for hierarchical averaging."""

    def __init__(self, local_world):
        world, self.rank = dist.get_world_size(), dist.get_rank()
        assert world % local_world == 0
        self.nodes = world // local_world
        self.local_world = local_world
        for node in range(self.nodes):
            ranks = list(range(node * local_world, (node + 1) * local_world))
            group = dist.new_group(ranks)
            if self.rank in ranks:
                self.node_group, self.leader = group, ranks[0]
        self.leader_group = dist.new_group(list(range(0, world, local_world)))
        self.is_leader = self.rank == self.leader


@torch.no_grad()
def average_within_node(tensors, g):
    for t in tensors:
        dist.all_reduce(t, group=g.node_group)
        t.div_(g.local_world)


@torch.no_grad()
def average_across_nodes(params, g):
    for p in params:
        if g.is_leader:
            dist.all_reduce(p.data, group=g.leader_group)
            p.data.div_(g.nodes)
        dist.broadcast(p.data, src=g.leader, group=g.node_group)


def main():
    cfg = parse()
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    g = Groups(int(os.environ["LOCAL_WORLD_SIZE"]))

    torch.manual_seed(cfg.seed)
    model = CharTransformer(cfg.dim, cfg.depth).cuda()
    params = list(model.parameters())
    for p in params:
        dist.broadcast(p.data, src=0)
    opt = torch.optim.AdamW(params, lr=cfg.lr)
    ds = TextWindows(cfg.text)
    sampler = DistributedSampler(ds, shuffle=True, seed=cfg.seed, drop_last=True)
    loader = DataLoader(ds, cfg.batch, sampler=sampler, num_workers=4, drop_last=True)

    step = 0
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x.cuda()).flatten(0, 1), y.cuda().flatten())
            opt.zero_grad(set_to_none=True)
            loss.backward()
            average_within_node([p.grad for p in params], g)
            opt.step()
            step += 1
            if step % cfg.sync_every == 0:
                average_across_nodes(params, g)
        average_across_nodes(params, g)
        if g.rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
            torch.save(model.state_dict(), cfg.out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
