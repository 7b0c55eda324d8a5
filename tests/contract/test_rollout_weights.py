"""Weights that arrive in a rollout engine: served at once and whole, or not at all."""

from concurrent.futures import ThreadPoolExecutor, wait
from copy import deepcopy
from itertools import product

import pytest
import torch
import torch.distributed as dist
from sharded_lora import peft_model, random_adapter
from test_rollout_base import (
    LONG,
    generated_by_transformers,
    generated_in_pieces,
    logprobs_by_transformers,
    prompts,
    requests,
    tokens,
)

from shardwise.config import EngineConfig, LoraConfig, OptimizerConfig
from shardwise.engine import TrainEngine
from shardwise.rollout import EmbeddedEngine
from shardwise.transfer import (
    DeltaDecoder,
    DeltaEncoder,
    DiskMedium,
    ProcessGroupMedium,
    SharedMemoryMedium,
    WeightSyncError,
    pull_weights,
    push_weights,
    sync_local,
)

PROJECTION, NORM = "model.layers.1.self_attn.k_proj.weight", "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"
MEDIA = {
    "in process": None,
    "shared memory": SharedMemoryMedium,
    "exposed memory": SharedMemoryMedium,
    "process group": ProcessGroupMedium,
    "disk": DiskMedium,
    "delta": ProcessGroupMedium,
}
"""In which trainer and engine meet. Of those between processes `make test` has one tensor."""


class Sender:
    """Sends the weights of a transformers model; the memory of each is overwritten when the next one is taken."""

    def __init__(self, model, tamper=lambda weights: None) -> None:
        tied = set(model.get_expanded_tied_weights_keys())
        self.weights = {name: tensor.clone() for name, tensor in model.state_dict().items() if name not in tied}
        tamper(self.weights)

    def named_weights(self, dtype):
        for name, tensor in self.weights.items():
            sent = tensor.clone()
            yield name, sent
            sent.fill_(7.0)


class Lasting:
    """The same weights, which nothing overwrites: what receivers are given lies in the memory of a medium."""

    def __init__(self, sender: Sender) -> None:
        self._weights = sender.weights

    def named_weights(self, dtype):
        yield from self._weights.items()


def put(weights, name, tensor) -> None:
    weights[name] = tensor


def changed(name, *, seed=0):
    def tamper(weights) -> None:
        generator = torch.Generator().manual_seed(seed)
        weights[name] = weights[name] + 0.3 * torch.randn(weights[name].shape, generator=generator)

    return tamper


@pytest.fixture
def medium() -> str:
    return "in process"


@pytest.fixture
def sync(medium, tmp_path):
    """`sync(engine, sender, version)`: the receipt. The ends of a medium stay joined for all syncs of a test; the
    sending one is in a thread (tests/transfer has processes)."""

    def inside(engine, sender, version):
        return sync_local(sender.named_weights(torch.float32), engine, version=version)

    if medium == "in process":
        yield inside
        return
    store = dist.HashStore()
    options = {"folder": tmp_path / "weights", "run": "/run"} if medium == "disk" else {}
    memories = {}
    encoder, decoder = (DeltaEncoder(), DeltaDecoder()) if medium == "delta" else (None, None)
    with ThreadPoolExecutor(1) as thread:
        joining = thread.submit(MEDIA[medium].join, store, 0, 2, **options)
        receiving = MEDIA[medium].join(store, 1, 2, **options)
        sending = joining.result()

        def over_the_medium(engine, sender, version):
            given = {"version": version, "bucket_bytes": 1 << 14, "delta": encoder}
            if medium == "exposed memory" and engine not in memories:
                if not isinstance(engine, EmbeddedEngine):
                    pytest.skip("only the embedded engine can be written to by the sender")
                memories[engine] = engine.share_weights()
            pushing = thread.submit(push_weights, Lasting(sender).named_weights(torch.float32), sending, **given)
            try:
                receipt = pull_weights(engine, receiving, version=version, delta=decoder, memory=memories.get(engine))
            finally:
                wait([pushing])
            assert pushing.result() == receipt
            return receipt

        yield over_the_medium
        sending.close()
        receiving.close()


@pytest.fixture
def restored(open_engine, references, sync):
    """Engines that serve their folder's weights again after the test."""
    opened = []

    def get(family):
        opened.append((open_engine(family), references[family]))
        return opened[-1][0]

    yield get
    for engine, model in opened:
        sync(engine, Sender(model), 0)


