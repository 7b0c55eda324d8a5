import threading

import torch

from shardwise.recipes.checkpointing.checkpoint_writer import CheckpointWriter
from shardwise.recipes.rank.background_worker import BackgroundWorker
from shardwise.recipes.rank.worker import Worker
from shardwise.types import GenerateRequest


class Engine:
    """Samples until it is interrupted."""

    lacks_weights = False

    def wake(self, *parts):
        pass

    def generate(self, requests, *, on_finished, is_interrupted):
        while not is_interrupted():
            began.wait(0.001)
            began.set()
        return [[] for _ in requests]


REQUEST = GenerateRequest(uid="a", prompt_ids=[1], max_tokens=4, temperature=1.0)
began = threading.Event()


def test_it_interrupts_what_the_worker_samples():
    writer, interruption = CheckpointWriter(0, links=None), threading.Event()
    worker = Worker(torch.device("cpu"), writer=writer, interruption=interruption)
    beside = BackgroundWorker(writer, interruption)
    worker.engines.rollout_engine = Engine()
    found = []
    sampling = threading.Thread(target=lambda: found.append(worker.generate([REQUEST])), daemon=True)
    sampling.start()
    assert began.wait(20)
    assert not found
    beside.interrupt()
    sampling.join(20)
    assert found == [[[]]]
