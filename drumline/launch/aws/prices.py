"""What things cost: on demand from AWS's price list, spot from the current market. What is not
found stays unknown."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from drumline.launch.aws.account import Account, Described

HOURS_A_MONTH = 730
"""As AWS converts prices by the month."""
UNKNOWN = math.inf
"""A price that is not known, and what is computed from it: above every limit."""


class _Product(NamedTuple):
    """As the price list knows it."""

    service: str
    unit: str
    attributes: Mapping[str, str]


_PRODUCTS = {
    "instance": _Product(
        "AmazonEC2",
        "Hrs",
        {
            "operatingSystem": "Linux",
            "tenancy": "Shared",
            "preInstalledSw": "NA",
            "capacitystatus": "Used",
            "marketoption": "OnDemand",
        },
    ),
    "disk": _Product("AmazonEC2", "GB-Mo", {"productFamily": "Storage", "volumeApiName": "gp3"}),
    "address": _Product("AmazonVPC", "Hrs", {"group": "VPCPublicIPv4Address"}),
    "nat": _Product("AmazonEC2", "Hrs", {"productFamily": "NAT Gateway"}),
    "volume": _Product("AmazonEFS", "GB-Mo", {"storageClass": "General Purpose"}),
}


@dataclass(frozen=True)
class Cost:
    """One part of the bill, in USD an hour."""

    what: str
    an_hour: float
    """Now."""
    most_an_hour: float
    """What it may become; unknown for a spot instance without a limit."""
    ends_with_nodes: bool = True
    """Otherwise it is paid until `down`."""

    def row(self, hours: float) -> tuple[str, str, str]:
        """Of a table: the price of an hour, and of so many at most."""
        return self.what, dollars(self.an_hour), dollars(self.most_an_hour * hours)


def fixed_cost(
    what: str,
    price: float,
    units: float = 1.0,
    *,
    ends_with_nodes: bool = True,
) -> Cost:
    """Of the price list: it stays as it is."""
    an_hour = price * units
    return Cost(what, an_hour, an_hour, ends_with_nodes)


def listed_price(account: Account, name: str, **attributes: str) -> float:
    """The highest price of a product in the region, in USD for an hour or (of a GB) a month;
    unknown if the list has none, or may not be read."""
    import jmespath

    product = _PRODUCTS[name]
    criteria = {**product.attributes, **attributes, "regionCode": account.region}
    matches = [
        {"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in criteria.items()
    ]
    entries: list[str] = []
    with account.optional("listed prices"):
        entries = account.all(
            "pricing",
            "get_products",
            "PriceList",
            ServiceCode=product.service,
            Filters=matches,
        )

    prices = "terms.OnDemand.*.priceDimensions[].*[]"
    of_unit = f"{prices} | [?unit == '{product.unit}'].pricePerUnit.USD"
    listed = [
        float(price)
        for entry in entries
        for price in jmespath.search(of_unit, json.loads(entry)) or ()
    ]
    return max(filter(None, listed), default=UNKNOWN)


def spot_prices(account: Account, instance_type: str) -> dict[str, float]:
    """Of a spot instance for an hour, by zone, now; empty if they may not be read."""
    history: list[Described] = []
    with account.optional("spot prices"):
        history = account.all(
            "ec2",
            "describe_spot_price_history",
            "SpotPriceHistory",
            InstanceTypes=[instance_type],
            ProductDescriptions=["Linux/UNIX"],
            StartTime=datetime.now(UTC),
        )
    return {
        entry["AvailabilityZone"]: float(entry["SpotPrice"])
        for entry in reversed(history)  # the newest is the first
    }


def dollars(amount: float) -> str:
    """The amount, or that it is unknown."""
    if amount == UNKNOWN:
        return "unknown"
    return f"${amount:,.2f}" if amount >= 1 else f"${amount:.4f}"
