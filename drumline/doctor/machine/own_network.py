"""How this machine is called, where its name leads, and which of its networks gloo and NCCL would take."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from drumline.doctor.machine.question import Question
from drumline.net.interfaces import GLOO_VARIABLE, gloo_interface, interfaces, nccl_interface

NAME_TIMEOUT_S = 1.0


class NetworkQuestion:
    """Asked at once: a name server that is away answers after many seconds."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._host = socket.gethostname()
        self._addresses = Question(lambda: _addresses(self._host))

    def answer(self) -> dict[str, Any]:
        """`addresses` of the own name, with the `name_error` if there are none, `interfaces`, and who takes which."""
        addresses: list[str] = []
        error = ""
        try:
            addresses = self._addresses.answer(NAME_TIMEOUT_S)
        except TimeoutError:
            error = f"no answer within {NAME_TIMEOUT_S:g} s"
        except OSError as found:
            error = found.strerror or str(found)
        found_here = interfaces()
        # gloo asks for the name as well, and would wait as long.
        knows_gloo = not error.startswith("no answer") or self._environment.get(GLOO_VARIABLE)
        gloo = gloo_interface(found_here, self._environment) if knows_gloo else None
        nccl = nccl_interface(found_here, self._environment)
        return {
            "addresses": addresses,
            "name_error": error,
            "interfaces": [{**asdict(one), "ipv6": list(one.ipv6)} for one in found_here],
            "gloo_interface": gloo.name if gloo else None,
            "nccl_interface": nccl.name if nccl else None,
        }


def _addresses(host: str) -> list[str]:
    found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    return list(dict.fromkeys(str(one[4][0]) for one in found))
