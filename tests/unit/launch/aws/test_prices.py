"""What is said of prices: "at most" only where it holds, and unknown where a part is unknown."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from drumline.launch.aws.cluster_plan import ClusterPlan
from drumline.launch.aws.cluster_settings import ClusterSettings
from drumline.launch.aws.instance_type import Hardware
from drumline.launch.aws.prices import UNKNOWN, Cost, fixed_cost
from drumline.launch.aws.stack import price_tags, price_words

G6 = Hardware(
    arch="x86_64",
    num_vcpus=48,
    num_gpus=4,
    gpu="L4",
    num_efas=1,
    num_cards=1,
)
DISKS = fixed_cost("2 x disk of 150 GiB", 0.001, 300)
NAT = fixed_cost("NAT gateway", 0.045, ends_with_nodes=False)
ADDRESSES = fixed_cost("2 x public address", UNKNOWN, 2)
MADE = datetime(2026, 11, 17, tzinfo=UTC)


def on_demand(price: float) -> Cost:
    return fixed_cost("2 x g6.12xlarge (on-demand)", price, 2)


def spot(limit: float) -> Cost:
    return Cost("2 x g6.12xlarge (spot)", 4.0, limit * 2)


def plan_of(*costs: Cost, **changes: Any) -> ClusterPlan:
    settings = ClusterSettings(**{"type": "g6.12xlarge", "hours": 10.0, **changes})
    parameters = {"Zone": "us-east-1a", "ImageId": "ami-1", "VolumeId": "", "EndsAt": "E"}
    parameters |= {"SubnetId": "", "SshFrom": "", "Efa": "true", "Owner": "arn:jane"}
    parameters["Market"] = settings.market
    return ClusterPlan(
        settings=settings,
        hardware=G6,
        parameters=parameters,
        costs=costs,
        volume_price=0.3,
        notes=["the quota is enough"],
        unknowns=["whether us-east-1a has capacity"],
        other_zones={"us-east-1b": 2.5, "us-east-1c": UNKNOWN},
    )


def test_a_plan_is_one_table_with_what_was_checked_and_what_is_unknown() -> None:
    plan = plan_of(on_demand(5.0), DISKS, tag=("team=vision", "cost centre=7"))
    assert plan.lines() == [
        "cluster train in us-east-1a: 2 x g6.12xlarge (on-demand), 4 x L4 each",
        "else in us-east-1b, if there is no capacity before: $2.50 for an instance and hour",
        "else in us-east-1c, if there is no capacity before: unknown for an instance and hour",
        "owner   arn:jane, in the tags, with team=vision, with cost centre=7",
        "image   ami-1",
        "network a new VPC, EFA on 1 interface; nothing open to the outside",
        "volume  a new EFS volume at /mnt/shared, over TLS; `down` keeps it",
        "end     E at the latest; an instance ends itself after 60 idle minutes",
        "what is made                                               an hour  10 h at most",
        "2 x g6.12xlarge (on-demand)                                 $10.00       $100.00",
        "2 x disk of 150 GiB                                        $0.3000         $3.00",
        "VPC with a gateway endpoint for S3                            free          free",
        "security group, role, launch template, Auto Scaling group     free          free",
        "encrypted EFS volume, $0.3000 for a GB a month              by use        by use",
        "together, beside EFS and traffic                            $10.30       $103.00",
        "check   the quota is enough",
        "unknown whether us-east-1a has capacity",
    ]


@pytest.mark.parametrize(
    ("costs", "hour", "most"),
    [
        ((on_demand(5.0), DISKS), "$10.30", "$103.00"),
        ((on_demand(5.0), DISKS, ADDRESSES), "unknown", "unknown"),
        ((on_demand(UNKNOWN), DISKS), "unknown", "unknown"),
        ((spot(UNKNOWN), DISKS), "$4.30", "unknown"),
        ((spot(3.5), DISKS), "$4.30", "$73.00"),
    ],
)
def test_a_plan_says_at_most_only_where_it_holds(
    costs: tuple[Cost, ...], hour: str, most: str
) -> None:
    (together,) = [line for line in plan_of(*costs).lines() if line.startswith("together")]
    assert together.split()[-2:] == [hour, most]


def test_spot_prices_of_later_are_unknown_without_a_limit() -> None:
    line = (
        "unknown spot prices of later: $43.00 in all at the current ones; --max-price limits them"
    )
    assert plan_of(spot(UNKNOWN), DISKS, spot=True).lines()[-1] == line
    assert line not in plan_of(spot(3.5), DISKS, spot=True, max_price=3.5).lines()


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


@pytest.mark.parametrize("cost", [spot(UNKNOWN), on_demand(UNKNOWN)])
def test_status_says_that_a_price_is_unknown(cost: Cost) -> None:
    assert cost_so_far(cost, DISKS, hours=2) == (
        "at an unknown price (a part has no listed price, or is a spot instance without --max-price)"
    )
    assert cost_so_far(spot(3.5), DISKS, hours=2) == "at most $14.60, beside EFS and traffic"
