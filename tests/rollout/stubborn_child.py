"""A rollout engine's own process, as shardwise.recipes.rank.engine_child, whose engine never gets done with the row
"stuck", loses its worker in the rows "waits" and "raises", and prints before it begins."""

import json
import sys
import time
from multiprocessing import Process
from pathlib import Path

from shardwise.recipes.rank.heavy_imports import heavy_imports

with heavy_imports():
    import torch

    from shardwise.rollout import EmbeddedEngine, serve


class Stubborn:
    """An engine but for that row."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self._worker = Process(target=time.sleep, args=(1000,), name="Worker-1", daemon=True)
        self._worker.start()

    def generate(self, requests, on_finished, is_interrupted):
        print(f"generating {len(requests)}", flush=True)
        for what in {"waits", "raises"} & {request.uid for request in requests}:
            self._worker.kill()
            self._worker.join()
            if what == "raises":
                raise RuntimeError("cancelled")
            time.sleep(1000)
        found = self._engine.generate(
            [request for request in requests if request.uid != "stuck"], on_finished=on_finished
        )
        while any(request.uid == "stuck" for request in requests):
            time.sleep(1)
        return found

    def served_weights(self):
        return self._engine.served_weights()


def main(*descriptors: int) -> None:
    torch.set_num_threads(1)
    setup = json.load(sys.stdin)
    if setup.get("exits"):
        print("no device here", file=sys.stderr)
        sys.exit(7)

    def build():
        return Stubborn(
            EmbeddedEngine.from_folder(
                Path(setup["folder"]), dtype=torch.float32, max_rows=8, device=torch.device("cpu")
            )
        )

    serve(build, *descriptors)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
