"""Which variables are printed, with which reason: only those that a finding or a measurement calls
for."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from drumline.tools.doctor.finding import Finding, VariableFix
from drumline.tools.doctor.machine import machine_facts
from drumline.tools.doctor.machine.machine_checks import machine_findings
from drumline.tools.doctor.machine.machine_facts import card_facts
from drumline.tools.doctor.pairs.pair_checks import pair_findings
from drumline.tools.doctor.pairs.survey import OPEN, Edge, HostRecord, Survey
from drumline.tools.tune.tuning import TunedVariable, tuned_variables, tuning_findings
from tests.unit.tools.doctor.machines import gpu, healthy, network

HOSTS = ("a", "b")
GBIT = 1e9 / 8


def cards(*rdma: tuple[str, str], gbit: float | None = None, **facts: Any) -> dict[str, Any]:
    return {
        "rdma": [{"name": name, "kind": kind} for name, kind in rdma],
        "interfaces": {"eth0": {"gbit": gbit, "vendor": "0x15b3"}},
        "nccl_plugin": None,
        **facts,
    }


def two_hosts(speed: float = 9.0, outcomes: dict[str, str] | None = None, **facts: Any) -> Survey:
    """Host a and b, which reach each other at eth0; `outcomes`: the outcome of the other addresses of
    b."""
    hosts = []
    interfaces = [network("lo", "127.0.0.1"), network("eth0", "10.0.0.1")]
    interfaces += [
        network(f"eth0x{place}", address) for place, address in enumerate(outcomes or {})
    ]
    for name in HOSTS:
        host_facts = healthy(
            name,
            **{
                key: value[name] if isinstance(value, Both) else value
                for key, value in facts.items()
            },
        )
        record = HostRecord(
            name, name, hostname=name, address="10.0.0.1", interfaces=interfaces, facts=host_facts
        )
        record.gloo = record.nccl = {"name": "eth0", "address": "10.0.0.1"}
        hosts.append(record)
    edges = {
        pair: Edge(data=OPEN, bytes_per_s=speed * GBIT, latency_s=1e-5) for pair in ((0, 1), (1, 0))
    }
    edges[0, 1].others = outcomes
    return Survey(hosts, 29500, edges=edges)


class Both(dict[str, Any]):
    """A value for each host."""


def tuned(survey: Survey) -> list[TunedVariable]:
    facts = {host.name: host.facts for host in survey.hosts if host.facts}
    findings = [*tuning_findings(facts, survey), *pair_findings(survey)]
    findings += [
        finding
        for host_facts in facts.values()
        for finding in machine_findings(host_facts, many_hosts=True)
    ]
    return tuned_variables(findings, facts)


def lines(survey: Survey) -> list[str]:
    return [variable.line() for variable in tuned(survey)]


def test_a_healthy_cluster_needs_nothing() -> None:
    assert lines(two_hosts()) == []
    assert lines(two_hosts(gpus=[])) == []


def test_an_interface_that_nobody_reaches_is_excluded() -> None:
    survey = two_hosts(outcomes={"192.168.0.2": "no answer"})
    (line,) = lines(survey)
    assert line == (
        "export NCCL_SOCKET_IFNAME='=eth0'  # b: NCCL would also use eth0x0 (192.168.0.2), which no other host "
        "reaches; eth0 (10.0.0.1) works"
    ), "an exact name, as another one begins with it"
    assert lines(two_hosts(outcomes={"192.168.0.2": OPEN})) == []
    assert lines(two_hosts(outcomes={"192.168.0.2": "no answer"}, gpus=[])) == [], (
        "NCCL is not used"
    )


def test_gloo_on_the_loopback_gets_the_interface_that_works() -> None:
    survey = two_hosts(gpus=[])
    for host in survey.hosts:
        host.gloo = {"name": "lo", "address": "127.0.0.1"}
    assert lines(survey) == [
        "export GLOO_SOCKET_IFNAME=eth0  # gloo uses lo (127.0.0.1), which no other host reaches; eth0 (10.0.0.1) works"
    ]


def test_one_host_that_needs_it_and_one_that_does_so_by_itself_get_one_line() -> None:
    survey = two_hosts(gpus=[])
    survey.hosts[1].gloo = {"name": "lo", "address": "127.0.0.1"}
    (variable,) = tuned(survey)
    assert (variable.name, variable.value, variable.hosts) == ("GLOO_SOCKET_IFNAME", "eth0", ())


def test_hosts_whose_interfaces_have_different_names_get_a_line_each() -> None:
    survey = two_hosts(gpus=[])
    for host, name in zip(survey.hosts, ("eth0", "ens5"), strict=True):
        host.interfaces = [network("lo", "127.0.0.1"), network(name, "10.0.0.1")]
        host.gloo = {"name": "lo", "address": "127.0.0.1"}
    assert [(variable.value, variable.hosts) for variable in tuned(survey)] == [
        ("eth0", ("a",)),
        ("ens5", ("b",)),
    ]


def test_a_fast_link_that_one_connection_does_not_fill() -> None:
    commands = lines(two_hosts(speed=10.0, cards=cards(gbit=100.0)))
    assert commands == [
        "export NCCL_SOCKET_NTHREADS=4  # one connection carries 10 Gbit/s of the link's 100 Gbit/s, and there is no "
        "InfiniBand",
        "export NCCL_NSOCKS_PERTHREAD=3  # 12 connections fill the link",
    ]
    assert [
        line.partition(" ")[2][:22]
        for line in lines(two_hosts(speed=30.0, cards=cards(gbit=100.0)))
    ] == ["NCCL_SOCKET_NTHREADS=4"]


@pytest.mark.parametrize(
    ("speed", "facts"),
    [
        (90.0, {"cards": cards(gbit=100.0)}),  # one connection is enough
        (5.0, {"cards": cards(gbit=10.0)}),  # not a fast link
        (10.0, {"cards": cards()}),  # the kernel does not know
        (10.0, {"cards": cards(gbit=100.0), "gpus": []}),
        (10.0, {"cards": cards(("mlx5_0", "InfiniBand"), gbit=100.0)}),
        (
            10.0,
            {"cards": cards(interfaces={"eth0": {"gbit": 100.0, "vendor": "0x1d0f"}})},
        ),  # NCCL knows AWS
    ],
)
def test_where_more_connections_are_not_called_for(speed: float, facts: dict[str, Any]) -> None:
    assert lines(two_hosts(speed=speed, **facts)) == []


def test_infiniband_on_some_hosts_only_is_not_used() -> None:
    (variable,) = tuned(two_hosts(cards=Both(a=cards(("mlx5_0", "InfiniBand")), b=cards())))
    assert (variable.name, variable.value, variable.hosts) == ("NCCL_IB_DISABLE", "1", ())
    assert (
        variable.reason == "a can use InfiniBand or RoCE, but b cannot: no card has an active port"
    )


def test_cards_of_two_kinds_are_not_mixed() -> None:
    two_kinds = cards(("mlx5_0", "InfiniBand"), ("mlx5_1", "InfiniBand"), ("mlx5_2", "RoCE"))
    (line,) = lines(two_hosts(cards=two_kinds))
    assert line.startswith(
        "export NCCL_IB_HCA='=mlx5_0,mlx5_1'  # NCCL cannot connect InfiniBand (mlx5_0"
    )
    assert lines(two_hosts(cards=cards(("mlx5_0", "RoCE"), ("mlx5_1", "RoCE")))) == []


def test_a_value_that_is_right_for_one_host_is_not_set_on_another() -> None:
    mixed = cards(("mlx5_0", "InfiniBand"), ("mlx5_1", "RoCE"))
    one_kind = cards(("mlx5_2", "InfiniBand"))
    (variable,) = tuned(two_hosts(cards=Both(a=mixed, b=one_kind)))
    assert (variable.name, variable.value, variable.hosts) == ("NCCL_IB_HCA", "=mlx5_0", ("a",))
    limited, free = ({"count": 64, "usable": usable, "quota": None} for usable in (8, 64))
    (variable,) = tuned(two_hosts(cpus=Both(a=limited, b=free)))
    assert (variable.name, variable.value, variable.hosts) == ("OMP_NUM_THREADS", "4", ("a",))


def test_the_example_of_the_docs_is_what_is_printed() -> None:
    slow = {"NCCL_P2P_DISABLE": "1"}
    survey = two_hosts(speed=22.0, cards=cards(gbit=100.0), variables=Both(a=slow, b={}))
    for host in survey.hosts:
        host.gloo = {"name": "lo", "address": "127.0.1.1"}
    example = (
        (Path(__file__).parents[4] / "docs" / "tuning.md")
        .read_text()
        .partition("```text\n")[2]
        .partition("```")[0]
    )
    shown = [line for line in example.splitlines() if line.startswith(("export", "unset"))]
    assert [line.replace("# a:", "# gpu-01:") for line in lines(survey)] == shown


def test_efa_needs_its_plugin_under_the_name_that_nccl_loads() -> None:
    efa = cards(("rdmap0s6", "EFA"), nccl_plugin="/opt/amazon/ofi-nccl/lib/libnccl-net.so")
    assert lines(two_hosts(cards=efa)) == [], "its plugin chooses EFA by itself"
    without = two_hosts(cards=cards(("rdmap0s6", "EFA")))
    assert lines(without) == []
    findings = tuning_findings({host.name: host.facts or {} for host in without.hosts}, without)
    assert [(finding.level, finding.where, finding.check) for finding in findings] == [
        ("problem", "a", "EFA"),
        ("problem", "b", "EFA"),
    ]
    renamed = cards(("rdmap0s6", "EFA"), nccl_plugin="/opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so")
    assert lines(two_hosts(cards=renamed)) == [
        "export NCCL_NET_PLUGIN=ofi  # EFA's plugin is called libnccl-net-ofi.so, and NCCL looks for libnccl-net.so "
        "only: it would use TCP"
    ]
    assert lines(two_hosts(cards=renamed, variables={"NCCL_NET_PLUGIN": "ofi"})) == []


def test_where_nccl_uses_ip_over_infiniband_it_uses_nothing_else() -> None:
    survey = two_hosts(outcomes={"192.168.0.2": "no answer"})
    assert len(lines(survey)) == 1
    survey.hosts[1].interfaces = [*survey.hosts[1].interfaces, network("ib0", "10.1.0.1")]
    assert lines(survey) == []


@pytest.mark.parametrize(
    ("facts", "value", "words"),
    [
        ({"cpus": {"count": 64, "usable": 8, "quota": None}}, "4", "may use 8 of 64 processors"),
        ({"cpus": {"count": 64, "usable": 64, "quota": 6.0}}, "3", "may use 6 of 64 processors"),
        (
            {"threads": "32"},
            "16",
            "2 ranks with OMP_NUM_THREADS=32 are more threads than the 32 processors",
        ),
    ],
)
def test_threads_are_counted_from_the_processors_that_may_be_used(
    facts: dict[str, Any], value: str, words: str
) -> None:
    (variable,) = tuned_variables(
        tuning_findings({"a": healthy("a", **facts)}), {"a": healthy("a")}
    )
    assert (variable.name, variable.value) == ("OMP_NUM_THREADS", value)
    assert words in variable.reason


def test_variables_that_slow_a_run_are_unset_but_not_those_that_are_called_for() -> None:
    set_now = {"NCCL_ALGO": "Ring", "NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "INFO"}
    (variable,) = tuned(
        two_hosts(variables=set_now, cards=Both(a=cards(("m", "RoCE")), b=cards()))
    )[1:]
    assert variable.line() == (
        "unset NCCL_ALGO  # NCCL_ALGO=Ring: a pinned algorithm is slow or fails at sizes and world sizes it "
        "was not pinned for"
    )


def test_lines_can_be_sourced_whatever_a_host_is_called() -> None:
    evil = "x; touch /tmp/evil #"
    facts = {"a": healthy(evil), "b": healthy("b")}
    findings = [Finding("warning", "x", "a", "it's\n`id`", variable=VariableFix("A", evil))]
    findings += [Finding("warning", "x", "b", "other", variable=VariableFix("A", "2"))]
    script = "\n".join(
        variable.line().replace("\n", "\\n") for variable in tuned_variables(findings, facts)
    )
    run = f"hostname() {{ echo '{evil}'; }}\nset -eu\n{script}\nprintf %s \"$A\""
    assert (
        subprocess.run(["bash", "-c", run], capture_output=True, text=True, check=True).stdout
        == evil
    )


def test_cards_are_read_from_sys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
        "infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
        "infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
        "infiniband/mlx5_1/ports/1/state": "1: DOWN\n",
        "infiniband/mlx5_1/ports/1/link_layer": "Ethernet\n",
        "infiniband/rdmap0/ports/1/state": "4: ACTIVE\n",
        "infiniband/rdmap0/ports/1/link_layer": "Unspecified\n",
        "net/eth0/speed": "100000\n",
        "net/eth0/device/vendor": "0x15b3\n",
        "net/lo/speed": "",
        "net/veth1/speed": "-1\n",
        "drivers/efa/module": "",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "infiniband/rdmap0/device").mkdir()
    (tmp_path / "infiniband/rdmap0/device/driver").symlink_to(tmp_path / "drivers/efa")
    (tmp_path / "libnccl-net.so").touch()
    monkeypatch.setattr(machine_facts, "SYSTEM_CLASSES", tmp_path)
    facts = card_facts({"LD_LIBRARY_PATH": f"/nowhere:{tmp_path}"})
    assert [(card["name"], card["kind"]) for card in facts["rdma"]] == [
        ("mlx5_0", "InfiniBand"), ("rdmap0", "EFA"),
    ]  # fmt: skip
    assert facts["interfaces"]["eth0"] == {"gbit": 100.0, "vendor": "0x15b3"}
    assert (
        facts["interfaces"]["lo"] == facts["interfaces"]["veth1"] == {"gbit": None, "vendor": None}
    )
    assert facts["nccl_plugin"] == str(tmp_path / "libnccl-net.so")
    monkeypatch.setattr(machine_facts, "SYSTEM_CLASSES", tmp_path / "none")
    assert card_facts({})["rdma"] == []


def test_a_host_with_an_older_drumline_reports_no_cards() -> None:
    facts = {name: healthy(name, gpus=[gpu(0)]) for name in HOSTS}
    del facts["b"]["cards"]
    assert tuning_findings(facts, two_hosts()) == []
