"""The variables of this process, for programs that are started as modules and have no command above them."""

from __future__ import annotations

import os


def own_variables() -> dict[str, str]:
    """A copy: whoever changes it changes nothing for others."""
    return dict(os.environ)
