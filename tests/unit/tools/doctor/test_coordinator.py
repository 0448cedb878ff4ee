"""The coordinator: who is asked what, in what order, and what it makes of nodes that fail."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from typing import Any

import pytest

from drumline.tools.doctor.pairs import examination, probe
from drumline.tools.doctor.pairs.coordinator import START_S, Coordinator
from drumline.tools.doctor.pairs.node_client import NodeClient, NodeLostError, NodeRequestError
from drumline.tools.doctor.pairs.pair_checks import pair_findings
from drumline.tools.doctor.pairs.survey import HostRecord, Survey
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
    assert START_S + probe.RESOLVE_S + probe.CONNECT_S < 15 - 1


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


def examined(*programs: str) -> Survey:
    """Real processes in the place of nodes, which run these lines of Python."""
    hosts = [HostRecord(f"host{number}", "localhost") for number in range(len(programs))]
    survey = Survey(hosts, 29500)
    coordinator = Coordinator(survey, {"variables": {}, "run_folder": "."}, lambda _: None)

    def opener(program: str) -> Any:
        return lambda: NodeClient.start(sys.executable, "-c", program)

    async def all_of_it() -> None:
        try:
            await examination.examine(coordinator, [opener(program) for program in programs])
        finally:
            await coordinator.close()

    asyncio.run(all_of_it())
    return survey


HELLO = """print('{"doctor": "drumline", "form": 2}', flush=True)\n"""


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (
            "import sys; print('ssh: connect to host b port 22: No route to host', file=sys.stderr); sys.exit(255)",
            "it is unreachable: it is down, or a firewall drops",
        ),
        (
            HELLO + "input(); print('what?', flush=True); input()",
            "received what is not JSON: b'what?",
        ),
        (
            HELLO + "input(); print('x' * 2_000_000, flush=True); input()",
            "it sent a line of over 1,048,576 bytes",
        ),
        (
            HELLO + "input(); raise SystemExit('Killed')",
            "the doctor's program exited there: Killed",
        ),
        ("""print('{"doctor": "drumline", "form": 0}')""", "its version of drumline is different"),
        (
            "for _ in range(600): print('Welcome!')",
            "it prints a lot of text, but not the answer of the doctor's program",
        ),
        (
            HELLO + """input(); print('{"id": 1, "ok": {"host": "b"}}', flush=True); input()""",
            "its answer is not that of the doctor: interfaces is None; list is needed",
        ),
        (
            HELLO
            + """input(); print('{"id": 1, "ok": {"host": "\\\\u001b[31m"}}', flush=True); input()""",
            "is not printable",
        ),
        (HELLO + """input(); print('{"id": 1, "error": "no"}', flush=True); input()""", "no"),
    ],
)
def test_a_node_that_fails_is_absent_with_a_reason(program: str, words: str) -> None:
    (host,) = examined(program).hosts
    assert host.absent is not None
    assert words in host.absent
    assert host.absent_fix


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
        client = await NodeClient.start(
            sys.executable, "-c", "print('Last login: today')\n" + HELLO + "input(); input()"
        )
        try:
            await client.wait_for_hello()
            with pytest.raises(
                NodeLostError, match=r"it did not answer within 0.05 s \(asked for: clock\)"
            ):
                await client.ask("clock", 0.05)
            with pytest.raises(NodeLostError):
                await client.ask("clock", 5)
        finally:
            await client.close()
        assert client.process is not None
        assert client.process.returncode is not None

    asyncio.run(try_it())


def test_a_real_node_refuses_what_is_no_action_and_wrong_arguments() -> None:
    async def try_it() -> None:
        client = await NodeClient.start(
            sys.executable, "-m", "drumline.tools.doctor.pairs.node_server"
        )
        try:
            await client.wait_for_hello()
            for action, arguments, words in (
                ("system", {"command": "true"}, "there is no action 'system'"),
                ("measure", {"seconds": 99.0}, "seconds is 99.0; 0.001 to 2.0 is allowed"),
                ("probe", {"targets": []}, "this node does not listen yet"),
                ("listen", {"token": "00"}, "token has 1 bytes; 16 are needed"),
                ("begin", {"variables": {"A": 1}}, "variables are not all strings"),
            ):
                with pytest.raises(NodeRequestError) as caught:
                    await client.ask(action, 20, **arguments)
                assert str(caught.value) == words
        finally:
            await client.close()

    asyncio.run(try_it())
