"""Findings about NCCL's and torch's variables: bad, old and misspelt ones; and that the table is
consistent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from drumline.tools.doctor.machine.known_variables import (
    MEANING,
    PREFIXES,
    REMOVED,
    RENAMED,
    RULES,
    variable_faults,
)
from tests.unit.tools.doctor.machines import healthy


def said(**variables: str) -> list[tuple[str, str, str]]:
    return [
        (level, what, str(fix))
        for level, what, fix in variable_faults(healthy(variables=variables))
    ]


def every_rule() -> Iterator[tuple[str, str, str, str]]:
    for level, rules in RULES.items():
        for setting, what in rules.items():
            name, _, value = setting.partition("=")
            yield name, value, level, what


def test_the_table_holds_together() -> None:
    old = RENAMED | REMOVED
    assert all(name.startswith(PREFIXES) for name in MEANING.keys() | old.keys())
    assert {name for name, *_ in every_rule()} <= MEANING.keys()
    assert {new for new in old.values() if new} <= MEANING.keys()


def test_a_harmless_setting_is_no_finding() -> None:
    assert (
        said(NCCL_DEBUG="WARN", NCCL_P2P_DISABLE="0", NCCL_IB_HCA="mlx5", OMP_NUM_THREADS="8") == []
    )
    assert said(CUDA_SOMETHING="1", NCCL_UNKNOWN_SETTING="1") == []


def test_each_rule_is_reported_with_its_value_and_a_fix() -> None:
    for name, value, level, what in every_rule():
        fix = "export NCCL_DEBUG=WARN" if name == "NCCL_DEBUG" else f"unset {name}"
        assert said(**{name: value.lower() or "x"}) == [
            (level, f"{name}={value.lower() or 'x'}: {what}", fix)
        ]


NAMES = [
    (
        "NCCL_ASYNC_ERROR_HANDLING",
        "1",
        "note",
        "NCCL_ASYNC_ERROR_HANDLING=1 is a deprecated name; it is now TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "unset NCCL_ASYNC_ERROR_HANDLING; export TORCH_NCCL_ASYNC_ERROR_HANDLING=1",
    ),
    (
        "NCCL_ASYNC_ERROR_HANDLING",
        "0",
        "problem",
        "NCCL_ASYNC_ERROR_HANDLING=0: a rank that waits for a failed rank waits forever",
        "unset NCCL_ASYNC_ERROR_HANDLING",
    ),
    (
        "NCCL_BLOCKING_WAIT",
        "1",
        "warning",
        "NCCL_BLOCKING_WAIT=1: the host waits for every collective: nothing overlaps",
        "unset NCCL_BLOCKING_WAIT",
    ),
    (
        "NCCL_LL_THRESHOLD",
        "0",
        "warning",
        "NCCL_LL_THRESHOLD=0 has no effect any more",
        "unset NCCL_LL_THRESHOLD",
    ),
    (
        "NCCL_MAX_NRINGS",
        "4",
        "note",
        "NCCL_MAX_NRINGS=4 is a deprecated name; it is now NCCL_MAX_NCHANNELS",
        "unset NCCL_MAX_NRINGS; export NCCL_MAX_NCHANNELS=4",
    ),
    (
        "NCCL_IB_GDR_LEVEL",
        "2",
        "warning",
        "NCCL_IB_GDR_LEVEL=2 has no effect any more; see NCCL_NET_GDR_LEVEL",
        "unset NCCL_IB_GDR_LEVEL",
    ),
    (
        "NCCL_SOCKET_IFNAMES",
        "(set; not shown)",
        "warning",
        "NCCL_SOCKET_IFNAMES is not a known variable; did you mean NCCL_SOCKET_IFNAME?",
        'export NCCL_SOCKET_IFNAME="$NCCL_SOCKET_IFNAMES"; unset NCCL_SOCKET_IFNAMES',
    ),
    (
        "CUDA_VISIBLE_DEVICE",
        "(set; not shown)",
        "warning",
        "CUDA_VISIBLE_DEVICE is not a known variable; did you mean CUDA_VISIBLE_DEVICES?",
        'export CUDA_VISIBLE_DEVICES="$CUDA_VISIBLE_DEVICE"; unset CUDA_VISIBLE_DEVICE',
    ),
]


def test_old_and_misspelt_names() -> None:
    for name, value, level, what, fix in NAMES:
        assert said(**{name: value}) == [(level, what, fix)]


def test_the_page_tells_every_rule() -> None:
    page = (Path(__file__).parents[4] / "docs" / "doctor.md").read_text()
    explained = {name for name, *_ in every_rule()} | RENAMED.keys() | REMOVED.keys()
    assert {name for name in explained if f"`{name}" not in page} == set()
