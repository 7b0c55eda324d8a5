"""The command `shardwise`, and `python -m shardwise`, which is how ranks are started."""

import sys

from shardwise.controller.signals import interrupted, interruptible_imports


def main() -> int:
    """Runs the command line. Ctrl-C ends it in one line, also while it is still being imported."""
    try:
        with interruptible_imports():
            from shardwise import cli
        return cli.main()
    except KeyboardInterrupt:
        return interrupted()


if __name__ == "__main__":
    sys.exit(main())
