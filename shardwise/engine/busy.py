"""How long a rank computes, without the time in which it waits for others.

Ranks that train together leave every collective together, so by the clock a slow rank's phases are as long as everyone
else's: the others wait for it in the collectives. What is left without that time tells them apart.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from shardwise.types import Metrics, MetricValue

_Mark = float | torch.Event
"""A moment on the host's clock, or in a stream of the device."""


class BusyClock:
    """Measures the seconds of each phase without those of FSDP's gathers and scatters in it: on the host by its clock,
    on a device by events in its streams, which wait for nothing.

    On a device gathers that overlap the computation are subtracted too, so the result is a lower bound.

    The all-reduce between replicas is not subtracted: where nothing is sharded, all ranks look alike.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phase = ""
        self._spent: list[tuple[str, _Mark, _Mark]] = []
        self._waited: list[tuple[str, _Mark, _Mark]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the body as this phase."""
        self._phase, start = name, self._mark()
        yield
        self._spent.append((name, start, self._mark()))
        self._phase = ""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the body, a collective, as waiting in the current phase. Outside a phase it does not count."""
        if not self._phase:
            yield
            return
        start = self._mark()
        yield
        self._waited.append((self._phase, start, self._mark()))

    def watch(self, units: Sequence[FSDPModule]) -> None:
        """Counts the collectives of these units as waiting from here on."""
        for unit in units:
            unit.set_custom_all_gather(_AllGather(self))
            unit.set_custom_reduce_scatter(_ReduceScatter(self))

    def take(self) -> Metrics:
        """Returns `train/busy/PHASE/rank_R`, this rank's seconds since the last call. Waits until the device has
        finished those phases."""
        seconds: dict[str, float] = {}
        for sign, spans in ((1, self._spent), (-1, self._waited)):
            for name, start, end in spans:
                seconds[name] = seconds.get(name, 0.0) + sign * _seconds(start, end)
            spans.clear()
        rank = dist.get_rank()
        return {
            f"train/busy/{name}/rank_{rank}": MetricValue.sum(max(value, 0.0))  # collectives may overlap each other
            for name, value in seconds.items()
        }

    def _mark(self) -> _Mark:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event


def _seconds(start: _Mark, end: _Mark) -> float:
    if isinstance(start, torch.Event) and isinstance(end, torch.Event):
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000
    assert isinstance(start, float)
    assert isinstance(end, float)
    return end - start


class _AllGather(DefaultAllGather):
    def __init__(self, clock: BusyClock) -> None:
        self._clock = clock

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **options: Any) -> dist.Work | None:
        with self._clock.waiting():
            return super().__call__(output_tensor, input_tensor, *args, **options)


class _ReduceScatter(DefaultReduceScatter):
    def __init__(self, clock: BusyClock) -> None:
        self._clock = clock

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **options: Any) -> dist.Work:
        with self._clock.waiting():
            return super().__call__(output_tensor, input_tensor, *args, **options)
