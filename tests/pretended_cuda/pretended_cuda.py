"""A CUDA device that this machine lacks. Tensors on it have shapes, dtypes and a device, and no values, so a pass over
them shows where tensors of the host and of the device are mixed.

It needs `cuda_backend`, and a process of its own: what is put in place of torch.cuda stays there.
"""

import contextlib
from datetime import timedelta
from types import SimpleNamespace

import bitsandbytes  # noqa: F401  which looks for a device when it is imported
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


class Stream:
    """Work on it is done at once."""

    def __init__(self, *_args, **_options) -> None: ...
    def wait_stream(self, stream) -> None: ...
    def wait_event(self, event) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event=None):
        return event or Event()

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def __enter__(self):
        return self

    def __exit__(self, *_error) -> None: ...


class Event:
    """Has always happened."""

    def __init__(self, *_args, **_options) -> None: ...
    def record(self, stream=None) -> None: ...
    def wait(self, stream=None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, _end) -> float:
        return 1.0


class PretendedCuda(FakeTensorMode):
    """Inside, what is on the device is not computed, and what is on the host is. A number that is read of the
    device is 1.0 or 2, and half of its elements are not zero."""

    avoid_device_init = True

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def may_turn_const(self, _tensor) -> bool:
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        is_on_device = any(
            isinstance(leaf, FakeTensor) or (isinstance(leaf, torch.device) and leaf.type == "cuda") for leaf in leaves
        )
        if not is_on_device:
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return _value(args[0])
        if func is torch.ops.aten.nonzero.default:
            (tensor,) = args
            found = torch.zeros(max(1, tensor.numel() // 2), tensor.dim(), dtype=torch.int64, device="meta")
            return self.from_tensor(found).to(tensor.device)
        args, kwargs = pytree.tree_map(self._taken, (args, kwargs))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _taken(self, leaf):
        is_host = isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor) and leaf.device.type == "cpu"
        return self.fake_tensor_converter.from_real_tensor(self, leaf) if is_host else leaf


def _value(tensor):
    return True if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 2


def _values(tensor):
    def nested(shape):
        return [nested(shape[1:]) for _ in range(shape[0])] if shape else _value(tensor)

    return nested(tensor.shape)


def put_into_torch() -> None:
    """Makes torch say what it says where there is one such device."""
    options = SimpleNamespace(_timeout=timedelta(minutes=1))
    gib, device = 1 << 30, torch.device("cuda", 0)
    properties = SimpleNamespace(major=9, minor=0, total_memory=140 * gib, multi_processor_count=132, name="pretended")
    both = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_stream": lambda device=None: Stream(),
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
    }
    replaced = {
        torch.cuda: both
        | {
            "init": lambda: None,
            "_lazy_init": lambda: None,
            "is_initialized": lambda: True,
            "current_device": lambda: 0,
            "set_device": lambda device: None,
            "default_stream": lambda device=None: Stream(),
            "stream": lambda stream: contextlib.nullcontext(),
            "Stream": Stream,
            "Event": Event,
            "get_device_capability": lambda device=None: (9, 0),
            "get_device_properties": lambda device=None: properties,
            "is_bf16_supported": lambda *_args, **_options: True,
            "is_current_stream_capturing": lambda: False,
            "mem_get_info": lambda device=None: (100 * gib, 140 * gib),
        },
        torch.accelerator: both
        | {
            "current_accelerator": lambda check_available=False: device,
            "current_device_index": lambda: 0,
            "set_device_index": lambda index: None,
            "get_memory_info": lambda device=None: (100 * gib, 140 * gib),
        },
        torch: {"Stream": Stream, "Event": Event},
        torch._C: {"_cuda_getDevice": lambda: 0, "_cuda_getCurrentRawStream": lambda index: 0},
        dist.ProcessGroup: {"_get_backend": lambda group, device: SimpleNamespace(options=options)},
        torch.Tensor: {"pin_memory": lambda tensor, *_device: tensor, "record_stream": lambda tensor, stream: None},
        FakeTensor: {"tolist": lambda tensor: _values(tensor), "is_set_to": lambda tensor, other: tensor is other},
    }
    for place, attributes in replaced.items():
        for name, value in attributes.items():
            setattr(place, name, value)
