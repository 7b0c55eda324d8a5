import json
import shutil

import pytest
import torch
from transformers import AutoTokenizer

from shardwise.config import EngineConfig, ModelConfig
from shardwise.controller.local import RankGroup
from shardwise.controller.process_group import Rank, process_group
from shardwise.data.synthetic import build_model_folder, train_tokenizer
from shardwise.recipes.checkpointing.manifest import hash_share, write_manifest
from shardwise.recipes.engine_source import EngineSource
from shardwise.recipes.engines import RemoteEngine
from shardwise.recipes.opened_model import OpenedModel
from shardwise.recipes.rank.worker import Worker
from shardwise.recipes.sampling.sampled_tokens import with_spans
from shardwise.types import Completion, Example, GenerateRequest, RolloutGroup, Sample

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A random Qwen3 of 261 byte tokens with its tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = train_tokenizer(["2+3=5"], vocab_size=261)
    build_model_folder(
        folder, tokenizer=tokenizer, hidden_size=32, num_layers=2, intermediate_size=64, max_position_embeddings=96
    )
    return folder


MEDIA = {"policy": ["1"], "critic": ["6"], "teacher": ["7"], "blind": []}
"""The texts that stand for images to the model in the folder of this name."""


@pytest.fixture
def media_folder(model_folder, tmp_path, monkeypatch):
    """Folder of a model by its name in MEDIA."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    monkeypatch.setattr(
        OpenedModel,
        "media_token_ids",
        property(lambda model: tokenizer.convert_tokens_to_ids(MEDIA[model.folder.name])),
    )
    return lambda name: str(shutil.copytree(model_folder, tmp_path / name, dirs_exist_ok=True))


@pytest.fixture
def whole_run(model_folder, tmp_path, group_of_one):
    """The folder of a run with one checkpoint, step_3, of the model."""
    checkpoint = tmp_path / "run" / "checkpoints" / "step_3"
    shutil.copytree(model_folder, checkpoint / "hf")
    write_manifest(checkpoint, [hash_share(checkpoint)], step=3)
    return tmp_path / "run"


@pytest.fixture
def prune(whole_run, monkeypatch):
    """prune(module, name): what is called there finds the checkpoint of `whole_run` removed, as a run renames it
    first."""

    def before(owner, name):
        called = getattr(owner, name)

        def call(*args, **options):
            checkpoints = whole_run / "checkpoints"
            (checkpoints / "step_3").rename(checkpoints / ".step_3.tmp")
            return called(*args, **options)

        monkeypatch.setattr(owner, name, call)

    return before


@pytest.fixture
def group_of_one():
    """A RankGroup whose worker is the recipes' own, in this process."""
    with process_group(Rank(0, 1, 0), device_type="cpu", timeout_seconds=60) as control:
        yield RankGroup(Worker(torch.device("cpu")), control, timeout_seconds=20)


class FakeGroup:
    """Records commands; answers with the functions it was given, called once for each rank with (rank, arguments)."""

    def __init__(self, size=1, **answers):
        self.size, self.ranks, self._answers, self.calls = size, range(size), answers, []
        self.background = None

    def call(self, method, *args):
        self.calls.append((method, *args))
        return [self._answers.get(method, lambda *_: None)(rank, *args) for rank in range(self.size)]

    def scatter(self, method, shards, *args):
        assert self.size % len(shards) == 0
        self.calls.append((method, shards, *args))
        return [self._answers[method](index, shard, *args) for index, shard in enumerate(shards)]

    @property
    def methods(self):
        return [call[0] for call in self.calls]


@pytest.fixture
def fake_group():
    return FakeGroup


@pytest.fixture
def remote():
    """An engine as recipes see it, on a FakeGroup."""

    def make(group, role="policy", **layout):
        return RemoteEngine(
            group=group,
            role=role,
            source=EngineSource(
                model=ModelConfig(path="m"), layout=EngineConfig(**{"max_tokens_per_micro_batch": 64} | layout)
            ),
            num_parameters=7_000_000,
            num_trained_parameters=500_000,
            num_bytes_read=100,
        )

    return make


@pytest.fixture
def make_group():
    """A RolloutGroup from its rewards; token ids and logprobs tell completions apart."""

    def make(
        rewards,
        *,
        prompt_ids=(7, 8),
        source="sums",
        texts=None,
        parts=None,
        failed=None,
        lengths=None,
        reasons=None,
        uid="r",
    ):
        count = len(rewards)
        lengths = lengths or [2] * count
        reasons = reasons or ["stop"] * count
        completions = [
            Completion(
                token_ids=[100 + 10 * i + t for t in range(lengths[i])],
                logprobs=[-0.1 * (i + 1) - 0.01 * t for t in range(lengths[i])],
                finish_reason=reasons[i],
                policy_version=4,
            )
            for i in range(count)
        ]
        request = GenerateRequest(uid=uid, prompt_ids=list(prompt_ids), max_tokens=max(lengths), temperature=1.0)
        return RolloutGroup(
            example=Example(
                uid=uid, prompt_ids=list(prompt_ids), prompt="?", data_source=source, ground_truth="5", extra_info={}
            ),
            completions=with_spans(request, completions),
            texts=texts or [f"text {i}" for i in range(count)],
            answers=texts or [f"text {i}" for i in range(count)],
            rewards=list(rewards),
            reward_parts=parts or [{"b": reward} for reward in rewards],
            failures=["it raised" if one else None for one in failed or [False] * count],
        )

    return make


@pytest.fixture
def write_jsonl(tmp_path):
    def write(name, rows):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


@pytest.fixture
def samples():
    """Four of different lengths; the tokens of each are its number, all but two are trained."""
    lengths = [5, 3, 4, 6]
    return [
        Sample(
            uid=str(i),
            token_ids=torch.full((length,), i + 1),
            loss_mask=torch.arange(length) >= 2,
        )
        for i, length in enumerate(lengths)
    ]
