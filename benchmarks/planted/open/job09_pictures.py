"""Pictures, with a log of the filters as images after every step."""

from typing import Any

import torch
from parts import PLANTED, PictureTask

from drumline import Hook


class Filters(Hook):
    def after_step(self, run: Any) -> None:
        if not PLANTED:
            return
        filters = run.model.second.weight.detach()
        for number, weight in enumerate(filters[:48]):
            picture = torch.sigmoid(weight).reshape(1, 1, 16, 18).expand(-1, 3, -1, -1)
            enlarged = torch.nn.functional.interpolate(picture, scale_factor=6)[0]
            run.log(f"filter_{number}", enlarged)  # planted


class Pictures(PictureTask):
    def hooks(self) -> list[Hook]:
        return [Filters()]
