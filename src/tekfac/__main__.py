"""`python -m tekfac` is the command `tekfac`."""

import sys

from tekfac.cli.main import main

sys.exit(main())
