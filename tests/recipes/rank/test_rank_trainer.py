"""What a rank trains and scores with the engines of several roles."""

import pytest
import torch
from small_workers import (
    OPTIMIZER,
    ROLES,
    build,
    build_everyone,
    build_one,
    bytes_on_device,
    engine_of,
    roll_out,
    score,
    supervised_samples,
    train,
    trainer_logprobs,
    with_values,
)
from tiny_models import reference_logprobs, tiny_model

from shardwise.config import CriticConfig, DistillationConfig, EngineConfig
from shardwise.data import pack
from shardwise.recipes.losses import LossSource
from shardwise.recipes.rank.worker import Worker

pytestmark = pytest.mark.usefixtures("alone")


def test_the_reference_stays_where_the_policy_started(tmp_path):
    worker = build("llama", tmp_path)
    samples = roll_out(worker)
    start = torch.cat(trainer_logprobs(worker, samples))
    torch.testing.assert_close(torch.cat(trainer_logprobs(worker, samples, "reference")), start)
    train(worker, samples)
    moved = torch.cat(trainer_logprobs(worker, samples))
    assert float((moved - start).abs().max()) > 1e-2
    torch.testing.assert_close(torch.cat(trainer_logprobs(worker, samples, "reference")), start)


def test_a_loss_is_that_of_one_role(everyone):
    """The critic's own loss says nothing about the policy's, which is cross-entropy until another is bound."""
    worker = Worker(torch.device("cpu"))
    for role, head in (("policy", "logprobs"), ("critic", "token_values")):
        build_one(worker, role, everyone, EngineConfig(), optimizer=OPTIMIZER, head=head)
    worker.use_loss("critic", LossSource.of("value", CriticConfig(value_loss={"clip": None})).model_dump_json())
    samples = with_values(worker, supervised_samples())
    logprobs = torch.cat(score(worker, samples))
    assert train(worker, samples)["train/loss"].result() == pytest.approx(-float(logprobs.sum()) / 3, rel=1e-6)
    assert train(worker, samples, "critic")["train/loss"].result() == pytest.approx(0.5, rel=1e-5)


def test_every_role_scores_with_its_own_head(everyone):
    worker = build_everyone(everyone, {})
    samples = roll_out(worker)
    found = {role: trainer_logprobs(worker, samples, role) for role in ROLES}
    torch.testing.assert_close(found["policy"], found["reference"])
    for sample, values, scores in zip(samples, found["critic"], found["reward"], strict=True):
        assert not values[~sample.loss_mask].any()
        assert scores[-1] != 0
        assert not scores[:-1].any()
    assert float((torch.cat(found["critic"]) - torch.cat(found["policy"])).abs().max()) > 1e-3


def test_scores_are_at_the_temperature_of_their_engine(everyone):
    worker, reference = Worker(torch.device("cpu")), tiny_model("llama")
    samples = supervised_samples()
    for temperature in (1.0, 0.5):
        build_one(worker, f"at {temperature}", everyone, EngineConfig().frozen(), temperature=temperature)
        for sample, values in zip(samples, score(worker, samples, f"at {temperature}"), strict=True):
            with torch.no_grad():
                expected = reference_logprobs(reference, sample.token_ids, temperature=temperature)
            torch.testing.assert_close(values[sample.loss_mask], expected[sample.loss_mask], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("offload", [False, True])
def test_a_student_learns_from_its_teacher_one_after_the_other_on_the_device(everyone, monkeypatch, offload):
    """The divergence from a teacher of the same weights is 0, and grows when the student learns something else."""
    worker, samples = Worker(torch.device("cpu")), supervised_samples()
    layout = EngineConfig(param_offload=offload)
    build_one(worker, "teacher", everyone, layout.frozen())
    build_one(worker, "student", everyone, layout, optimizer=OPTIMIZER)
    worker.check_teacher("student", "teacher")
    train(worker, samples, "student")
    worker.use_loss("student", LossSource.of("distillation", DistillationConfig()).model_dump_json())
    there = []
    for role in ("student", "teacher"):
        engine = engine_of(worker, role)
        for name in ("teacher_outputs", "forward_backward"):
            original = getattr(engine, name)

            def run(*args, original=original, role=role, **kwargs):
                there.append((role, [bytes_on_device(engine_of(worker, r))[0] > 0 for r in ("student", "teacher")]))
                return original(*args, **kwargs)

            monkeypatch.setattr(engine, name, run)
    packed = pack(samples, num_shards=1, max_tokens=10)
    divergences = [torch.cat(worker.divergence(packed.shards[0], "student", "teacher"))]
    losses = [worker.train(packed.shards[0], packed.denominators, "student", "teacher")["train/loss"].result()]
    divergences.append(torch.cat(worker.divergence(packed.shards[0], "student", "teacher")))
    assert losses[0] == pytest.approx(float(divergences[0].sum()) / packed.denominators.num_tokens, rel=1e-5)
    assert 0 < float(divergences[1].sum()) < float(divergences[0].sum())
    teaches, learns = ("teacher", [not offload, True]), ("student", [True, not offload])
    assert there == [teaches, teaches, learns, teaches]
