"""What a run says on standard error while it goes on."""

import sys


def tell(text: str) -> None:
    """One line, at once."""
    print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """A line about something that is not as it should be and does not stop the run."""
    tell(f"warning: {text}")
