"""`python -m spardl` is `spardl`."""

from spardl.cli import main

if __name__ == "__main__":
    main()
