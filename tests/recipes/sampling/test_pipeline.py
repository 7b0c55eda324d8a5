import json
import threading
import time
from dataclasses import replace

import pytest

from shardwise.config import DataError, ModelError, PromptDataConfig, TrainingError
from shardwise.data import PromptStream
from shardwise.recipes.sampling.pipeline import Pipeline
from shardwise.recipes.sampling.sampler import Rollout
from shardwise.recipes.sampling.sync_gate import SyncGate
from shardwise.types import Completion, Example, MetricValue, RolloutGroup

EXAMPLES = [Example(uid=f"row {n}", prompt_ids=[n], prompt=str(n), data_source="", ground_truth=n) for n in range(5)]


class Engines:
    """Stands for rollout engines and their sampler: says which version served which step, and checks that nothing is
    sampled while weights change."""

    examples = EXAMPLES

    def __init__(self, stream, *, seconds=0.0, fails_at=None):
        self.version, self.stream, self.seconds, self.fails_at = 0, stream, seconds, fails_at
        self.is_sampling = False
        self.log = []

    def collect(self, step):
        self.is_sampling = True
        version = self.version
        if step == self.fails_at:
            raise ValueError("the moon is full")
        time.sleep(self.seconds)
        (row,) = self.stream.take(1, step=step)
        assert self.version == version, "the weights changed under a rollout"
        self.is_sampling = False
        self.log.append((step, version))
        completion = Completion(token_ids=[step], logprobs=[-0.1], finish_reason="stop", policy_version=version)
        group = RolloutGroup(
            example=EXAMPLES[row],
            completions=[completion],
            texts=["x"],
            answers=["x"],
            rewards=[0.5],
            reward_parts=[{}],
            failures=[None],
        )
        return Rollout(groups=[group], greedy_rewards=[1 / 3], metrics={"a": MetricValue.mean(1.0, 3)})


def new_stream(*, rows_may_differ=False):
    return PromptStream([""] * len(EXAMPLES), PromptDataConfig(), seed=0, rows_may_differ=rows_may_differ)


def play(
    *, max_staleness, sample_seconds=0.0, train_seconds=0.0, total_steps=6, first_step=1, state=None, **rows_may_differ
):
    """Trains without training. Returns by step the version that sampled it, the rows, and the state after step 3."""
    stream = new_stream(**rows_may_differ)
    engines = Engines(stream, seconds=sample_seconds)
    taken, saved = [], None
    with Pipeline(engines, stream, total_steps=total_steps, max_staleness=max_staleness) as pipeline:
        if state is not None:
            pipeline.load_state_dict(json.loads(json.dumps(state)))
        engines.version = first_step - 1
        pipeline.start(first_step)
        for step in range(first_step, total_steps + 1):
            rollout = pipeline.take(step)
            assert rollout.groups[0].completions[0].token_ids == [step]
            taken.append((step, rollout.oldest_version, rollout.groups[0].example.uid))
            time.sleep(train_seconds)
            if pipeline.takes_weights():
                with pipeline.serving(step, samples=False):
                    assert not engines.is_sampling
                    engines.version = step
            if step == 3:
                saved = pipeline.state_dict()
        idle = pipeline.take_idle_seconds()
    return taken, saved, idle


def versions(taken):
    return [version for _, version, _ in taken]


@pytest.mark.parametrize(("sample_seconds", "train_seconds"), [(0.0, 0.0), (0.03, 0.0), (0.0, 0.03), (0.02, 0.02)])
@pytest.mark.parametrize("max_staleness", [None, 0, 1])
def test_up_to_a_staleness_of_one_the_order_of_events_does_not_depend_on_time(
    max_staleness, sample_seconds, train_seconds
):
    taken, _, _ = play(max_staleness=max_staleness, sample_seconds=sample_seconds, train_seconds=train_seconds)
    assert versions(taken) == ([0, 0, 1, 2, 3, 4] if max_staleness else [0, 1, 2, 3, 4, 5])


