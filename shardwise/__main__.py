"""`python -m shardwise`, which is how ranks are started."""

import sys

from shardwise.cli import main

if __name__ == "__main__":
    sys.exit(main())
