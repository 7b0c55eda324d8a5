"""Main program of a rollout engine's own process.

    {"model": a ModelConfig, "rollout": a SamplingConfig, "dtype": "bfloat16", "device": "cuda", "lora": null}

The process reads this from standard input, and the rest as `serving.serve` says. Its device is the first that it sees.
"""

import json
import sys

from shardwise.recipes.rank.heavy_imports import heavy_imports

with heavy_imports():
    import torch

    from shardwise.config import LoraConfig, ModelConfig, SamplingConfig
    from shardwise.engine import take_device
    from shardwise.recipes.rank.library_logging import quiet_libraries
    from shardwise.recipes.rank.rollout_engines import build_here
    from shardwise.rollout import RolloutEngine, serve


def main(*descriptors: int) -> None:
    """Serves until the rank that has started this process ends it, or ends itself.

    Args:
        descriptors: file descriptors, and the id of the rank's process, as `serve` takes them.
    """
    quiet_libraries()
    setup = json.load(sys.stdin)

    def build() -> RolloutEngine:
        device = torch.device("cpu") if setup["device"] == "cpu" else take_device(0)
        return build_here(
            ModelConfig.model_validate(setup["model"]),
            SamplingConfig.model_validate(setup["rollout"]),
            dtype=getattr(torch, setup["dtype"]),
            device=device,
            lora=None if setup["lora"] is None else LoraConfig.model_validate(setup["lora"]),
        )

    serve(build, *descriptors)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
