"""Calls to AWS: credentials by boto3's own chain, retries and throttling by botocore, every refusal
as a sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from drumline.base.errors import MissingExtraError, PreflightError, UsageError, did_you_mean
from drumline.base.text import without_credentials

# Codes of AWS, by what they mean.
_NOT_ALLOWED = {
    "AccessDenied",
    "AccessDeniedException",
    "UnauthorizedOperation",
    "AuthorizationError",
}
_BAD_CREDENTIALS = {
    "AuthFailure",
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "RequestExpired",
    "SignatureDoesNotMatch",
    "UnrecognizedClientException",
}
_MAX_ATTEMPTS = 8
# The price list is served by a few regions only.
PRICES_REGION = "us-east-1"
# boto3 gives such a name to every session of a role, so it does not tell people apart.
_GENERATED_SESSION = re.compile(r"/botocore-session-\d+$")
_NOT_IN_A_TAG = re.compile(r"[^\w .:/=+@-]")
_TAG_LENGTH = 256


Described = Mapping[str, Any]
"""Something, as AWS describes it."""


class AwsError(PreflightError):
    """AWS refused a call; `code` is its own word for why."""

    code = ""


class Account:
    """One account in one region."""

    def __init__(self, session: Any, region: str) -> None:
        self.region = region
        self._session = session
        self._clients: dict[str, Any] = {}
        self.warnings: list[str] = []
        """What could not be read, and the cluster can be made without: `plan` shows it."""

    @contextmanager
    def optional(self, unknown: str) -> Iterator[None]:
        """What the block reads may be refused: it then stays unknown, which is a warning."""
        try:
            yield
        except AwsError as refused:
            warning = f"{unknown}: {refused.what}"
            if warning not in self.warnings:
                self.warnings.append(warning)

    def client(self, service: str) -> Any:
        """boto3's client of this service, made at its first use."""
        if service not in self._clients:
            from botocore.config import Config

            config = Config(
                retries={"mode": "standard", "total_max_attempts": _MAX_ATTEMPTS},
                user_agent_extra="drumline",
            )
            region = PRICES_REGION if service == "pricing" else self.region
            self._clients[service] = self._session.client(
                service, region_name=region, config=config
            )

        return self._clients[service]

    def call(self, service: str, operation: str, **arguments: Any) -> Described:
        """One request; a refusal is an AwsError."""
        with self._explained(service) as client:
            return dict(getattr(client, operation)(**arguments))

    def all(self, service: str, operation: str, what: str, **arguments: Any) -> list[Any]:
        """The items of all pages of an answer. `what`: which, as JMESPath."""
        import jmespath

        with self._explained(service) as client:
            if client.can_paginate(operation):
                pages = client.get_paginator(operation).paginate(**arguments)
                answer = pages.build_full_result()
            else:
                answer = getattr(client, operation)(**arguments)
            return list(jmespath.search(what, answer) or ())

    def identity(self) -> str:
        """The user or role that makes the calls, as the value of a tag."""
        name = str(self.call("sts", "get_caller_identity")["Arn"])
        return _NOT_IN_A_TAG.sub("_", _GENERATED_SESSION.sub("", name))[:_TAG_LENGTH]

    @contextmanager
    def _explained(self, service: str) -> Iterator[Any]:
        """The client of this service; the failure of a request becomes an AwsError."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            client = self.client(service)
            yield client
        except ClientError as error:
            right = f"{client.meta.service_model.signing_name}:{error.operation_name}"
            raise _refused(error.response.get("Error", {}), right) from error
        except BotoCoreError as error:
            raise _not_sent(error, service, self.region) from error


def filters(values: Mapping[str, str]) -> list[Described]:
    """As EC2 takes them; a value may be several, with commas."""
    return [{"Name": name, "Values": value.split(",")} for name, value in values.items()]


def _refused(error: Mapping[str, str], right: str) -> AwsError:
    """AWS has answered, and refuses. `right`: what the call needs in a policy."""
    code = error.get("Code", "")
    message = error.get("Message", "no reason given")
    if code in _NOT_ALLOWED:
        what = f"this user or role may not call {right}"
        step = f"add the right {right} to its policy"
    elif code in _BAD_CREDENTIALS:
        what = f"AWS does not accept the credentials ({code})"
        step = "renew them: aws configure, or aws sso login"
    else:
        what = f"AWS refused {right}: {message} ({code})"
        step = "correct what it names; docs/aws.md has common cases"

    refused = AwsError(what, next_step=step)
    refused.code = code
    return refused


def _not_sent(error: Exception, service: str, region: str) -> AwsError:
    """The request has got no answer."""
    from botocore import exceptions

    no_credentials = (
        exceptions.NoCredentialsError,
        exceptions.PartialCredentialsError,
        exceptions.TokenRetrievalError,
        exceptions.SSOError,
    )
    what = f"{service}: {without_credentials(str(error))}"
    step = "correct what it names"
    if isinstance(error, no_credentials):
        what = f"no usable AWS credentials: {error}"
        step = "run aws configure, or aws sso login"
    elif isinstance(error, exceptions.HTTPClientError | exceptions.ConnectionError):
        what = f"{service} in {region} is unreachable: {without_credentials(str(error))}"
        step = "check the network and a proxy, and run the same command again"
    return AwsError(what, next_step=step)


def connect(region: str | None, profile: str | None) -> Account:
    """The account of the credentials that boto3 finds; nothing is sent yet."""
    try:
        import boto3
        from botocore.exceptions import ProfileNotFound
    except ImportError as error:
        raise MissingExtraError("drumline aws", extra="aws") from error

    try:
        session = boto3.Session(profile_name=profile, region_name=region)
    except ProfileNotFound as error:
        raise UsageError(
            f"--profile: {error}", next_step="aws configure list-profiles shows them"
        ) from error

    chosen = session.region_name
    if chosen is None:
        raise UsageError("no region is set", next_step="give --region, such as --region us-east-1")

    regions = [
        region
        for partition in session.get_available_partitions()
        for region in session.get_available_regions("ec2", partition)
    ]
    if chosen not in regions:
        what = f"there is no region {chosen!r}; {did_you_mean(chosen, regions)}"
        raise UsageError(what, next_step="correct --region")

    return Account(session, chosen)
