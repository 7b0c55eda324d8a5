"""Cells of a benchmark that takes minutes of a device: one that fails does not take the figures of others with it."""

import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch


def attempted(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The figures of one cell; where it ran out of memory or failed, that instead: other cells keep theirs."""
    try:
        return measure()
    except torch.OutOfMemoryError:
        return {"out_of_memory": True}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def state_of(figures: Mapping[str, Any]) -> str:
    """Why a cell has no figures; empty for one that has."""
    if "out_of_memory" in figures:
        return "out of memory"
    reason: str = figures.get("skipped", figures.get("error", ""))
    return reason.partition("\n")[0]


def exit_if_any_failed(cells: Mapping[str, Mapping[str, Any]]) -> None:
    """Ends the program with status 1 if a cell failed, as a check does: after the figures of others were written."""
    if failed := [name for name, figures in cells.items() if "error" in figures]:
        raise SystemExit(f"failed: {', '.join(failed)}")
