"""What the server of tests/ranks.py has loaded, and with it every process that is forked from it."""

from __future__ import annotations

import gc
import importlib

MODULES = (
    "torch._dynamo",  # else torch loads it when a model is first wrapped, and that takes longer than most tests
    "torch.distributed.run",
    "drumline.cli.launch_command",
    "drumline.cli.prove_resume_command",
    "drumline.cli.train_command",
    "drumline.cli.train_rank",
    "drumline.report.page",
    "jinja2",
    "drumline.launch.node.agent",
    "drumline.launch.node.local",
    "drumline.watch.sidecar.main",
    "pytest",
    "tests.schedules",
    "torchmetrics.classification",
    "torchmetrics.wrappers",
)
for name in MODULES:
    importlib.import_module(name)
# In a fork the collector would look at all of it, and each page that it looks at would be copied.
gc.collect()
gc.freeze()
