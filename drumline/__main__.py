"""`python -m drumline`: what torchrun and other launchers start on every rank."""

from __future__ import annotations

import sys

from drumline.cli import main

if __name__ == "__main__":
    sys.exit(main())