def test_rows_are_the_same_however_far_ahead_they_are_sampled():
    rows = [[uid for _, _, uid in play(max_staleness=bound)[0]] for bound in (None, 0, 1, 3)]
    assert all(other == rows[0] for other in rows)


@pytest.mark.parametrize(("sample_seconds", "train_seconds"), [(0.03, 0.0), (0.0, 0.03), (0.02, 0.02)])
def test_a_larger_bound_holds_and_is_used(sample_seconds, train_seconds):
    taken, _, _ = play(max_staleness=3, sample_seconds=sample_seconds, train_seconds=train_seconds, total_steps=12)
    staleness = [step - 1 - version for step, version, _ in taken]
    assert max(staleness) <= 3
    if sample_seconds < train_seconds:
        assert max(staleness) == 3  # nothing but the bound stops sampling


@pytest.mark.alone
def test_sampling_and_training_overlap():
    """Ten steps of 50 ms each: 1 s in turn, little more than half of it with one step ahead."""

    def seconds(max_staleness):
        start = time.perf_counter()
        play(max_staleness=max_staleness, sample_seconds=0.05, train_seconds=0.05, total_steps=10)
        return time.perf_counter() - start

    ahead, in_turn = seconds(1), seconds(None)
    assert in_turn >= 1.0
    assert 0.5 < ahead < 0.8 * in_turn


@pytest.mark.alone
def test_idle_time_is_what_sampling_waited_for_training():
    start = time.perf_counter()
    _, _, idle = play(max_staleness=0, train_seconds=0.05, total_steps=4)
    assert 0.15 <= idle <= time.perf_counter() - start
    _, _, idle = play(max_staleness=None, train_seconds=0.05, total_steps=4)
    assert idle == 0.0


@pytest.mark.parametrize("max_staleness", [None, 0, 1])
@pytest.mark.parametrize("sample_seconds", [0.0, 0.02])
def test_a_run_goes_on_from_its_state_with_the_rollouts_that_were_ahead(max_staleness, sample_seconds):
    whole, saved, _ = play(max_staleness=max_staleness, sample_seconds=sample_seconds)
    assert len(saved["ready"]) == (0 if max_staleness is None else max_staleness + 1)
    rest, _, _ = play(max_staleness=max_staleness, first_step=4, state=saved)
    assert rest == whole[3:]


@pytest.mark.parametrize("sync_gate", [None, SyncGate(lambda: None, timeout_seconds=20)], ids=["whole", "partial"])
def test_from_a_save_to_the_next_step_nothing_begins(sync_gate):
    """With a staleness of 3 the rollouts of 4 steps may begin at once."""
    stream = new_stream()
    engines = Engines(stream, seconds=0.02)
    with Pipeline(engines, stream, total_steps=9, max_staleness=3, sync_gate=sync_gate) as pipeline:
        pipeline.start(1)
        pipeline.take(1)
        num_ready = len(pipeline.state_dict()["ready"])
        assert num_ready <= 2
        time.sleep(0.1)
        assert len(engines.log) == 1 + num_ready
        for step in (2, 3, 4):
            assert pipeline.take(step).oldest_version == 0
    assert engines.log == [(step, 0) for step in range(1, 5)]


def test_rollouts_that_were_sampled_ahead_are_used_where_they_are_sampled_in_turn():
    _, saved, _ = play(max_staleness=0)
    rest, _, _ = play(max_staleness=None, first_step=4, state=saved)
    assert rest == play(max_staleness=None)[0][3:]


def test_rollouts_of_a_checkpoint_are_used_where_a_lower_bound_holds_from_then_on():
    """Their prompts are taken, so leaving them out would leave rows out."""
    whole, saved, _ = play(max_staleness=1)
    rest, _, _ = play(max_staleness=0, first_step=4, state=saved)
    assert versions(rest) == [2, 3, 5]
    assert [uid for _, _, uid in rest] == [uid for _, _, uid in whole[3:]]


