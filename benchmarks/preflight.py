"""What the preflight costs: all that ranks compare before the first step, in milliseconds and as a
share of the start.

    make bench-preflight        (or: python -m benchmarks.preflight --ranks 2,4 --rounds 20)

The parts run as `drumline train` runs them, over and over in a group that is up; each time counts
with the slowest rank. The first round, in which nothing is in any cache, is shown apart. A start is
everything from the first line of a rank's program (the import of torch is most of it) to the model
under DDP. Weights are hashed, so a larger model takes longer: the last line has one.
"""

from __future__ import annotations

import time

BEGUN = time.perf_counter()

import argparse  # noqa: E402
import os  # noqa: E402
import platform  # noqa: E402
import statistics  # noqa: E402
from collections.abc import Callable  # noqa: E402

import torch  # noqa: E402

from benchmarks.ranks import start_ranks  # noqa: E402
from drumline.base.rank_environment import topology_from  # noqa: E402
from drumline.config.schema import Config, DataConfig, ModelConfig  # noqa: E402
from drumline.data.dataset import fingerprint  # noqa: E402
from drumline.rank.collectives import check_same, check_same_weights, gather_json  # noqa: E402
from drumline.rank.determinism import seed_shared  # noqa: E402
from drumline.rank.rendezvous.rank_facts import rank_facts  # noqa: E402
from drumline.rank.rendezvous.rank_rendezvous import StartOptions, join_rendezvous  # noqa: E402
from drumline.rank.rendezvous.rank_store import open_store  # noqa: E402
from drumline.training.job.job import flat, make_manager  # noqa: E402
from drumline.training.manager import RunManager  # noqa: E402
from drumline.training.tasks.built_in import GPT, load_task  # noqa: E402

CONFIG = Config(data=DataConfig(name="digits"), model=ModelConfig(widths=(16, 32, 64)))
GOAL_MS = 300


def parts_of(ddp: RunManager) -> dict[str, Callable[[], object]]:
    """What is done before the first step, by name."""
    seed_shared(0)  # since `wrap` each rank draws numbers of its own
    task = load_task("digits")(CONFIG)
    data = task.train_data()
    small = task.model().to(ddp.device)
    large = GPT(vocab_size=256, context=128, layers=12, heads=8, width=256).to(ddp.device)
    topology = topology_from(os.environ)
    assert topology is not None
    store = (
        open_store(topology, timeout_s=60) if topology.agent_hosts_store else ddp.connection.store
    )
    assert store is not None
    facts: dict[str, dict[str, object]] = {}

    def collect() -> None:
        compared = {"seed": 0, "number of ranks": ddp.world_size}
        collected = rank_facts(
            os.environ,
            backend=ddp.backend or "",
            device=ddp.device,
            options=compared,
            settings=flat(CONFIG),
        )
        facts.update(collected)

    def rendezvous() -> None:
        join_rendezvous(store, topology, StartOptions(timeout_s=60, facts=facts))

    def compare_data() -> None:
        check_same({"data": fingerprint(data)}, host=ddp.host, next_step="")

    return {
        "facts (versions, settings, code)": collect,
        "rendezvous and comparison": rendezvous,
        "data": compare_data,
        "weights (MiniResNet)": lambda: check_same_weights(small, host=ddp.host, device=ddp.device),
        "besides: weights of a GPT, 9.5 M": lambda: check_same_weights(
            large, host=ddp.host, device=ddp.device
        ),
    }


def slowest_ms(work: Callable[[], object], ddp: RunManager) -> float:
    ddp.barrier()
    begun = time.perf_counter()
    work()
    taken = (time.perf_counter() - begun) * 1e3
    return float(max(gather_json(taken)))


def run_rank(rounds: int) -> None:
    ddp = make_manager(CONFIG)
    ddp.setup()
    ddp.wrap(load_task("digits")(CONFIG).model())
    start_ms = max(gather_json((time.perf_counter() - BEGUN) * 1e3))
    parts = parts_of(ddp)
    times = {
        name: [slowest_ms(work, ddp) for _ in range(rounds + 1)] for name, work in parts.items()
    }
    if ddp.is_main_process():
        print(f"{ddp.world_size} ranks, a start takes {start_ms:.0f} ms")
        *counted, large = [
            (name, statistics.median(taken[1:]), taken[0]) for name, taken in times.items()
        ]
        usual_total = sum(usual for _, usual, _ in counted)
        first_total = sum(first for _, _, first in counted)
        total = ("all of it", usual_total, first_total)
        for name, usual, first in (*counted, total, large):
            share = f"{usual / start_ms:>6.1%} of the start"
            print(
                f"  {name:<34} {usual:>8.1f} ms   (the first time {first:.1f} ms) {share}",
                flush=True,
            )
    ddp.barrier()
    ddp.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks to measure on [2,4]")
    parser.add_argument("--rounds", type=int, default=15, help="rounds after the first [15]")
    options = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(options.rounds)
        return
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores; goal: {GOAL_MS} ms"
    )
    for num_ranks in options.ranks.split(","):
        start_ranks(int(num_ranks), "benchmarks.preflight", "--rounds", str(options.rounds))


if __name__ == "__main__":
    main()
