"""What things cost: on demand from AWS's price list, spot from the current market. What is not found stays unknown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from drumline.aws.account import Account

HOURS_A_DAY = 24
HOURS_A_MONTH = 730
"""As AWS converts prices by the month."""
# In the price list: the service, the unit, and what else identifies a product.
_PRODUCTS: Mapping[str, tuple[str, str, Mapping[str, str]]] = {
    "instance": (
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
    "disk": ("AmazonEC2", "GB-Mo", {"productFamily": "Storage", "volumeApiName": "gp3"}),
    "address": ("AmazonVPC", "Hrs", {"group": "VPCPublicIPv4Address"}),
    "nat": ("AmazonEC2", "Hrs", {"productFamily": "NAT Gateway"}),
    "volume": ("AmazonEFS", "GB-Mo", {"storageClass": "General Purpose"}),
}


@dataclass(frozen=True)
class Cost:
    """One part of the bill: the price of a unit for an hour, and how many there are."""

    what: str
    unit_price: float | None
    units: float = 1.0

    @property
    def an_hour(self) -> float | None:
        return None if self.unit_price is None else self.unit_price * self.units


def listed_price(account: Account, product: str, **attributes: str) -> float | None:
    """The highest price of it in the region, in USD for an hour or (of a GB) a month; None: the list has none."""
    service, unit, more = _PRODUCTS[product]
    wanted = {**more, **attributes, "regionCode": account.region}
    filters = [{"Type": "TERM_MATCH", "Field": name, "Value": value} for name, value in wanted.items()]
    products = account.all("pricing", "get_products", "PriceList", ServiceCode=service, Filters=filters)
    return max((price for one in products for price in _prices(json.loads(one), unit)), default=None)


def _prices(product: Any, unit: str) -> list[float]:
    dimensions = [
        dimension
        for term in product.get("terms", {}).get("OnDemand", {}).values()
        for dimension in term["priceDimensions"].values()
        if dimension["unit"] == unit
    ]
    return [price for one in dimensions if (price := float(one["pricePerUnit"].get("USD", 0)))]


def spot_prices(account: Account, instance_type: str) -> dict[str, float]:
    """Of a spot instance for an hour, by zone, now."""
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
    if amount is None:
        return "unknown"
    return f"${amount:,.2f}" if amount >= 1 else f"${amount:.4f}"