def test_a_rollout_comes_back_from_json_as_it_was():
    rollout = Engines(new_stream()).collect(1)
    assert Rollout.from_json(json.loads(json.dumps(rollout.to_json())), EXAMPLES) == rollout


FORMAT_4 = """{
    "format": 4, "greedy_rewards": null,
    "groups": [{
        "example": "row 2", "row_prompt_ids": [2], "texts": ["x"], "answers": ["x"],
        "rewards": [0.5], "reward_parts": [{}], "failures": [null], "has_baseline": true,
        "completions": [{
            "token_ids": [1], "logprobs": [-0.1], "finish_reason": "stop", "policy_version": 0, "token_versions": null,
            "is_sampled": null, "turn_starts": [0], "prompt_ids": null, "experts": null,
            "spans": [{"start": 1, "end": 2, "digest": 7}]
        }]
    }],
    "metrics": {
        "tokens/sampled": {"kind": "sum", "total": 1.0, "count": 1},
        "tokens/dropped": {"kind": "sum", "total": 0.0, "count": 1}
    }
}"""


def test_a_rollout_of_a_checkpoint_is_read_in_the_format_that_it_names_and_in_no_other():
    """What a checkpoint of this format holds. Once it cannot be read any more, raise the format and write it anew."""
    written = json.loads(FORMAT_4)
    assert json.loads(json.dumps(Rollout.from_json(written, EXAMPLES).to_json())) == written
    del written["format"]  # as the versions before wrote it, without spans
    del written["groups"][0]["completions"][0]["spans"]
    with pytest.raises(
        ModelError, match=r"in format 1, and this version of Shardwise reads 4; resume it with the version"
    ):
        Rollout.from_json(written, EXAMPLES)


def test_a_rollout_of_a_row_that_is_gone_names_it():
    written = json.loads(FORMAT_4)
    uid = written["groups"][0]["example"]
    with pytest.raises(DataError, match=f"rollouts of the row '{uid}', .* give data.train_files as they were"):
        Rollout.from_json(written, [example for example in EXAMPLES if example.uid != uid])


def test_a_rollout_of_a_row_that_has_another_prompt_names_it():
    """A row that was put before it changes the numbers of lines, which names are made of."""
    written, shifted = json.loads(FORMAT_4), [replace(one, prompt_ids=[*one.prompt_ids, 9]) for one in EXAMPLES]
    with pytest.raises(
        DataError, match=r"rollouts of the row 'row 2', .* none of that name and prompt; .* allow others"
    ):
        Rollout.from_json(written, shifted)
    del written["groups"][0]["row_prompt_ids"]  # as earlier checkpoints have it
    assert Rollout.from_json(written, shifted).groups[0].example == shifted[2]


