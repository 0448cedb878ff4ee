"""The coordinator: who is asked what, in what order, and what it makes of nodes that fail."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from dataclasses import asdict

import pytest

from drumline.launch.hosts import Host
from drumline.launch.ssh.host_connection import HostConnection
from drumline.tools.doctor.machine.machine_facts import HostSettings
from drumline.tools.doctor.pairs import examination, node_server, probe
from drumline.tools.doctor.pairs.examination import (
    START_S,
    Coordinator,
    NodeClient,
    NodeLostError,
    NodeRequestError,
)
from drumline.tools.doctor.pairs.pair_checks import pair_findings
from drumline.tools.doctor.pairs.survey import HostRecord, Survey
from drumline.tools.doctor.ranks.rank_processes import HostRanks
from tests.unit.tools.doctor.simulated import Cluster, examine


def test_hosts_that_are_down_are_left_out_and_closed_ways_are_not_measured() -> None:
    cluster = Cluster(6, down=[5], closed={(0, 1)}, holes={(2, 3)})
    examine(cluster)
    assert {action for number, action in cluster.requests if number == 5} == set()
    measured = Counter(number for number, action in cluster.requests if action == "measure")
    assert measured == {0: 3, 1: 4, 2: 3, 3: 4, 4: 4}


def test_the_limits_leave_time_for_an_answer_within_15_s() -> None:
    # A host that is silent, names that nobody resolves, ports that are closed; what is left is for
    # measuring speed.
    assert START_S + node_server.RESOLVE_S + probe.CONNECT_S < 15 - 1


def test_a_way_that_looks_slow_is_measured_again() -> None:
    cluster = Cluster(4, slow=[1])
    examine(cluster)
    assert Counter(action for _, action in cluster.requests)["measure"] == 12 + 2 * 6


def test_faults_of_a_simulated_cluster_are_reported_for_the_right_hosts() -> None:
    cluster = Cluster(
        24,
        down=[5],
        closed={(number, 3) for number in range(24)},
        unnamed={(9, 4)},
        holes={(7, 8)},
        slow=[6],
        late=[2],
    )
    reported = {(finding.check, finding.where) for finding in pair_findings(examine(cluster))}
    assert reported == {
        ("host", "n005"),
        ("data ports", "n003"),
        ("name", "n009 -> n004"),
        ("mtu", "n007 -> n008"),
        ("bandwidth", "n006"),
        ("clock", "n002"),
    }


def client(*words: str, start_s: float = START_S) -> NodeClient:
    return NodeClient(HostConnection(Host("host"), [*words], start_s))


def examined(*programs: str) -> Survey:
    """Real processes in the place of nodes, which run these lines of Python."""
    hosts = [HostRecord(f"host{number}", "localhost") for number in range(len(programs))]
    survey = Survey(hosts, 29500)
    clients = [client(sys.executable, "-c", program) for program in programs]
    coordinator = Coordinator(survey, clients, HostSettings({}), lambda _: None)

    async def all_of_it() -> None:
        try:
            await examination.examine(coordinator)
        finally:
            await coordinator.close()

    asyncio.run(all_of_it())
    return survey


HELLO = """print('{"kind": "hello", "protocol": 5}', flush=True)\n"""
# The request `begin`, after a heartbeat.
BEGIN = "while '\"begin\"' not in input(): pass\n"
ANSWER = BEGIN + """print('{"kind": "answer", "id": 1, %s}', flush=True)\nwhile True: input()"""


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (
            "import sys; print('ssh: connect to host b port 22: No route to host', file=sys.stderr); sys.exit(255)",
            "it is unreachable: it is down, or a firewall drops",
        ),
        (HELLO + "input(); raise SystemExit('Killed')", "its program exited (Killed)"),
        (
            """print('{"kind": "hello", "protocol": 0}'); input()""",
            "its version of drumline is different",
        ),
        (
            HELLO + ANSWER % '"ok": {"host": "b"}',
            "its answer is not that of the doctor: Object missing required field `interfaces`",
        ),
        (HELLO + ANSWER % '"error": "no"', "no"),
    ],
)
def test_a_node_that_fails_is_absent_with_a_reason(program: str, words: str) -> None:
    (host,) = examined(program).hosts
    assert host.absent is not None
    assert words in host.absent
    assert host.absent_fix


def test_closing_does_not_wait_for_a_host_that_has_not_answered() -> None:
    async def try_it() -> float:
        node = client(sys.executable, "-c", "import time; time.sleep(60)")
        opening = asyncio.create_task(node.open())
        await asyncio.sleep(0.2)
        begin = time.monotonic()
        await node.close()
        with pytest.raises(NodeLostError):
            await opening
        return time.monotonic() - begin

    assert asyncio.run(try_it()) < 3


REAL = "from drumline.tools.doctor.pairs import node_server; node_server.main()"
# A real node, but for one answer.
ODD = (
    "from drumline.tools.doctor.pairs import node_server; node_server.{method} = lambda *_, **__: {answer}; "
    "node_server.main()"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "answer"),
    [
        ("host_facts", [3]),
        ("resolve_all", []),
        ("NodeServer._listen", {"data": "x"}),
        ("NodeServer._probe", 7),
        ("NodeServer._measure", {"bytes_per_s": "x"}),
    ],
)
def test_a_node_whose_answers_have_another_form_is_left_out_and_the_others_are_not(
    method: str, answer: object
) -> None:
    good, odd = examined(REAL, ODD.format(method=method, answer=answer)).hosts
    assert good.absent is None, good.absent
    assert odd.absent is not None
    assert "its answer is not that of the doctor: " in odd.absent


def test_a_node_without_an_answer_counts_as_lost_and_greetings_of_a_login_do_not_matter() -> None:
    async def try_it() -> None:
        node = client(
            sys.executable, "-c", "print('Last login: today')\n" + HELLO + "while True: input()"
        )
        try:
            await node.open()
            with pytest.raises(
                NodeLostError, match=r"it did not answer within 0.05 s \(asked for: names\)"
            ):
                await node.ask("names", 0.05)
            with pytest.raises(NodeLostError):
                await node.ask("names", 5)
        finally:
            await node.close()
        assert node.connection.ssh_code is not None

    asyncio.run(try_it())


def test_a_real_node_refuses_what_is_no_action_and_wrong_arguments() -> None:
    async def try_it() -> None:
        node = client(sys.executable, "-m", "drumline.tools.doctor.pairs.node_server")
        target = {"node": 1, "address": "127.0.0.1", "port": 1}
        ranks = asdict(HostRanks(0, 1, 1, "127.0.0.1", 1, 9.0))
        try:
            await node.open()
            for action, arguments, words in (
                ("system", {"command": "true"}, "there is no action 'system'"),
                (
                    "measure",
                    {"target": target, "seconds": 99.0},
                    "Expected `float` <= 2.0 - at `$.seconds`",
                ),
                ("probe", {"targets": []}, "this node does not listen yet"),
                (
                    "listen",
                    {"token": "00"},
                    "Expected `str` matching regex '^[0-9a-f]{32}$' - at `$.token`",
                ),
                (
                    "begin",
                    {"environment": {"A": 1}},
                    "Expected `str`, got `int` - at `$.environment[...]`",
                ),
                (
                    "collectives",
                    {**ranks, "backend": "mpi"},
                    "Invalid enum value 'mpi' - at `$.backend`",
                ),
            ):
                with pytest.raises(NodeRequestError) as caught:
                    await node.ask(action, 20, **arguments)
                assert str(caught.value) == words
        finally:
            await node.close()

    asyncio.run(try_it())
