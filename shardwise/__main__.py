"""The command `shardwise`, and `python -m shardwise`, which is how ranks are started."""

import os
import sys

from shardwise.controller.exit_codes import INTERRUPTED
from shardwise.controller.signals import interruptible_imports


def main() -> int:
    """Runs the command line. Ctrl-C ends it in one line, also while it is still being imported."""
    try:
        with interruptible_imports():
            from shardwise import cli
        return cli.main()
    except KeyboardInterrupt:
        if "RANK" not in os.environ:  # of many ranks the launcher speaks
            print("interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
