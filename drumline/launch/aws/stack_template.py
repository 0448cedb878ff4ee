"""The text of a stack's template: `cluster.yaml`, with the programs of the nodes in it, and what is
added to its lists."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from drumline.launch.aws.instance_type import Hardware

TEMPLATE = Path(__file__).with_name("cluster.yaml")
# A line of it in whose place something else goes.
MARK = re.compile(r"^( *)# <(.+)>\n", re.MULTILINE)
# They become part of the user data, which cannot be longer than 16 kB.
NODE_PROGRAMS = (
    TEMPLATE.with_name("idle_shutdown.py"),
    TEMPLATE.with_name("prepare.sh"),
)


def template_text(hardware: Hardware, user_tags: Mapping[str, str]) -> str:
    """For instances of this type."""
    # For what the group starts: of the rest, AWS takes the user's tags from the stack.
    tags = [{"Key": key, "Value": value} for key, value in user_tags.items()]
    lists = {
        "cards": _cards(hardware),
        "disk_tags": tags,
        "instance_tags": [{**tag, "PropagateAtLaunch": True} for tag in tags],
    }
    parts = {path.name: path.read_text(encoding="utf-8") for path in NODE_PROGRAMS}
    for name, entries in lists.items():  # YAML reads JSON
        parts[name] = "".join(f"- {json.dumps(entry)}\n" for entry in entries)

    text = TEMPLATE.read_text(encoding="utf-8")
    return MARK.sub(lambda mark: textwrap.indent(parts[mark[2]], mark[1]), text)


def _cards(hardware: Hardware) -> Iterator[dict[str, Any]]:
    """What is added to the first interface: EFA-only ones as AWS recommends, the second on card 0, if
    that has EFA, and the first on the others."""
    if hardware.num_cards == 1:
        return

    cards = range(1, hardware.num_efas + 1)
    if hardware.num_efas >= hardware.num_cards:
        cards = range(hardware.num_cards)
    for card in cards:
        yield {
            "DeviceIndex": 0 if card else 1,
            "NetworkCardIndex": card,
            "InterfaceType": "efa-only",
            "DeleteOnTermination": True,
            "Groups": [{"Fn::GetAtt": ["Group", "GroupId"]}],
        }
