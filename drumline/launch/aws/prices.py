"""What things cost: on demand from AWS's price list, spot from the current market. What is not
found stays unknown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from drumline.launch.aws.account import Account, AwsError

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
    "disk": _Product("AmazonEC2", "GB-Mo", {"productFamily": "Storage", "volumeApiName": "gp3"}),
    "address": _Product("AmazonVPC", "Hrs", {"group": "VPCPublicIPv4Address"}),
    "nat": _Product("AmazonEC2", "Hrs", {"productFamily": "NAT Gateway"}),
    "volume": _Product("AmazonEFS", "GB-Mo", {"storageClass": "General Purpose"}),
}


@dataclass(frozen=True)
class Cost:
    """One part of the bill: the price of a unit for an hour, and how many there are."""

    what: str
    unit_price: float | None
    """Now; None: unknown."""
    units: float = 1.0
    highest_price: float | None = None
    """What it may become; None: unknown, as that of a spot instance without a limit."""
    ends_with_nodes: bool = True
    """Otherwise it is paid until `down`."""

    @property
    def an_hour(self) -> float | None:
        """USD now; None: unknown."""
        return None if self.unit_price is None else self.unit_price * self.units

    @property
    def most_an_hour(self) -> float | None:
        """USD at most; None: unknown."""
        return None if self.highest_price is None else self.highest_price * self.units


def fixed_cost(
    what: str,
    price: float | None,
    units: float = 1.0,
    *,
    ends_with_nodes: bool = True,
) -> Cost:
    """Of the price list: it stays as it is."""
    return Cost(what, price, units, highest_price=price, ends_with_nodes=ends_with_nodes)


def total(amounts: Iterable[float | None]) -> float | None:
    """None where a part is unknown."""
    parts = list(amounts)
    return None if None in parts else sum(part for part in parts if part is not None)


def listed_price(account: Account, name: str, **attributes: str) -> float | None:
    """The highest price of a product in the region, in USD for an hour or (of a GB) a month; None:
    the list has none, or may not be read."""
    product = _PRODUCTS[name]
    criteria = {**product.attributes, **attributes, "regionCode": account.region}
    filters = [
        {"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in criteria.items()
    ]
    try:
        entries = account.all(
            "pricing",
            "get_products",
            "PriceList",
            ServiceCode=product.service,
            Filters=filters,
        )
    except AwsError as refused:
        account.warn("listed prices", refused)
        return None

    prices = [price for entry in entries for price in _prices(json.loads(entry), product.unit)]
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
    try:
        history = account.all(
            "ec2",
            "describe_spot_price_history",
            "SpotPriceHistory",
            InstanceTypes=[instance_type],
            ProductDescriptions=["Linux/UNIX"],
            StartTime=datetime.now(UTC),
        )
    except AwsError as refused:
        account.warn("spot prices", refused)
        return {}

    newest = sorted(history, key=lambda entry: entry["Timestamp"])
    return {entry["AvailabilityZone"]: float(entry["SpotPrice"]) for entry in newest}


def dollars(amount: float | None) -> str:
    """The amount, or that it is unknown."""
    if amount is None:
        return "unknown"
    return f"${amount:,.2f}" if amount >= 1 else f"${amount:.4f}"
