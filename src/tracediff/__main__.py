"""`python -m tracediff`, the same as the command `tracediff`."""

import sys

from tracediff.cli import main

if __name__ == "__main__":
    sys.exit(main())
