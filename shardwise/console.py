"""What a run says on standard error while it goes on, and how things are counted in words."""

import sys


def tell(text: str) -> None:
    """Prints one line, at once."""
    print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Prints a line about something that is wrong but does not stop the run."""
    tell(f"warning: {text}")


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun: "1 rank", "2 ranks", "3 micro-batches"."""
    plural = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{plural}"
