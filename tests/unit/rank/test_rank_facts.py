"""What of a rank can be compared, and how differences, absent ranks and their nodes are put into
words."""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from drumline.base.errors import PreflightError
from drumline.base.rank_environment import Topology
from drumline.base.text import by_rank, number_ranges
from drumline.rank.rendezvous.rank_facts import code_hashes, plain, rank_facts
from drumline.rank.rendezvous.rank_rendezvous import too_late, waiting_for
from drumline.watch.fact_differences import check_differences, differences

CPU = torch.device("cpu")


@dataclass
class Owned:
    """As a user's own settings may be."""

    tags: set[str]


def test_facts_are_plain_and_have_what_decides_a_run() -> None:
    settings = {
        "optim": {"lr": 0.1},
        "empty": {},
        "dtype": torch.float16,
        "path": Path("a/b"),
        "odd": {3, 1, 2},
        "local_rank": 3,
    }
    environment = {"GLOO_DEVICE_TRANSPORT": "TCP", "NCCL_ALGO": "Ring"}
    facts = rank_facts(
        environment, backend="gloo", device=CPU, options={"seed": 1}, settings=settings
    )
    assert json.loads(json.dumps(facts)) == facts
    assert facts["versions"]["torch's version"] == torch.__version__
    assert facts["versions"]["Python's version"] == f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert facts["variables"]["the variable GLOO_DEVICE_TRANSPORT"] == "TCP"
    assert "the variable NCCL_ALGO" not in facts["variables"], "says nothing under gloo"
    assert facts["variables"]["the variable TORCH_DISTRIBUTED_DEBUG"] == "OFF", (
        "as if it were set to that"
    )
    assert facts["settings"]["the seed"] == 1
    assert facts["settings"]["the setting optim.lr"] == 0.1
    assert facts["settings"]["the setting empty"] == {}
    assert facts["settings"]["the setting dtype"] == "torch.float16"
    assert facts["settings"]["the setting odd"] == ["1", "2", "3"]
    assert "the setting local_rank" not in facts["settings"], "it differs by right"
    assert facts["code"]
    nccl = rank_facts(
        environment, backend="nccl", device=CPU, options={}, settings={}, same_code=False
    )
    assert nccl["code"] == {}
    assert nccl["variables"]["the variable NCCL_ALGO"] == "Ring"
    assert nccl["variables"]["the variable NCCL_PROTO"] == "not set"


def test_a_value_is_the_same_text_in_every_process() -> None:
    assert plain(object()) == "object"
    assert plain({"a": (1, [None, "x"])}) == {"a": [1, [None, "x"]]}
    assert plain(nn.ReLU()) == "ReLU()"
    assert plain(float("nan")) == plain(float("nan"))
    assert plain(Owned({"b", "a"})) == {"tags": ["a", "b"]}
    assert plain(lambda: 0).startswith("function")


def test_code_is_that_of_the_user_and_of_drumline_wherever_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "some_user_code.py"
    source.write_bytes(b"a = 1\r\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__("some_user_code")
    before = code_hashes()
    assert "drumline.rank.rendezvous.rank_facts" in before
    assert not {"json", "torch", "pytest", "numpy"} & before.keys()
    source.write_bytes(b"a = 1\n")
    assert code_hashes() == before, "only the ends of lines"
    source.write_bytes(b"a = 2\n")
    assert {name for name, digest in code_hashes().items() if before.get(name) != digest} == {
        "some_user_code"
    }
    source.unlink()
    assert "some_user_code" not in code_hashes()
    monkeypatch.delitem(sys.modules, "some_user_code")


def test_modules_that_load_at_the_first_access_are_not_accessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "lazy_user_code.py"
    source.write_text("raise ImportError('a dependency that is not installed')\n")
    spec = importlib.util.spec_from_file_location("lazy_user_code", source)
    assert spec is not None
    assert spec.loader is not None
    lazy = importlib.util.module_from_spec(spec)
    importlib.util.LazyLoader(spec.loader).exec_module(lazy)
    monkeypatch.setitem(sys.modules, "lazy_user_code", lazy)
    monkeypatch.setitem(sys.modules, "no_module", object())
    assert code_hashes().keys() >= {"lazy_user_code"}


def test_a_module_that_some_have_not_loaded_is_no_difference() -> None:
    assert differences([{"code": {"m": "1", "only here": "2"}}, {"code": {"m": "1"}}]) == []
    (difference,) = differences([{"code": {"m": "1"}}, {}, {"code": {"m": "3"}}])
    assert (difference.name, difference.values) == ("m", ["1", None, "3"])
    (difference,) = differences([{"settings": {"lr": None}}, {"settings": {"lr": 0.1}}])
    assert difference.values == [None, 0.1]


def test_another_kind_of_gpu_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    facts = [{"machine": {"the kind of GPU": kind}} for kind in ("H100", "H100", "A100")]
    with caplog.at_level(logging.WARNING, "drumline"):
        check_differences(facts, ["a", "a", "b"])
    assert caplog.messages == [
        "ranks differ in the kind of GPU: ranks 0, 1 (a): H100; rank 2 (b): A100. The slowest GPU slows all ranks, "
        "and last bits may differ."
    ]


def test_many_differences_are_cut_short() -> None:
    facts = [{"settings": {f"the setting {n}": rank for n in range(20)}} for rank in range(2)]
    with pytest.raises(PreflightError) as caught:
        check_differences(facts, ["a", "b"])
    lines = str(caught.value).splitlines()
    assert lines[0] == "ranks differ in 20 things:"
    assert lines[1] == "  - the setting 0: rank 0 (a): 0; rank 1 (b): 1"
    assert lines[-2:] == [
        "  - and 12 more",
        "  try: start every rank with the same command and settings",
    ]


def test_many_ranks_are_ranges_and_many_hosts_a_few() -> None:
    assert number_ranges([7, 0, 1, 4, 5, 6]) == "0, 1, 4-7"
    hosts = [f"n{number // 8}" for number in range(64)]
    assert (
        by_rank([0] * 63 + [1], hosts)
        == "ranks 0-62 (n0, n1, n2, n3 and 4 more): 0; rank 63 (n7): 1"
    )


@pytest.mark.parametrize(
    ("topology", "hosts", "expected"),
    [
        (Topology(world_size=8, local_world_size=4), range(4), "ranks 4-7 (node 1)"),
        (Topology(world_size=8, local_world_size=4), range(6), "ranks 6, 7 (b)"),
        (
            Topology(world_size=8, local_world_size=4, node_names=("a", "gpu7")),
            range(4),
            "ranks 4-7 (gpu7)",
        ),
        (Topology(world_size=8, local_world_size=8), range(7), "rank 7"),
        (Topology(world_size=8, local_world_size=3), range(7), "rank 7"),
        (Topology(world_size=6, local_world_size=2), [0, 2, 3], "rank 1 (a), ranks 4, 5 (node 2)"),
    ],
)
def test_absent_ranks_are_named_by_their_node(
    topology: Topology, hosts: list[int], expected: str
) -> None:
    here = {rank: "a" if rank < topology.local_world_size else "b" for rank in hosts}
    assert waiting_for(topology, here) == f"rank 0 on {topology.host} waits for {expected}"
    assert f"missing {expected}; here: 0" in str(too_late(topology, here, timeout_s=9))
    assert waiting_for(topology, dict.fromkeys(range(topology.world_size), "a")) == ""
