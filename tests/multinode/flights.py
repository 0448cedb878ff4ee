"""Ranks on hosts that start in milliseconds: forked from a process that has torch loaded, they then
move to their host.

    said = fly(bed, {"a": {}, "b": {"lr": 0.2}})    # one start: ranks in this order; what each of them said

A rank runs `DDPManager.setup()` as `drumline train` does, compares data, wraps a model, and says
`trained`; or it says the error, as the user would read it. It has its host's network, name and
files, but not its process numbers.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests import ranks
from tests.multinode.hosts import Testbed
from tests.multinode.warm_host import enter

PORT = 29500
START_TIMEOUT_S = 30.0


def fly(
    bed: Testbed, hosts: Mapping[str, Mapping[str, Any]], *, patience_s: float = 90.0
) -> dict[str, str]:
    """One rank on each of these hosts; what it wrote to stderr and its last word, with how long
    that took.

    One of another name goes to the `host` it is told.
    """
    outputs = {name: bed.folder / f"{name}.said" for name in hosts}
    flying = []
    for rank, (name, orders) in enumerate(hosts.items()):
        standard = {"rank": rank, "world_size": len(hosts), "environment": {}}
        host = bed[orders.get("host", name)]
        work = (host.space.pid, Path.cwd(), {**standard, **orders}, outputs[name])
        flying.append(ranks.server_context.Process(target=_be_a_rank, args=work))
        flying[-1].start()
    for process in flying:
        process.join(patience_s)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()
    return {name: output.read_text() for name, output in outputs.items()}


def _be_a_rank(host_pid: int, folder: Path, orders: dict[str, Any], output: Path) -> None:
    with output.open("w") as file:
        os.dup2(file.fileno(), 2)
    enter(host_pid)
    os.chdir(folder)
    begun = time.monotonic()
    try:
        word = _fly(orders)
    except Exception as error:
        word = f"error: {error}" if hasattr(error, "next_step") else traceback.format_exc()
    print(f"{word}\nafter {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)
    os._exit(0)


def _fly(orders: dict[str, Any]) -> str:
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    from drumline.config.schema import Config, DistConfig, OptimConfig, WatchConfig
    from drumline.training.job.job import make_manager

    torch.set_num_threads(1)
    environment = {
        "RANK": str(orders["rank"]),
        "WORLD_SIZE": str(orders["world_size"]),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "a",
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": "eth0",
        **orders["environment"],
    }
    os.environ.update({name: value for name, value in environment.items() if value is not None})
    for name in (name for name, value in environment.items() if value is None):
        os.environ.pop(name, None)
    if "code" in orders:
        sys.path.insert(0, orders["code"])
        importlib.import_module("user_model")
    dist = DistConfig(device="cpu", start_timeout_s=orders.get("timeout_s", START_TIMEOUT_S))
    optim = OptimConfig(lr=orders.get("lr", 0.1))
    # Ranks end here without a word to anybody, on purpose.
    config = Config(optim=optim, dist=dist, watch=WatchConfig(sidecar="off"))
    ddp = make_manager(config, orders.get("task", ""))
    ddp.setup()
    ddp.loader(TensorDataset(torch.ones(orders.get("samples", 10), 2)), batch_size=4)
    ddp.wrap(nn.Linear(2, 2))
    ddp.barrier()
    ddp.cleanup()
    return "trained"
