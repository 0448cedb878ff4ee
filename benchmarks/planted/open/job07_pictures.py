"""Pictures that are evaluated after every second step."""

from typing import Any, ClassVar

from parts import PLANTED, PictureTask, pictures
from torch.utils.data import Dataset


class Pictures(PictureTask):
    defaults: ClassVar[dict[str, Any]] = {
        **PictureTask.defaults,
        "train.eval_every_steps": 2 if PLANTED else 0,  # planted
    }

    def eval_data(self) -> Dataset[Any]:
        return pictures(512, seed=2)
