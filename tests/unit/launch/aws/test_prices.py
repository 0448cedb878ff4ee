"""What is said of prices: "at most" only where it holds, and unknown where a part is unknown."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from drumline.launch.aws.cluster_plan import ClusterPlan, Hardware
from drumline.launch.aws.cluster_settings import ClusterSettings
from drumline.launch.aws.prices import Cost, fixed_cost
from drumline.launch.aws.stack import price_tags, price_words

G6 = Hardware(
    name="g6.12xlarge", arch="x86_64", num_vcpus=48, num_gpus=4, gpu="L4", num_efas=1, num_cards=1
)
DISKS = fixed_cost("2 x disk of 150 GiB", 0.001, 300)
NAT = fixed_cost("NAT gateway", 0.045, ends_with_nodes=False)
UNKNOWN = fixed_cost("2 x public address", None, 2)
MADE = datetime(2026, 11, 17, tzinfo=UTC)


def on_demand(price: float | None) -> Cost:
    return fixed_cost("2 x g6.12xlarge (on-demand)", price, 2)


def spot(limit: float | None) -> Cost:
    return Cost("2 x g6.12xlarge (spot)", 2.0, 2, highest_price=limit)


def price_lines(*costs: Cost) -> list[str]:
    parameters = {
        "Zone": "us-east-1a",
        "ImageId": "ami-1",
        "VolumeId": "",
        "EndsAt": "E",
        "SubnetId": "",
        "SshFrom": "",
    }
    plan = ClusterPlan(
        settings=ClusterSettings(type="g6.12xlarge", hours=10.0),
        hardware=G6,
        parameters={**parameters, "Efa": "true"},
        costs=costs,
        volume_price=None,
        notes=(),
    )
    return [line.removeprefix("price   ") for line in plan.lines() if line.startswith("price   ")][
        len(costs) :
    ]


@pytest.mark.parametrize(
    ("costs", "together", "end"),
    [
        (
            (on_demand(5.0), DISKS),
            "together $10.30 an hour, $247.20 a day",
            "until its end at most $103.00",
        ),
        (
            (on_demand(5.0), DISKS, UNKNOWN),
            "together unknown, and until its end: no listed price for 2 x public address",
            None,
        ),
        (
            (on_demand(None), DISKS, UNKNOWN),
            "together unknown, and until its end: no listed price for 2 x g6.12xlarge (on-demand) and "
            "2 x public address",
            None,
        ),
        (
            (spot(None), DISKS),
            "together $4.30 an hour, $103.20 a day",
            "until its end unknown: spot prices change ($43.00 at the current price); --max-price limits them",
        ),
        (
            (spot(3.5), DISKS),
            "together $4.30 an hour, $103.20 a day",
            "until its end at most $73.00",
        ),
    ],
)
def test_a_plan_says_at_most_only_where_it_holds(
    costs: tuple[Cost, ...], together: str, end: str | None
) -> None:
    assert price_lines(*costs) == [
        together,
        *([] if end is None else [end]),
        "beside it traffic, and EFS: unknown for a GB a month, and more for each GB read or written",
    ]


def cost_so_far(*costs: Cost, hours: float) -> str:
    """As `status` shows it, of a cluster that may run for 10 hours."""
    tags = [{"Key": key, "Value": value} for key, value in price_tags(costs).items()]
    ends = (MADE + timedelta(hours=10)).strftime("%Y-%m-%dT%H:%M:%SZ")
    stack: dict[str, Any] = {
        "CreationTime": MADE,
        "Tags": tags,
        "Parameters": [{"ParameterKey": "EndsAt", "ParameterValue": ends}],
    }
    return price_words(stack, MADE + timedelta(hours=hours))


def test_status_counts_disks_and_the_nat_gateway_until_they_end() -> None:
    costs = (on_demand(5.0), DISKS, NAT)
    assert cost_so_far(*costs, hours=2) == "at most $20.69, beside EFS and traffic"
    # 10 hours of nodes and disks, and 100 of the NAT gateway, which nothing ends but `down`.
    assert cost_so_far(*costs, hours=100) == "at most $107.50, beside EFS and traffic"


@pytest.mark.parametrize("cost", [spot(None), on_demand(None)])
def test_status_says_that_a_price_is_unknown(cost: Cost) -> None:
    assert cost_so_far(cost, DISKS, hours=2) == (
        "at an unknown price (a part has no listed price, or is a spot instance without --max-price)"
    )
    assert cost_so_far(spot(3.5), DISKS, hours=2) == "at most $14.60, beside EFS and traffic"
