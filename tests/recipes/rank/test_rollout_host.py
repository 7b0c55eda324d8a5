"""What a rank samples, also where its engine has slept."""

import struct
from dataclasses import replace

import pytest
import torch
import xxhash
from forgetful_engine import ForgetfulEngine
from small_workers import REQUESTS, build, engine_of, largest_difference, roll_out, train, trainer_logprobs

from shardwise.config import ModelConfig, TrainingError
from shardwise.rollout import EmbeddedEngine
from shardwise.types import SampledSpan

pytestmark = pytest.mark.usefixtures("alone")


def test_what_a_rank_samples_carries_where_it_is_and_what_it_followed(tmp_path):
    worker = build("llama", tmp_path)
    going_on = replace(REQUESTS[1], num_completions=1, partial_token_ids=[7, 8])
    for request, group in zip([*REQUESTS, going_on], worker.generate([*REQUESTS, going_on]), strict=True):
        read = request.prompt_ids + request.partial_token_ids
        for completion in group:
            whole = read + completion.token_ids
            digest = xxhash.xxh3_64_intdigest(struct.pack(f"<{len(whole)}q", *whole))
            assert completion.spans == [SampledSpan(start=len(read), end=len(whole), digest=digest)]


def test_weights_that_sleeping_dropped_are_brought_again_before_anything_is_sampled(tmp_path):
    """Between a sync and the next sampling come a probe, a save and other engines, as in a run."""
    kept, worker = build("llama", tmp_path / "kept"), build("llama", tmp_path / "dropped")
    worker.engines.rollout_engine = ForgetfulEngine(worker.engines.rollout_engine)
    for each in (kept, worker):
        each.sync_weights(1)
        train(each, roll_out(each))
        each.sync_weights(2)
    samples = roll_out(kept)
    assert largest_difference(worker, samples) < 1e-4  # the trainer works, and the engine sleeps
    sequences = [sample.token_ids.tolist() for sample in samples]
    for _ in range(2):
        assert worker.rollout_logprobs(sequences, [[]] * len(sequences)) == kept.rollout_logprobs(
            sequences, [[]] * len(sequences)
        )
        worker.save("policy", ModelConfig(path=str(tmp_path)).model_dump_json(), str(tmp_path / "saved"))
        trainer_logprobs(worker, samples, "reference")
        assert worker.generate(REQUESTS) == kept.generate(REQUESTS)
        assert {group[0].policy_version for group in worker.generate(REQUESTS)} == {2}
        largest_difference(worker, samples)
    assert worker.engines.rollout_engine.num_syncs > 4 <= worker.engines.rollout_engine.num_dropped


def test_the_embedded_engine_sleeps_while_the_trainer_works_and_samples_the_same(tmp_path, monkeypatch):
    """On a CPU, where settings cannot ask for it."""
    resident, worker = build("llama", tmp_path / "resident"), build("llama", tmp_path / "sleeping")
    there = []
    for level, each in enumerate((resident, worker)):
        model = each.engines.rollout_engine._model
        for weight in model.parameters():
            weight.data = weight.data.clone()  # as on a device: not mapped from the file, which cannot be freed
        each.engines.rollout_engine = EmbeddedEngine(model, max_rows=5, device=torch.device("cpu"), sleep_level=level)

    def watch_rollout(owner, name):
        original = getattr(owner, name)

        def run(*args, **kwargs):
            weights = [
                weight.untyped_storage().nbytes() for _, weight in worker.engines.rollout_engine.served_weights()
            ]
            there.append((name, all(weights), any(weights)))
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, run)

    for name in ("forward", "forward_backward", "named_weights"):
        watch_rollout(engine_of(worker), name)
    watch_rollout(worker.engines.rollout_engine, "generate")
    for number in range(2):
        samples = [roll_out(each) for each in (resident, worker)]
        for one, other in zip(*samples, strict=True):
            assert torch.equal(one.token_ids, other.token_ids)
            torch.testing.assert_close(one.rollout_logprobs, other.rollout_logprobs, atol=1e-5, rtol=1e-5)
        if number == 0:  # once: weights that were hashed on a CPU cannot be freed either
            for each, own in zip((resident, worker), samples, strict=True):
                trainer_logprobs(each, own)
                train(each, own)
                each.sync_weights(1)
    here, away = (True, True), (False, False)
    assert there == [
        ("generate", *here),
        ("forward", *away),
        ("forward_backward", *away),
        ("named_weights", *here),
        ("generate", *here),
    ]


def test_weights_of_a_policy_that_was_trained_since_are_not_brought_as_those_that_sleeping_dropped(tmp_path):
    worker = build("llama", tmp_path)
    worker.engines.rollout_engine = ForgetfulEngine(worker.engines.rollout_engine)
    worker.sync_weights(1)
    train(worker, roll_out(worker))
    with pytest.raises(TrainingError, match="sleep_level=2 dropped the weights, and no weight sync came since"):
        worker.generate(REQUESTS)
    worker.sync_weights(2)
    assert worker.generate(REQUESTS)
