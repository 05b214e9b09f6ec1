"""`python -m spardl` is `spardl`."""

import sys

from spardl.cli import main

if __name__ == "__main__":
    sys.exit(main())
