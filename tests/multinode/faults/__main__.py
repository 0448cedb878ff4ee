"""The soak: see soak.py."""

import sys

from tests.multinode.faults.soak import main

sys.exit(main())
