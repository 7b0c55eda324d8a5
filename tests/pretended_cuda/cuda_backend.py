"""The C++ part of the pretended device, for which torch asks once, while it is imported.

`python cuda_backend.py LIBRARY SCRIPT ...` runs a script with it.
"""

import ctypes
import importlib.util
import runpy
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("cuda_backend.cpp")
TORCH = Path(importlib.util.find_spec("torch").submodule_search_locations[0])


def build_backend(folder: Path) -> Path:
    """Compiles the C++ part."""
    library = folder / "cuda_backend.so"
    includes = [f"-I{TORCH / 'include'}", f"-I{TORCH / 'include/torch/csrc/api/include'}"]
    links = [f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10"]
    command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", *includes, str(SOURCE), "-o", str(library), *links]
    subprocess.run(command, check=True)
    return library


def load_backend(library: Path) -> None:
    """Registers it with torch, which must not be imported yet."""
    ctypes.CDLL(str(TORCH / "lib/libtorch_cpu.so"), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


if __name__ == "__main__":
    load_backend(Path(sys.argv[1]))
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
