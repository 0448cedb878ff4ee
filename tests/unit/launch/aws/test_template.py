"""The template: nothing open, all encrypted, no old metadata service, no wildcard right, and no
word of cfn-lint."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest

from drumline.launch.aws.cluster_creation import MARK, TEMPLATE, template_text
from drumline.launch.aws.instance_type import Hardware

yaml = pytest.importorskip("yaml", reason="pip install 'drumline[dev]' brings it")
# AWS offers no way to limit these to a resource: they open the node's own channel to Session
# Manager.
WITHOUT_RESOURCE = {
    "ssm:UpdateInstanceInformation",
    "ssmmessages:CreateControlChannel",
    "ssmmessages:CreateDataChannel",
    "ssmmessages:OpenControlChannel",
    "ssmmessages:OpenDataChannel",
}
WORLD = ("0.0.0.0/0", "::/0")


class CloudLoader(yaml.SafeLoader):  # type: ignore[misc, name-defined]
    """Reads `!Ref x` as {"Ref": "x"} and `!If [...]` as {"Fn::If": [...]}."""


def _function(loader: Any, name: str, node: Any) -> dict[str, Any]:
    kinds = {yaml.ScalarNode: loader.construct_scalar, yaml.SequenceNode: loader.construct_sequence}
    read = kinds.get(type(node), loader.construct_mapping)
    value = read(node) if isinstance(node, yaml.ScalarNode) else read(node, deep=True)
    return {name if name in ("Ref", "Condition") else f"Fn::{name}": value}


CloudLoader.add_multi_constructor("!", _function)


def load(text: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.load(text, Loader=CloudLoader)
    return document


def walk(value: Any) -> Iterator[dict[str, Any]]:
    """Every mapping in it, also those in both branches of an If."""
    if isinstance(value, dict):
        yield value
    for inner in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        yield from walk(inner)


def weaknesses(template: dict[str, Any]) -> Iterator[str]:
    for name, resource in template["Resources"].items():
        kind = resource["Type"]
        properties = resource.get("Properties", {})
        is_group = kind == "AWS::EC2::SecurityGroup"
        rules = properties.get("SecurityGroupIngress", []) if is_group else []
        rules += [properties] if kind == "AWS::EC2::SecurityGroupIngress" else []
        for rule in rules:
            if rule.get("CidrIp") in WORLD or rule.get("CidrIpv6") in WORLD:
                yield f"{name}: open to the world"
            if rule["IpProtocol"] == "-1" and "SourceSecurityGroupId" not in rule:
                yield f"{name}: all protocols from outside"
        if is_group and "SecurityGroupEgress" not in properties:
            yield f"{name}: without rules AWS opens everything to the outside"
        for rule in properties.get("SecurityGroupEgress", []) if is_group else []:
            if rule.get("IpProtocol") != "tcp" or rule["FromPort"] != rule["ToPort"]:
                yield f"{name}: more than a port is open to the outside"
        if kind == "AWS::EFS::FileSystem" and properties.get("Encrypted") is not True:
            yield f"{name}: not encrypted"
        if kind in ("AWS::EC2::LaunchTemplate", "AWS::EC2::Instance"):
            yield from (
                f"{name}: {weakness}"
                for weakness in weak_instance(properties["LaunchTemplateData"])
            )
        yield from (f"{name}: {right}" for right in wide_rights(properties))


def weak_instance(data: dict[str, Any]) -> Iterator[str]:
    if data.get("MetadataOptions", {}).get("HttpTokens") != "required":
        yield "IMDSv1"
    if not data.get("BlockDeviceMappings"):
        yield "the image's own disk may not be encrypted"
    for disk in data.get("BlockDeviceMappings", ()):
        if (
            disk["Ebs"].get("Encrypted") is not True
            or disk["Ebs"].get("DeleteOnTermination") is not True
        ):
            yield "a disk is not encrypted, or stays"


def wide_rights(properties: dict[str, Any]) -> Iterator[str]:
    if "ManagedPolicyArns" in properties:
        yield "a managed policy: its rights may change"
    for statement in walk(properties):
        if not {"Effect", "Action", "Resource"} <= statement.keys():
            continue
        actions = (
            statement["Action"] if isinstance(statement["Action"], list) else [statement["Action"]]
        )
        yield from (f"the right {action}" for action in actions if "*" in action)
        if statement["Resource"] == "*" and not set(actions) <= WITHOUT_RESOURCE:
            yield f"{actions} on everything"


def test_the_template_is_part_of_the_package() -> None:
    project = tomllib.loads((TEMPLATE.parents[3] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["drumline"]
    name = str(TEMPLATE.relative_to(TEMPLATE.parents[2]))
    assert any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def test_the_template_has_no_weakness() -> None:
    assert list(weaknesses(load(TEMPLATE.read_text()))) == []


@pytest.mark.parametrize(
    ("right", "wrong", "weakness"),
    [
        ("CidrIp: !Ref SshFrom", "CidrIp: 0.0.0.0/0", "SshIngress: open to the world"),
        (
            'IpProtocol: "-1", SourceSecurityGroupId: !GetAtt Group.GroupId',
            'IpProtocol: "-1", CidrIp: 10.0.0.0/8',
            "GroupIngress: all",
        ),
        ("FromPort: 443, ToPort: 443", "FromPort: 0, ToPort: 65535", "Group: more than a port"),
        ("      Encrypted: true\n", "", "Volume: not encrypted"),
        (
            "Encrypted: true, DeleteOnTermination",
            "DeleteOnTermination",
            "LaunchTemplate: a disk is not encrypted",
        ),
        ("HttpTokens: required", "HttpTokens: optional", "LaunchTemplate: IMDSv1"),
        ("ssm:UpdateInstanceInformation", "'ssm:*'", "SessionRights: the right ssm:*"),
        (
            "Action: autoscaling:TerminateInstanceInAutoScalingGroup",
            'Action: "autoscaling:*"',
            "Role: the right autoscaling:*",
        ),
        ("ssm:UpdateInstanceInformation", "s3:GetObject", "SessionRights: ['s3:GetObject'"),
    ],
)
def test_the_search_finds_each_weakness(right: str, wrong: str, weakness: str) -> None:
    text = TEMPLATE.read_text()
    assert right in text
    messages = list(weaknesses(load(text.replace(right, wrong))))
    assert any(message.startswith(weakness) for message in messages), messages


def test_all_nodes_talk_to_each_other_in_both_directions() -> None:
    resources = load(TEMPLATE.read_text())["Resources"]
    group = {"Fn::GetAtt": "Group.GroupId"}
    inside = resources["GroupIngress"]["Properties"]
    outside = resources["GroupEgress"]["Properties"]
    assert inside == {"GroupId": group, "IpProtocol": "-1", "SourceSecurityGroupId": group}
    assert outside == {"GroupId": group, "IpProtocol": "-1", "DestinationSecurityGroupId": group}
    assert resources["SshIngress"]["Condition"] == "HasSsh"


def test_the_parameters_are_those_of_the_plan() -> None:
    """That every plan sets them: the life cycle on a moto server."""
    parameters = set(load(TEMPLATE.read_text())["Parameters"])
    names = {mapping["Ref"] for mapping in walk(load(TEMPLATE.read_text())) if "Ref" in mapping}
    resources = set(load(TEMPLATE.read_text())["Resources"])
    assert {name for name in names if not name.startswith("AWS::")} <= parameters | resources


CARDS = Hardware(
    arch="x86_64",
    num_vcpus=192,
    num_gpus=8,
    gpu="H100",
    num_efas=32,
    num_cards=32,
)


def interfaces(hardware: Hardware) -> list[dict[str, Any]]:
    text = template_text(hardware, {})
    data = load(text)["Resources"]["LaunchTemplate"]["Properties"]["LaunchTemplateData"]
    network_interfaces: list[dict[str, Any]] = data["NetworkInterfaces"]
    return network_interfaces


def test_each_card_gets_an_efa_as_aws_recommends() -> None:
    """docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html"""
    primary, *secondary = interfaces(CARDS)
    assert (primary["NetworkCardIndex"], primary["DeviceIndex"]) == (0, 0)
    assert {interface["InterfaceType"] for interface in secondary} == {"efa-only"}
    places = [(interface["NetworkCardIndex"], interface["DeviceIndex"]) for interface in secondary]
    assert places == [(0, 1), *((card, 0) for card in range(1, 32))]
    without_first = dataclasses.replace(CARDS, num_efas=16, num_cards=17)
    assert [interface["NetworkCardIndex"] for interface in interfaces(without_first)[1:]] == list(
        range(1, 17)
    )
    with_one_card = dataclasses.replace(CARDS, num_efas=1, num_cards=1)
    assert len(interfaces(with_one_card)) == 1


def test_tags_of_the_user_are_quoted_and_reach_disks_and_instances() -> None:
    tags = {"team": "vision", "note": "a: b # = c"}
    cluster = load(template_text(CARDS, tags))["Resources"]
    data = cluster["LaunchTemplate"]["Properties"]["LaunchTemplateData"]
    team = {"Key": "team", "Value": "vision"}
    note = {"Key": "note", "Value": "a: b # = c"}
    assert data["TagSpecifications"][0]["Tags"][-2:] == [team, note]
    of_instances = [{**tag, "PropagateAtLaunch": True} for tag in (team, note)]
    assert cluster["Nodes"]["Properties"]["Tags"][-2:] == of_instances


def test_the_documentation_has_every_resource_with_its_reason() -> None:
    page = (TEMPLATE.parents[3] / "docs/aws.md").read_text()
    table = page.partition("## What is made, and why")[2].partition("\n## ")[0]
    rows = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert documented == set(load(TEMPLATE.read_text())["Resources"])


def test_cfn_lint_has_no_word() -> None:
    """With as many network cards as a type can have, and tags."""
    api = pytest.importorskip("cfnlint.api", reason="pip install 'drumline[dev]' brings it")
    text = template_text(CARDS, {"team": "vision"})
    assert MARK.search(text) is None
    problems = api.lint(text, regions=["us-east-1"])
    assert [f"line {problem.linenumber}: {problem}" for problem in problems] == []
    assert len(text) < 51_200, "CloudFormation takes no longer text"
