"""`python -m tekfac` is the command `tekfac`."""

import sys

from tekfac.command import main

sys.exit(main())
