"""An engine on a CPU that sleeps as vLLM and SGLang do on a GPU at sleep_level 2: its weights are gone then."""

import torch

from shardwise.rollout import EmbeddedEngine
from shardwise.rollout.readiness import Readiness


class ForgetfulEngine:
    """The embedded engine, whose weights are NaN once it has slept, until a weight sync brings others."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine, self._readiness = engine, Readiness("the engine", sleep_level=2)
        self.num_dropped = self.num_syncs = 0

    def generate(self, requests, **options):
        self._readiness.require()
        return self._engine.generate(requests, **options)

    def logprobs(self, sequences, images=None):
        self._readiness.require()
        return self._engine.logprobs(sequences, images)

    def load_weights(self, weights):
        missing = dict(self.served_weights())
        self._engine.load_weights(self._readiness.arriving(weights, missing))
        self._readiness.arrived(missing)

    def served_weights(self):
        return self._engine.served_weights()

    def served_checksums(self):
        return self._engine.served_checksums()

    def commit_weights(self, version):
        self._readiness.commit(version)
        self._engine.commit_weights(version)
        self.num_syncs += 1

    def sleep(self):
        self._readiness.sleep(self._drop)

    def wake(self, *parts):
        self._readiness.wake(parts, lambda tags: None)

    @property
    def lacks_weights(self):
        return self._readiness.lacks_weights

    def close(self):
        self._engine.close()

    def _drop(self):
        self.num_dropped += 1
        for _, weight in self.served_weights():
            weight.fill_(torch.nan)
