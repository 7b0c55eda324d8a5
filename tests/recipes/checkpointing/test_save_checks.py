import shutil
from types import SimpleNamespace

import pytest

from shardwise.config import ExportError, NotFiniteError, TrainerConfig
from shardwise.recipes.checkpointing.save_checks import check_before_saving

TRAINER = TrainerConfig()
FREE = shutil._ntuple_diskusage


@pytest.fixture
def engine(remote):
    """7.0M parameters, of which 0.5M are trained."""

    def make(role="policy", **layout):
        return remote(None, role, **layout)

    return make


@pytest.fixture
def holders(fake_group):
    """Ranks that find the tensors of every role that they are made with."""

    def make(*names_of):
        return fake_group(len(names_of), nonfinite_tensors=lambda rank, role: names_of[rank].get(role, []))

    return make


def refused(monkeypatch, run, engines, trainer=TRAINER, *, needed):
    """Whether a byte less than `needed` is refused, and `needed` bytes are enough."""
    finite = SimpleNamespace(call=lambda *_: [[]])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: FREE(10**12, 0, needed))
    check_before_saving(run, engines, trainer, finite)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: FREE(10**12, 0, needed - 1))
    with pytest.raises(ExportError, match=rf"takes about {needed} bytes, and {needed - 1} are free"):
        check_before_saving(run, engines, trainer, finite)
    return True


def test_the_first_checkpoint_needs_room_for_weights_and_the_smallest_state(monkeypatch, tmp_path, engine):
    """Masters and one moment."""
    million = 1_000_000
    assert refused(monkeypatch, tmp_path, [engine()], needed=7 * million * 4 + million // 2 * 8)
    lean = {"param_dtype": "bfloat16", "master_dtype": "bfloat16"}
    assert refused(monkeypatch, tmp_path, [engine(**lean)], needed=7 * million * 2 + million // 2 * 4)
    adapters = {"lora": {"rank": 4, "save_merged": False}}
    assert refused(monkeypatch, tmp_path, [engine(**adapters)], needed=million // 2 * (4 + 8))
    without = TrainerConfig(save_state=False)
    assert refused(monkeypatch, tmp_path, [engine(), engine()], without, needed=2 * 7 * million * 4)


def test_later_ones_need_the_room_of_the_one_before(monkeypatch, tmp_path, engine):
    for step, size in ((2, 700), (10, 500)):
        folder = tmp_path / "checkpoints" / f"step_{step}"
        (folder / "state").mkdir(parents=True)
        (folder / "weights").write_bytes(bytes(size))
        (folder / "state" / "run.json").write_bytes(bytes(20))
    assert refused(monkeypatch, tmp_path, [engine()], needed=520)
    (tmp_path / "checkpoints" / "step_20").mkdir()  # without a state
    (tmp_path / "checkpoints" / "step_20" / "weights").write_bytes(bytes(300))
    assert refused(monkeypatch, tmp_path, [engine()], needed=520)
    assert refused(monkeypatch, tmp_path, [engine()], TrainerConfig(save_state=False), needed=300)


def test_f29_the_first_tensor_that_is_not_finite_is_named_with_its_engine(tmp_path, engine, holders):
    policy, critic = engine(), engine("critic")
    ranks = holders({}, {"critic": ["score.weight", "exp_avg/score.weight"]})
    check_before_saving(tmp_path, [policy], TRAINER, ranks)
    with pytest.raises(NotFiniteError, match=r"^score.weight and 1 more tensors of the critic hold NaN or infinities"):
        check_before_saving(tmp_path, [policy, critic], TRAINER, ranks)
    ranks = holders({"policy": ["exp_avg/w"]}, {"policy": ["exp_avg/w"]})  # every rank holds a part of it
    with pytest.raises(NotFiniteError, match=r"^exp_avg/w of the policy hold"):
        check_before_saving(tmp_path, [policy], TRAINER, ranks)
