"""Engines as recipes see them: one shard for each group of ranks that share sequences."""

import pytest

from shardwise.config import BradleyTerry, EngineConfig, ModelConfig, OptimizerConfig
from shardwise.recipes.engine_source import EngineSource
from shardwise.recipes.engines import build_engine
from shardwise.recipes.losses import LossSource
from shardwise.types import MetricValue


@pytest.mark.parametrize(("size", "ulysses_size"), [(1, 1), (2, 1), (3, 1), (4, 2), (2, 2)])
def test_train_sends_every_sample_once_with_the_counts_of_the_whole_step(
    fake_group, remote, samples, size, ulysses_size
):
    def train(rank, batches, denominators, role, *_):
        tokens = [sum(batch.input_ids[batch.loss_mask].tolist()) for batch in batches]
        return {"train/loss": MetricValue.sum(float(sum(tokens))), "x": MetricValue.mean(rank, 1)}

    group = fake_group(size, train=train)
    engine = remote(group, "critic", ulysses_size=ulysses_size, max_tokens_per_micro_batch=9)
    metrics = engine.train(samples)
    # Trained tokens of each sample times its token id: 3*1 + 1*2 + 2*3 + 4*4.
    assert metrics["train/loss"].result() == 27
    assert metrics["x"].result() == pytest.approx((size / ulysses_size - 1) / 2)
    assert metrics["train/num_tokens"].result() == 10
    assert metrics["train/num_sequences"].result() == 4
    ((_, shards, denominators, role, teacher, bundle),) = group.calls
    assert (role, teacher, bundle) == ("critic", "", "")
    assert (denominators.num_tokens, denominators.num_sequences) == (10, 4)
    assert len(shards) == size // ulysses_size
    assert len({len(shard) for shard in shards}) == 1
    assert max(len(batch.input_ids) for shard in shards for batch in shard) <= 9


def test_the_loss_of_several_optimizer_steps_is_their_mean(fake_group, remote, samples):
    losses = iter([1.0, 2.0, 6.0])
    group = fake_group(1, train=lambda *_: {"train/loss": MetricValue.sum(next(losses))})
    engine = remote(group)
    merged = engine.train(samples)["train/loss"].merge(engine.train(samples)["train/loss"])
    assert merged.merge(engine.train(samples)["train/loss"]).result() == 3.0


@pytest.mark.parametrize("keep_together", [1, 2, 4])
def test_samples_that_are_compared_share_a_micro_batch_in_their_order(fake_group, remote, samples, keep_together):
    group = fake_group(2, train=lambda *_: {"train/loss": MetricValue.sum(0.0)})
    remote(group, max_tokens_per_micro_batch=18).train(samples, keep_together=keep_together)
    ((_, shards, *_),) = group.calls
    found = [batch.sample_index for shard in shards for batch in shard]
    assert sorted(index for members in found for index in members) == [0, 1, 2, 3]
    for members in found:
        for start in range(0, len(members), keep_together):
            unit = members[start : start + keep_together]
            assert unit[0] % keep_together == 0
            assert unit == list(range(unit[0], unit[0] + keep_together))


@pytest.mark.parametrize("with_adapters", [True, False])
@pytest.mark.parametrize(("size", "ulysses_size"), [(1, 1), (4, 2)])
def test_scores_come_back_in_the_order_of_the_samples(fake_group, remote, samples, size, ulysses_size, with_adapters):
    group = fake_group(size, score=lambda _, batches, *__: [batch.input_ids * 0.5 for batch in batches])
    engine = remote(group, "reference", ulysses_size=ulysses_size, max_tokens_per_micro_batch=9)
    found = engine.score(samples, with_adapters=with_adapters)
    assert [values.tolist() for values in found] == [(s.token_ids * 0.5).tolist() for s in samples]
    assert [call[2:] for call in group.calls] == [("reference", with_adapters)]


def test_a_model_without_adapters_is_asked_for_by_word_only(fake_group, remote, samples):
    group = fake_group(1, score=lambda _, batches, *__: [batch.input_ids * 0.5 for batch in batches])
    remote(group).score(samples)
    assert group.calls[0][2:] == ("policy", True)