def changes():
    """Cells of every medium, tied (qwen3) and untied (llama), for tensors of every part."""
    names = [EMBEDDING, PROJECTION, NORM, "lm_head.weight", "model.layers.0.mlp.up_proj.weight"]
    for medium, family, name in product(MEDIA, ["qwen3", "llama"], names):
        if (family, name) == ("qwen3", "lm_head.weight"):
            continue  # tied to the embedding
        is_drawn = medium == "in process" or (family, name) == ("qwen3", PROJECTION)
        yield pytest.param(medium, family, name, marks=[] if is_drawn else pytest.mark.full)


@pytest.mark.parametrize(("medium", "family", "name"), changes())
def test_one_changed_tensor_changes_what_is_served_and_the_old_one_brings_it_back(
    restored, references, sync, medium, family, name
):
    """With a prompt that the prefix cache holds from before."""
    engine, model = restored(family), references[family]
    prompt_ids = [*prompts(4), (prompts(1, seed=8)[0] * LONG)[:LONG]]
    before = engine.generate(requests(prompt_ids))
    sender = Sender(model, changed(name))
    sync(engine, sender, 3)
    after = engine.generate(requests(prompt_ids))
    assert {c.policy_version for group in after for c in group} == {3}
    with torch.no_grad():
        kept = model.get_parameter(name).clone()
        model.get_parameter(name).copy_(sender.weights[name])
        expected = [generated_by_transformers(model, ids, 12) for ids in prompt_ids]
        scores = [logprobs_by_transformers(model, ids, new, 1.0) for ids, new in zip(prompt_ids, expected, strict=True)]
        model.get_parameter(name).copy_(kept)
    assert tokens(after) == [[ids] for ids in expected] != tokens(before)
    for group, score in zip(after, scores, strict=True):
        torch.testing.assert_close(torch.tensor(group[0].logprobs).double(), score, atol=5e-5, rtol=0)
    receipt = sync(engine, Sender(model), 4)
    assert (receipt.num_bytes_moved < receipt.num_bytes) == (medium == "delta")
    back = engine.generate(requests(prompt_ids))
    assert tokens(back) == tokens(before)
    assert [c.logprobs for group in back for c in group] == [c.logprobs for group in before for c in group]


REFUSED = {
    "missing": (lambda w: w.pop(PROJECTION), f"the engine serves {PROJECTION}, which was not sent"),
    "extra": (lambda w: put(w, "model.extra", torch.ones(2)), "model.extra was sent, which the engine does not serve"),
    "shape": (lambda w: put(w, PROJECTION, w[PROJECTION].t().contiguous()), f"{PROJECTION} was sent as"),
    "dtype": (lambda w: put(w, NORM, w[NORM].double()), f"{NORM} was sent as torch.float64"),
    "not a number": (lambda w: w[PROJECTION][3, 5].fill_(torch.nan), f"{PROJECTION} holds values that are not finite"),
    "infinite": (lambda w: w[EMBEDDING][3, 5].fill_(torch.inf), f"{EMBEDDING} holds values that are not finite"),
}


@pytest.mark.parametrize("medium", ["in process", *(pytest.param(m, marks=pytest.mark.full) for m in list(MEDIA)[1:])])
@pytest.mark.parametrize("fault", list(REFUSED))
def test_a_faulty_sync_is_refused_by_name_commits_nothing_and_the_next_one_heals(restored, references, sync, fault):
    engine, prompt_ids = restored("llama"), prompts(4)
    before = engine.generate(requests(prompt_ids))
    sync(engine, Sender(references["llama"]), 5)
    tamper, message = REFUSED[fault]
    with pytest.raises(WeightSyncError, match=f"weight sync 6: {message}"):
        sync(engine, Sender(references["llama"], tamper), 6)
    sync(engine, Sender(references["llama"]), 7)
    healed = engine.generate(requests(prompt_ids))
    assert tokens(healed) == tokens(before)
    assert {c.policy_version for group in healed for c in group} == {7}


LORA = LoraConfig(rank=3, alpha=12)


