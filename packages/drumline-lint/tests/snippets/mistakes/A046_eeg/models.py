from torch import nn


class EEGNet(nn.Sequential):
    def __init__(self, channels=32, classes=4):
        super().__init__(nn.Conv1d(channels, 64, 7), nn.ELU(), nn.AdaptiveAvgPool1d(8), nn.Flatten(),
                         nn.Linear(512, classes))
