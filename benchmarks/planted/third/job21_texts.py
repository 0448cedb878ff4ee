"""A small GPT, without a bottleneck."""

from typing import Any, ClassVar

from parts import TextTask


class Texts(TextTask):
    defaults: ClassVar[dict[str, Any]] = {**TextTask.defaults, "train.batch_size": 32}
