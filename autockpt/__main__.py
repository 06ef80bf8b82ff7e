"""``python -m autockpt``: the command line."""

from autockpt.cli import main

if __name__ == "__main__":
    main()
