from torch import nn


class MPNN(nn.Module):
    def __init__(self, dim=64, rounds=4):
        super().__init__()
        self.inp = nn.Linear(11, dim)
        self.msg = nn.ModuleList(nn.Linear(dim, dim) for _ in range(rounds))
        self.out = nn.Linear(dim, 1)

    def forward(self, nodes, adj):
        h = self.inp(nodes)
        for m in self.msg:
            h = h + (adj @ m(h)).relu()
        return self.out(h.sum(1)).squeeze(-1)