def test_size_is_in_millions_and_names_the_trained_part_if_it_is_one(fake_group, remote):
    engine = remote(fake_group())
    assert engine.size == "7.0M parameters (0.50M trained)"
    group = fake_group(1, build_engine=lambda *_: (1_234_500_000, 1_234_500_000, 0))
    source = EngineSource(model=ModelConfig(path="m"), layout=EngineConfig())
    assert build_engine(group, "policy", source).size == "1,234.5M parameters"
    group = fake_group(1, build_engine=lambda *_: (41_260, 1_230, 0))
    assert build_engine(group, "policy", source).size == ("41.3K parameters (1.23K trained)")


@pytest.mark.parametrize("frozen", [True, False])
def test_build_engine_sends_plain_data_and_keeps_what_the_ranks_say(fake_group, frozen):
    group = fake_group(3, build_engine=lambda rank, *_: (50, 20, 100 + 10 * rank))
    layout, optimizer = EngineConfig(fsdp_size=3), OptimizerConfig(learning_rate=0.5)
    source = EngineSource(
        model=ModelConfig(path="there"),
        layout=layout.frozen() if frozen else layout,
        head="token_values",
        seed=4,
        temperature=0.25,
    )
    engine = build_engine(group, "critic", source, optimizer=None if frozen else optimizer, total_steps=9)
    ((method, role, sent, *trained),) = group.calls
    assert (method, role) == ("build_engine", "critic")
    assert EngineSource.model_validate_json(sent) == source
    assert trained == ([] if frozen else [optimizer.model_dump_json(), 9, False])
    assert engine.has_weights == frozen
    assert (engine.num_parameters, engine.num_trained_parameters, engine.num_bytes_read) == (50, 20, 120)
    assert (engine.role, engine.group, engine.source) == ("critic", group, source)


def test_trained_weights_are_read_once_unless_a_checkpoint_has_brought_them(fake_group, remote):
    answers = {"load_initial_weights": lambda rank, _: 100 + rank, "load_state": lambda _, role, folder: folder or None}
    first, *others = (remote(fake_group(2, **answers)) for _ in range(3))
    for engine in (first, *others):
        engine.has_weights = False
        assert engine.load_state("damaged") == "damaged"
        assert not engine.has_weights
    for _ in range(2):
        first.load_initial_weights()
    assert first.num_bytes_read == 101
    assert first.group.methods == ["load_state", "load_initial_weights"]
    others[0].load_state("")
    others[1].load_weights_alone("step_1", "state")
    for engine in others:
        engine.load_initial_weights()
        assert "load_initial_weights" not in engine.group.methods
        assert engine.num_bytes_read == 100


def test_losses_and_saving_are_asked_for_by_role(fake_group, remote):
    group = fake_group(2)
    engine = remote(group, "reward model")
    config = BradleyTerry(center_coef=0.5)
    engine.use_loss("reward_model", config, kl=0.25)
    engine.save("out/step_1", state="out/state")
    loss = LossSource(kind="reward_model", config=config.model_dump_json(), numbers={"kl": 0.25})
    assert group.calls == [
        ("use_loss", "reward model", loss.model_dump_json()),
        ("save", "reward model", ModelConfig(path="m").model_dump_json(), "out/step_1", "out/state"),
    ]


@pytest.mark.parametrize("size", [1, 2])
def test_a_student_is_measured_against_its_teacher_in_the_order_of_the_samples(fake_group, remote, samples, size):
    group = fake_group(
        size,
        divergence=lambda _, batches, *__: [batch.input_ids * 0.25 for batch in batches],
        train=lambda *_: {"train/loss": MetricValue.sum(1.0)},
    )
    student, teacher = (remote(group, role, max_tokens_per_micro_batch=9) for role in ("student", "teacher"))
    found = student.divergence(samples, teacher)
    assert [values.tolist() for values in found] == [(s.token_ids * 0.25).tolist() for s in samples]
    student.train(samples, teacher=teacher)
    assert group.calls[0][-2:] == ("student", "teacher")
    assert group.calls[1][-3:] == ("student", "teacher", "")
