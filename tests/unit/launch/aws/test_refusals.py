"""Every refusal before anything is made is a sentence with the next step. Answers as AWS documents
them, by Stubber."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("boto3", reason="pip install 'drumline[dev]' brings it")

from drumline.base.errors import DrumlineError, UsageError
from drumline.cli import aws_command, main
from drumline.launch.aws import cluster_access, cluster_plan
from drumline.launch.aws.account import Account, AwsError, connect
from drumline.launch.aws.cluster_access import own_network
from drumline.launch.aws.cluster_plan import make_plan
from drumline.launch.aws.cluster_settings import ClusterSettings, settings_from
from drumline.launch.aws.install import name_of
from drumline.launch.aws.instance_type import (
    Hardware,
    check_quota,
    find_hardware,
    find_image,
    zones_that_offer,
)
from drumline.launch.aws.prices import UNKNOWN, listed_price, spot_prices
from tests.unit.launch.aws.conftest import REGION

Stub = Callable[..., None]
G6 = Hardware(
    arch="x86_64",
    num_vcpus=48,
    num_gpus=4,
    gpu="L4",
    num_efas=1,
    num_cards=1,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
TWO_G6 = ClusterSettings(type="g6.12xlarge", nodes=2)


def message(error: pytest.ExceptionInfo[DrumlineError]) -> tuple[str, str | None]:
    return error.value.what, error.value.next_step


def test_a_missing_right_is_named(account: Account, stub: Stub) -> None:
    stub("ec2", "describe_images", "UnauthorizedOperation")
    with pytest.raises(AwsError) as error:
        account.call("ec2", "describe_images")
    assert message(error) == (
        "this user or role may not call ec2:DescribeImages",
        "add the right ec2:DescribeImages to its policy",
    )


def test_prices_and_quotas_that_may_not_be_read_are_warnings(account: Account, stub: Stub) -> None:
    """As for a role without these rights, and with credentials of GovCloud or China, which the price
    list does not know."""
    stub("service-quotas", "get_service_quota", "AccessDeniedException")
    stub("pricing", "get_products", "UnrecognizedClientException", times=2)
    stub("ec2", "describe_spot_price_history", "UnauthorizedOperation")
    assert check_quota(account, TWO_G6, 48) == ""
    assert listed_price(account, "disk") == UNKNOWN
    assert listed_price(account, "volume") == UNKNOWN
    assert spot_prices(account, TWO_G6.type) == {}
    assert account.warnings == [
        "the quota of g6.12xlarge (on-demand): this user or role may not call servicequotas:GetServiceQuota",
        "listed prices: AWS does not accept the credentials (UnrecognizedClientException)",
        "spot prices: this user or role may not call ec2:DescribeSpotPriceHistory",
    ]


@pytest.mark.parametrize(
    ("code", "what", "step"),
    [
        (
            "ExpiredToken",
            "AWS does not accept the credentials (ExpiredToken)",
            "renew them: aws configure, or aws sso login",
        ),
        (
            "InvalidAMIID.Malformed",
            "AWS refused ec2:DescribeImages: message of InvalidAMIID.Malformed (InvalidAMIID.Malformed)",
            "correct what it names; docs/aws.md has common cases",
        ),
    ],
)
def test_refusals_of_aws(account: Account, stub: Stub, code: str, what: str, step: str) -> None:
    stub("ec2", "describe_images", code)
    with pytest.raises(AwsError) as error:
        account.call("ec2", "describe_images")
    assert (*message(error), error.value.code) == (what, step, code)


def test_no_credentials_no_network_and_wrong_arguments(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AwsError, match="ec2: Parameter validation failed"):
        account.call("ec2", "describe_images", ImageIds=7)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(AwsError) as error:
        connect(REGION, None).call("ec2", "describe_images")
    what, step = message(error)
    assert what.startswith("no usable AWS credentials: ")
    assert step == "run aws configure, or aws sso login"


def test_an_unreachable_service(
    account: Account, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drumline.launch.aws.account._MAX_ATTEMPTS", 1)
    with pytest.raises(AwsError, match="ec2 in us-east-1 is unreachable: Could not connect"):
        Account(session, REGION).call("ec2", "describe_images")


def test_regions_and_profiles(account: Account) -> None:
    with pytest.raises(UsageError) as error:
        connect("us-eas-1", None)
    assert message(error) == (
        "there is no region 'us-eas-1'; did you mean 'us-east-1'?",
        "correct --region",
    )
    with pytest.raises(UsageError) as error:
        connect(None, None)
    assert message(error) == ("no region is set", "give --region, such as --region us-east-1")
    with pytest.raises(UsageError, match="--profile: The config profile"):
        connect(REGION, "nobody")


def test_unknown_types_and_zones(account: Account, stub: Stub) -> None:
    stub("ec2", "describe_instance_types", "InvalidInstanceType")
    with pytest.raises(
        UsageError, match=r"--type: there is no instance type 'g99.large' in us-east-1"
    ):
        find_hardware(account, ClusterSettings(type="g99.large"))
    stub("ec2", "describe_instance_type_offerings", {"InstanceTypeOfferings": []})
    with pytest.raises(UsageError) as error:
        zones_that_offer(account, "p5.48xlarge", None)
    assert message(error) == (
        "us-east-1 does not offer p5.48xlarge",
        "give another --region or another --type",
    )
    offers = [{"Location": name} for name in ("us-east-1-atl-1a", "us-east-1b", "us-east-1a")]
    for _ in range(4):
        stub("ec2", "describe_instance_type_offerings", {"InstanceTypeOfferings": offers})
    with pytest.raises(UsageError) as error:
        zones_that_offer(account, "p5.48xlarge", "us-east-1e")
    assert message(error) == (
        "us-east-1e does not offer p5.48xlarge; us-east-1-atl-1a, us-east-1a and us-east-1b do",
        "give one of these as --zone (or a subnet in it), or another --type",
    )
    local_zone = "us-east-1-atl-1a"
    assert zones_that_offer(account, "x", None) == ["us-east-1a", "us-east-1b"]
    assert zones_that_offer(account, "x", local_zone) == [local_zone]
    prices = {"us-east-1a": "2.0", "us-east-1b": "1.0", local_zone: "0.1"}
    history = [
        {"AvailabilityZone": zone, "SpotPrice": price, "Timestamp": NOW}
        for zone, price in prices.items()
    ]
    stub("ec2", "describe_spot_price_history", {"SpotPriceHistory": history})
    spot = ClusterSettings(type="x", spot=True)
    in_order = cluster_plan._zone_prices(account, spot, None, is_block=False)
    assert list(in_order) == ["us-east-1b", "us-east-1a"], "no Local Zone"


def test_the_quota_is_enough_or_named(account: Account, stub: Stub) -> None:
    quota = {"Quota": {"QuotaName": "Running On-Demand G and VT instances", "Value": 120.0}}
    for _ in range(2):
        stub(
            "service-quotas", "get_service_quota", quota, ServiceCode="ec2", QuotaCode="L-DB2E81BA"
        )
    described = "quota 'Running On-Demand G and VT instances': 120 vCPUs"
    assert check_quota(account, TWO_G6, 48) == f"{described}, 96 needed"
    with pytest.raises(AwsError) as error:
        check_quota(account, ClusterSettings(type="g6.12xlarge", nodes=3), 48)
    what, step = message(error)
    assert what == f"3 instances of g6.12xlarge need 144 vCPUs; {described}"
    assert "quotas/L-DB2E81BA?region=us-east-1; or give fewer --nodes" in (step or "")


@pytest.mark.parametrize(
    ("name", "market", "code"),
    [
        ("c7i.large", "spot", "L-34B43A08"),
        ("m7g.large", "on-demand", "L-1216C47A"),
        ("vt1.3xlarge", "on-demand", "L-DB2E81BA"),
        ("g6e.xlarge", "spot", "L-3819A6DF"),
        ("p4d.24xlarge", "spot", "L-7212CCBC"),
        ("p5en.48xlarge", "spot", "L-C4BD4855"),
        ("p5.48xlarge", "on-demand", "L-417A185B"),
        ("p6-b200.48xlarge", "on-demand", "L-417A185B"),
        ("p6-b200.48xlarge", "spot", None),
        ("inf2.xlarge", "on-demand", None),
        ("dl1.24xlarge", "on-demand", None),
        ("hpc7a.96xlarge", "on-demand", None),
        ("trn1.2xlarge", "on-demand", None),
    ],
)
def test_which_quota_counts(name: str, market: str, code: str | None) -> None:
    from drumline.launch.aws.instance_type import _quota_code

    assert _quota_code(name, market) == code


def test_the_image_is_looked_up(account: Account, stub: Stub) -> None:
    name = (
        "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
    )
    stub("ssm", "get_parameter", {"Parameter": {"Value": "ami-1"}}, Name=name)
    described = {"Images": [{"ImageId": "ami-1"}]}
    stub("ec2", "describe_images", described, ImageIds=["ami-1"])
    assert find_image(account, None, G6)["ImageId"] == "ami-1"


def test_prices(account: Account, stub: Stub) -> None:
    stub("pricing", "get_products", {"PriceList": []})
    assert listed_price(account, "instance", instanceType="g6.12xlarge") == UNKNOWN
    history = [
        {
            "AvailabilityZone": "us-east-1a",
            "SpotPrice": "1.5",
            "Timestamp": datetime(2026, 1, 2, tzinfo=UTC),
        },
        {
            "AvailabilityZone": "us-east-1a",
            "SpotPrice": "9.9",
            "Timestamp": datetime(2026, 1, 1, tzinfo=UTC),
        },
    ]
    stub("ec2", "describe_spot_price_history", {"SpotPriceHistory": history})
    assert spot_prices(account, "g6.12xlarge") == {"us-east-1a": 1.5}


@pytest.mark.parametrize(
    ("price", "words"), [(9.25, "costs $9.25 an hour"), (UNKNOWN, "has no known price")]
)
def test_the_price_ceiling(price: float, words: str) -> None:
    with pytest.raises(UsageError) as error:
        cluster_plan._check_ceiling(ClusterSettings(type="g6.12xlarge", max_price=5.0), price)
    what, step = message(error)
    assert what == f"g6.12xlarge (on-demand) {words}, and --max-price is $5.00"
    assert step == "raise --max-price, or give another --type, --zone or --region, or --spot"
    cluster_plan._check_ceiling(ClusterSettings(type="g6.12xlarge", max_price=10.0), 9.25)


def test_a_plan_needs_a_type_and_efa_needs_hardware(account: Account, stub: Stub) -> None:
    with pytest.raises(UsageError, match="no instance type is set"):
        make_plan(account, ClusterSettings())
    described = {
        "ProcessorInfo": {"SupportedArchitectures": ["x86_64"]},
        "VCpuInfo": {"DefaultVCpus": 48},
        "NetworkInfo": {"MaximumNetworkCards": 1},
    }
    stub("ec2", "describe_instance_types", {"InstanceTypes": [described]})
    with pytest.raises(UsageError, match=r"g6.12xlarge has no EFA"):
        make_plan(account, ClusterSettings(type="g6.12xlarge", efa=True))


def test_a_volume_is_used_by_its_mount_target_in_the_zone(account: Account, stub: Stub) -> None:
    target = {
        "MountTargetId": "fsmt-12345678",
        "FileSystemId": "fs-1",
        "SubnetId": "subnet-12345678",
        "LifeCycleState": "available",
    }
    here = {
        **target,
        "VpcId": "vpc-1",
        "AvailabilityZoneName": "us-east-1a",
        "IpAddress": "10.1.0.9",
    }
    stub("efs", "describe_mount_targets", {"MountTargets": [here]})
    stub(
        "efs",
        "describe_mount_target_security_groups",
        {"SecurityGroups": ["sg-12345678"]},
        MountTargetId="fsmt-12345678",
    )
    settings = ClusterSettings(volume="fs-1", subnet="subnet-1")
    parameters = cluster_plan._volume_parameters(account, settings, "us-east-1a")
    assert parameters == {
        "VolumeId": "fs-1",
        "MountTargetAddress": "10.1.0.9",
        "MountTargetGroup": "sg-12345678",
    }


def test_the_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_access, "ADDRESS_URL", "http://127.0.0.1:9/")
    with pytest.raises(AwsError, match="this machine's public address is not known") as error:
        own_network()
    assert error.value.next_step == "give it: --ssh-from ADDRESS/32"


def test_by_default_the_nodes_get_what_runs_here_and_ask_no_index_for_it() -> None:
    requirement_names = {name_of(word) for word in ClusterSettings().requirements}
    assert requirement_names == {
        "torch",
        "numpy",
        "rich",
        "safetensors",
        "blake3",
        "jinja2",
        "msgspec",
        "cryptography",
        "boto3",
        "fsspec",
    }
    assert f"boto3=={version('boto3')}" in ClusterSettings().requirements
    assert ClusterSettings().copies_drumline
    settings = ClusterSettings(install="drumline transformers==5.0.0 torch==2.12.0")
    assert settings.copies_drumline
    assert settings.requirements[-2:] == ["transformers==5.0.0", "torch==2.12.0"]
    assert [name_of(word) for word in settings.requirements].count("torch") == 1


# Settings


def test_flags_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[train]\nsteps = 3\n[aws]\ntype = "g6.12xlarge"\nnodes = 4\nmax_price = 5\nspot = true\n'
    )
    problems: list[str] = []
    settings = settings_from({"config": str(file), "nodes": 2, "idle-minutes": 0}, problems)
    assert problems == []
    file.write_text('[aws]\ntag = ["team=vision", "stage=a=b"]\n')
    assert settings_from({"config": str(file)}, problems).tags == {"team": "vision", "stage": "a=b"}
    assert problems == []
    assert (
        settings.type,
        settings.nodes,
        settings.max_price,
        settings.market,
        settings.idle_minutes,
    ) == ("g6.12xlarge", 2, 5.0, "spot", 0)
    assert settings.stack == "drumline-train"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            {"name": "My"},
            "--name: 'My' is not at most 30 lowercase letters, digits and dashes, a letter first",
        ),
        (
            {"install": "drumline torch"},
            "--install: 'torch' is not pinned; write NAME==VERSION, a wheel, or git+URL@ with a whole commit",
        ),
        *(
            (
                {"install": f"drumline {word}"},
                f"--install: {word!r} is not pinned; write NAME==VERSION, a wheel, or git+URL@ with a whole commit",
            )
            for word in (
                "drumline~=0.1,==0.1.0",
                "drumline==0.1.0,~=0.1",
                "drumline@git+https://h/r#egg==1",
                "drumline@git+https://h/r@main#" + "@" + "0123456789" * 4,
                "git+https://h/r@" + "0123456789" * 3,
                "https://h/x-1.tar.gz#==1",
                "drumline[aws==1",
            )
        ),
        *(
            (
                {"install": f"drumline {option} torch==2.13.0"},
                f"--install: {option!r} is not pinned; write NAME==VERSION, a wheel, or git+URL@ with a whole commit",
            )
            for option in (
                "--index-url=https://x.example/==1",
                "-fhttps://x.example/x.whl",
                "--pre",
                "-r",
            )
        ),
        *(
            (
                {"install": f"{word} torch==2.13.0"},
                f"--install: {word!r} asks a package index, and none has it: whoever takes that name could run code on "
                "the nodes; write drumline for this installation, or NAME@URL",
            )
            for word in ("drumline[aws]==0.1.0", "drumline_lint==0.1.0", "Drumline==0.1.0")
        ),
        (
            {"install": "torch==2.13.0"},
            "--install: without drumline the nodes cannot train; add drumline for this installation, or NAME@URL",
        ),
        (
            {"install": "drumline==1';reboot'"},
            "--install: \"drumline==1';reboot'\" is not a list of requirements of pip without markers and quotes",
        ),
        (
            {"install": "dist/x-1-py3-none-any.whl"},
            "--install: 'dist/x-1-py3-none-any.whl' is of this machine; give the URL at which the nodes find it",
        ),
        (
            {"install": "drumline[aws]@file:///x-1.whl"},
            "--install: 'drumline[aws]@file:///x-1.whl' is of this machine; give the URL at which the nodes find it",
        ),
        (
            {"install": ".[train]"},
            "--install: '.[train]' is of this machine; give the URL at which the nodes find it",
        ),
        (
            {"install": "https://me:hun/ter2@host/x-1.whl"},
            "--install: an address has a user, a password or options, which every node would show; give one without",
        ),
        (
            {"install": "git+https://me:hunter2@github.com/me/mine@" + "0123456789" * 4},
            "--install: an address has a user, a password or options, which every node would show; give one without",
        ),
        (
            {"ssh-from": "0.0.0.0/0"},
            "--ssh-from: 0.0.0.0/0 is open to (almost) the whole internet; give `me` or a smaller network",
        ),
        (
            {"ssh-from": "home"},
            "--ssh-from: Expected 4 octets in 'home'; give `me` or a network such as 192.0.2.7/32",
        ),
        (
            {"spot": True, "reservation": "cr-1"},
            "--spot and --reservation exclude each other: a reservation is not of the spot market",
        ),
        (
            {"bucket": "s3://my-data/train"},
            "--bucket: 's3://my-data/train' is not the name of a bucket; write NAME, without s3:// and a path",
        ),
        (
            {"bucket": "*"},
            "--bucket: '*' is not the name of a bucket; write NAME, without s3:// and a path",
        ),
        *(
            (
                {"tag": [tag]},
                f"--tag: {tag!r} is not KEY=VALUE in AWS's letters, or is not yours (aws:, drumline:, Name)",
            )
            for tag in (
                "team",
                "=vision",
                "aws:x=1",
                "drumline:owner=jane",
                "Name=mine",
                "a=b\n",
                "a=${x}",
            )
        ),
        (
            {"tag": [f"k{number}=v" for number in range(41)]},
            "--tag: 41 tags, and AWS takes 40 beside those of drumline",
        ),
        (
            {"ssh-from": "me", "ssm": True},
            "--ssm and --ssh-from exclude each other: Session Manager needs no open port",
        ),
    ],
)
def test_wrong_settings(flags: dict[str, Any], problem: str) -> None:
    problems: list[str] = []
    settings_from(flags, problems)
    assert problems == [problem]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[aws]\ntyp = 'x'\n", "aws.typ: unknown setting; did you mean 'type'?"),
        ("[aws]\nnodes = 0\n", "aws.nodes: 0 must be at least 1"),
        ("[train]\n", "there is no section [aws]"),
        ("[aws", "Expected ']'"),
    ],
)
def test_a_wrong_file(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    problems: list[str] = []
    settings_from({"config": str(file)}, problems)
    assert len(problems) == 1
    assert problems[0].startswith(f"{file}: {problem}")


def test_pinned_requirements_are_taken() -> None:
    commit = "drumline[aws]@git+https://github.com/OWNER/drumline@" + "0123456789" * 4
    wheel_url = "drumline[aws]@https://x.example/drumline-1-py3-none-any.whl"
    unnamed = "https://x.example/drumline-1-py3-none-any.whl"
    for install in (
        "drumline torch==2.13.0",
        commit,
        f"{commit}#subdirectory=x",
        f"{wheel_url} torch==2.13.0",
        unnamed,
        "drumline torch==2.13.0+cu130 transformers[torch,vision]==5.0.0rc1",
    ):
        problems: list[str] = []
        settings_from({"install": install}, problems)
        assert problems == []


def test_the_verb_has_help_for_each_part(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("plan", "up", "status", "down", "launch"):
        assert main(["aws", verb, "--help"]) == 0
        assert f"drumline aws {verb}" in capsys.readouterr().out
    assert main(["aws"]) == 2
    with pytest.raises(UsageError, match=r"there is no `drumline aws dwn`; did you mean 'down'\?"):
        aws_command.run(["dwn"])
    with pytest.raises(UsageError, match=r"--nodes: 0 must be at least 1"):
        aws_command.run(["up", "--nodes", "0"])