@pytest.mark.parametrize("changed", [False, True])
def test_nothing_is_known_of_the_difficulty_of_rows_that_are_others_though_as_many(changed, capsys):
    first, second = new_stream(), new_stream(rows_may_differ=True)
    first.pass_rates = {2: 1.0}
    with Pipeline(Engines(first), first, total_steps=5) as pipeline:
        state = json.loads(json.dumps(pipeline.state_dict()))
    engines = Engines(second)
    if changed:
        engines.examples = [replace(one, prompt=f"another {one.prompt}") for one in engines.examples]
    with Pipeline(engines, second, total_steps=5) as pipeline:
        pipeline.load_state_dict(state)
    assert second.pass_rates == ({} if changed else {2: 1.0})
    assert second.position == first.position


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_rollouts_ahead_of_rows_that_are_gone_are_sampled_anew_where_rows_may_differ(max_staleness, capsys):
    """With the weights that are there by then; where no row has changed all goes on as ever."""
    whole, saved, _ = play(max_staleness=max_staleness)
    rest, _, _ = play(max_staleness=max_staleness, first_step=4, state=saved, rows_may_differ=True)
    assert rest == whole[3:]
    assert capsys.readouterr().err == ""
    saved["ready"][-1]["groups"][0]["row_prompt_ids"] = [7]
    with pytest.raises(DataError, match="none of that name and prompt"):
        play(max_staleness=max_staleness, first_step=4, state=saved)
    rest, _, _ = play(max_staleness=max_staleness, first_step=4, state=saved, rows_may_differ=True)
    uid, steps = saved["ready"][-1]["groups"][0]["example"], max_staleness + 1
    assert capsys.readouterr().err == (
        f"warning: the checkpoint holds rollouts of the row '{uid}', which is gone or has another prompt; the rollouts "
        f"of {steps} step{'s' if steps > 1 else ''} that were sampled ahead are sampled anew, from the rows that come "
        "next\n"
    )
    assert [(step, version) for step, version, _ in rest] == ([(4, 3), (5, 3), (6, 4)] if max_staleness else [
        (4, 3), (5, 4), (6, 5)])  # fmt: skip
    assert [row for _, _, row in rest][: 2 - max_staleness] == [row for _, _, row in whole[4 + max_staleness :]]


def test_what_ends_sampling_ends_training():
    stream = new_stream()
    with Pipeline(Engines(stream, fails_at=2), stream, total_steps=5, max_staleness=1) as pipeline:
        pipeline.start(1)
        pipeline.take(1)
        with pytest.raises(ValueError, match="the moon is full"):
            pipeline.take(2)
        with pytest.raises(ValueError, match="the moon is full"), pipeline.serving(1, samples=False):
            pytest.fail("weights were served after sampling failed")


@pytest.mark.alone
def test_leaving_it_does_not_wait_for_rollouts_that_have_begun():
    stream = new_stream()
    engines = Engines(stream)
    hangs = threading.Event()
    engines.collect = lambda step: hangs.wait()
    start = time.perf_counter()
    with Pipeline(engines, stream, total_steps=5, max_staleness=1) as pipeline:
        pipeline.start(1)
    assert time.perf_counter() - start < 1
    hangs.set()


def test_a_completion_older_than_the_bound_never_reaches_training():
    stream = new_stream()
    engines = Engines(stream)
    with Pipeline(engines, stream, total_steps=5, max_staleness=1) as pipeline:
        engines.version = 2
        pipeline.start(5)  # says that version 4 is served
        with pytest.raises(TrainingError, match=r"step 5 was sampled 2 versions ago, and rollout\.max_staleness=1"):
            pipeline.take(5)


class InterruptedEngines(Engines):
    """Samples each step in calls of 10 ms, between which new weights come; never done before they came once."""

    def __init__(self, stream):
        super().__init__(stream)
        self.interrupted = threading.Event()
        self.sync_gate = SyncGate(self.interrupted.set, timeout_seconds=20)

    def collect(self, step):
        begun = self.version
        while step > 1 and self.version == begun and begun < 5:
            with self.sync_gate.sampling():
                version = self.version
                self.interrupted.wait(0.01)
                assert self.version == version, "the weights changed inside a call"
        return super().collect(step)


@pytest.mark.parametrize("max_staleness", [1, 3])
def test_with_turns_new_weights_do_not_wait_for_rollouts_that_have_begun(max_staleness):
    """They would wait for ever: rollouts end after new weights came."""
    stream = new_stream()
    engines = InterruptedEngines(stream)
    staleness = []
    with Pipeline(engines, stream, total_steps=6, max_staleness=max_staleness, sync_gate=engines.sync_gate) as pipeline:
        pipeline.start(1)
        for step in range(1, 7):
            assert pipeline.takes_weights()
            staleness.append(step - 1 - pipeline.take(step).oldest_version)
            with pipeline.serving(step, samples=False):
                engines.version = step
                engines.interrupted.clear()
    assert max(staleness) <= max_staleness
