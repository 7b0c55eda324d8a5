"""What a run says on standard error while it goes on, and how things are counted in words."""

import sys


def tell(text: str) -> None:
    """One line, at once."""
    print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """A line about something that is not as it should be and does not stop the run."""
    tell(f"warning: {text}")


def counted(number: int, noun: str) -> str:
    """A number and what it is of: "1 rank", "2 ranks", "3 micro-batches"."""
    plural = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{plural}"
