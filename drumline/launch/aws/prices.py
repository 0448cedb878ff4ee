"""What things cost: on demand from AWS's price list, spot from the current market. What is not
found stays unknown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from drumline.launch.aws.account import Account, Described

HOURS_A_MONTH = 730
"""As AWS converts prices by the month."""


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
    "disk": _Product(
        "AmazonEC2", "GB-Mo", {"productFamily": "Storage", "volumeApiName": "gp3"}
    ),
    "address": _Product("AmazonVPC", "Hrs", {"group": "VPCPublicIPv4Address"}),
    "nat": _Product("AmazonEC2", "Hrs", {"productFamily": "NAT Gateway"}),
    "volume": _Product("AmazonEFS", "GB-Mo", {"storageClass": "General Purpose"}),
}


@dataclass(frozen=True)
class Cost:
    """One part of the bill, in USD an hour."""

    what: str
    an_hour: float | None
    """Now; None: unknown."""
    most_an_hour: float | None
    """What it may become; None: unknown, as that of a spot instance without a limit."""
    ends_with_nodes: bool = True
    """Otherwise it is paid until `down`."""


def fixed_cost(
    what: str,
    price: float | None,
    units: float = 1.0,
    *,
    ends_with_nodes: bool = True,
) -> Cost:
    """Of the price list: it stays as it is."""
    an_hour = times(price, units)
    return Cost(what, an_hour, an_hour, ends_with_nodes)


def times(price: float | None, units: float) -> float | None:
    """None where the price is unknown."""
    return None if price is None else price * units


def total(amounts: Iterable[float | None]) -> float | None:
    """None where a part is unknown."""
    parts = list(amounts)
    return None if None in parts else sum(part for part in parts if part is not None)


def listed_price(account: Account, name: str, **attributes: str) -> float | None:
    """The highest price of a product in the region, in USD for an hour or (of a GB) a month; None:
    the list has none, or may not be read."""
    product = _PRODUCTS[name]
    criteria = {**product.attributes, **attributes, "regionCode": account.region}
    matches = [
        {"Type": "TERM_MATCH", "Field": field, "Value": value}
        for field, value in criteria.items()
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

    prices = [
        price for entry in entries for price in _prices(json.loads(entry), product.unit)
    ]
    return max(prices, default=None)


def _prices(entry: Any, unit: str) -> Iterator[float]:
    """Those of an entry of the list that are not 0."""
    for term in entry.get("terms", {}).get("OnDemand", {}).values():
        for dimension in term["priceDimensions"].values():
            price = float(dimension["pricePerUnit"].get("USD", 0))
            if dimension["unit"] == unit and price:
                yield price


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
    newest = sorted(history, key=lambda entry: entry["Timestamp"])
    return {entry["AvailabilityZone"]: float(entry["SpotPrice"]) for entry in newest}


def dollars(amount: float | None) -> str:
    """The amount, or that it is unknown."""
    if amount is None:
        return "unknown"
    return f"${amount:,.2f}" if amount >= 1 else f"${amount:.4f}"
