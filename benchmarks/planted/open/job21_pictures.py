"""Pictures, without a bottleneck."""

from typing import Any, ClassVar

from parts import PictureTask


class Pictures(PictureTask):
    defaults: ClassVar[dict[str, Any]] = {**PictureTask.defaults, "train.batch_size": 128}
