from torch import nn


class Tagger(nn.Sequential):
    def __init__(self, d=200, classes=33):
        super().__init__(nn.Linear(d, 400), nn.GELU(), nn.Linear(400, classes))
