"""`python -m drumline_lint`."""

import sys

from drumline_lint.command import main

sys.exit(main())
