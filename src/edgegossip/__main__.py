"""`python -m edgegossip`, for installations whose scripts are not on the path."""

import sys

from edgegossip.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
