from torch import nn


class Planner(nn.Module):
    def __init__(self, scene=512, steps=40):
        super().__init__()
        self.steps = steps
        self.net = nn.Sequential(nn.Linear(scene, 1024), nn.SiLU(), nn.Linear(1024, steps * 2))

    def forward(self, x):
        return self.net(x).view(-1, self.steps, 2)