def merged_by_the_trainer(folder, adapter):
    """What a trainer sends whose adapter is the one in a folder."""
    config = EngineConfig(lora=LORA.model_copy(update={"adapter_path": str(adapter)}))
    engine = TrainEngine.build(folder, config, device=torch.device("cpu"), optimizer=OptimizerConfig())
    return {name: tensor.clone() for name, tensor in engine.named_weights(torch.float32)}


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_trap_11_logprobs_change_by_exactly_the_adapter_that_the_trainer_has_merged(
    run_ranks, restored, references, sync, folders, tmp_path, family
):
    """As peft computes the adapter beside the base, of given tokens and of those that are sampled."""
    engine, base = restored(family), references[family]
    adapter = random_adapter(folders[family], LORA, tmp_path / "adapter")
    adapted = peft_model(folders[family], adapter).eval()
    prompt_ids = [ids for ids in prompts(6, seed=3) if len(ids) > 2]
    before = engine.logprobs(prompt_ids)
    (merged,) = run_ranks(merged_by_the_trainer, 1, folders[family], adapter)
    sync(engine, Sender(base, lambda weights: weights.update(merged)), 8)
    after = engine.logprobs(prompt_ids)
    for ids, old, new in zip(prompt_ids, before, after, strict=True):
        change = logprobs_by_transformers(adapted, ids[:1], ids[1:], 1.0)
        change = change - logprobs_by_transformers(base, ids[:1], ids[1:], 1.0)
        torch.testing.assert_close(torch.tensor(new).double() - torch.tensor(old).double(), change, atol=1e-4, rtol=0)
        assert change.abs().max() > 0.05
    for ids, (found,) in zip(prompt_ids, engine.generate(requests(prompt_ids, temperature=1.0)), strict=True):
        expected = logprobs_by_transformers(adapted, ids, found.token_ids, 1.0)
        torch.testing.assert_close(torch.tensor(found.logprobs).double(), expected, atol=1e-4, rtol=0)
        assert found.policy_version == 8
    sync(engine, Sender(base), 9)
    assert engine.logprobs(prompt_ids) == before


def test_the_version_changes_with_the_commit_and_until_then_nothing_is_generated(restored, references, sync):
    engine, wanted = restored("llama"), requests(prompts(1))
    sync(engine, Sender(references["llama"]), 5)
    assert engine.generate(wanted)[0][0].policy_version == 5
    engine.load_weights(Sender(references["llama"]).named_weights(torch.float32))
    for ask in (lambda: engine.generate(wanted), lambda: engine.logprobs([[5, 6]])):
        with pytest.raises(RuntimeError, match="weights"):
            ask()
    engine.commit_weights(7)
    assert engine.generate(wanted)[0][0].policy_version == 7


def test_a_sync_that_fails_in_the_middle_leaves_nothing_to_generate_with(restored, references):
    engine, weights = restored("llama"), Sender(references["llama"]).named_weights(torch.float32)

    def breaking_off():
        yield next(weights)
        raise OSError("the sender is gone")

    with pytest.raises(OSError, match="the sender is gone"):
        engine.load_weights(breaking_off())
    with pytest.raises(RuntimeError, match="weight"):
        engine.generate(requests(prompts(1)))


def test_logprobs_are_those_that_sampling_at_temperature_1_reported(open_engine):
    """1e-4 nats in float32: prefill and decoding add up in another order."""
    engine, prompt_ids = open_engine("llama"), prompts(3)
    groups = engine.generate(requests(prompt_ids, temperature=1.0, num_completions=2))
    pairs = [(ids, completion) for ids, group in zip(prompt_ids, groups, strict=True) for completion in group]
    scored = engine.logprobs([ids + completion.token_ids for ids, completion in pairs])
    for (ids, completion), logprobs in zip(pairs, scored, strict=True):
        assert len(logprobs) == len(ids) + len(completion.token_ids) - 1
        assert logprobs[len(ids) - 1 :] == pytest.approx(completion.logprobs, abs=1e-4)


def test_each_token_carries_the_version_that_sampled_it_and_its_logprob(not_in_a_server, restored, references, sync):
    """Weights that arrive between the parts of completions; each token's logprob is of the model at its version."""
    engine, models = restored("llama"), [references["llama"]]

    def serve_new_weights():
        models.append(deepcopy(models[-1]))
        models[-1].get_parameter(PROJECTION).data.mul_(1.2)
        models[-1].get_parameter("model.layers.0.mlp.up_proj.weight").data.mul_(0.8)
        sync(engine, Sender(models[-1]), len(models) - 1)

    sync(engine, Sender(models[0]), 0)
    wanted = requests(prompts(6), num_completions=2, max_tokens=60, temperature=1.0)

    def num_of_several_versions(groups):
        return sum(len(set(completion.versions)) > 1 for group in groups for completion in group)

    found, _ = generated_in_pieces(
        engine, wanted, between=serve_new_weights, is_enough=lambda groups, _: num_of_several_versions(groups) > 2
    )
    assert num_of_several_versions(found) > 2
    for request, group in zip(wanted, found, strict=True):
        for completion in group:
            versions = torch.tensor(completion.versions)
            assert completion.versions == sorted(completion.versions)
            for version in versions.unique().tolist():
                scored = logprobs_by_transformers(models[version], request.prompt_ids, completion.token_ids, 1.0)
                held = torch.tensor(completion.logprobs).double()
                torch.testing.assert_close(held[versions == version], scored[versions == version], atol=1e-4, rtol=0)
