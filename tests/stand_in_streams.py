"""Streams of an accelerator that this machine lacks: every thread has a current one of its own."""

import threading

import torch


class OnAccelerator(torch.Tensor):
    """In host memory, but says otherwise."""

    @property
    def device(self):
        return torch.device("cuda", 0)


class Streams:
    """In place of torch's."""

    def __init__(self) -> None:
        self._threads = threading.local()

    @property
    def current(self) -> str:
        """The name of this thread's."""
        return getattr(self._threads, "name", "default")

    def use(self, name: str) -> None:
        """From here on, in this thread."""
        self._threads.name = name

    def of_device(self, device: torch.device) -> "Stream":
        """As torch.accelerator.current_stream."""
        assert device == torch.device("cuda", 0)
        return Stream(self, self.current)


class Stream:
    """An object may be entered once at a time, as in torch 2.11."""

    def __init__(self, streams: Streams, name: str) -> None:
        self._streams, self._name, self._before = streams, name, None

    def __enter__(self) -> "Stream":
        assert self._before is None
        self._before = self._streams.current
        self._streams.use(self._name)
        return self

    def __exit__(self, *_error: object) -> None:
        self._streams.use(self._before)
        self._before = None
