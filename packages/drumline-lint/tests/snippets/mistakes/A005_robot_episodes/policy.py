from torch import nn


class Policy(nn.Sequential):
    def __init__(self, obs=39, act=7, hidden=512):
        super().__init__(nn.Linear(obs, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(),
                         nn.Linear(hidden, act))
