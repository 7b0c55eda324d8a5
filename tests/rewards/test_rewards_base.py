import subprocess
import sys

from shardwise.rewards.base import Answer, RewardJob


def test_rewards_import_without_torch():
    code = "import sys, shardwise.rewards; sys.exit('torch' in sys.modules or 'sympy' in sys.modules)"
    root = __file__.rsplit("/tests/", 1)[0]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60).returncode == 0


def test_a_job_has_failed_only_where_its_environment_has():
    job = {"uid": "7", "data_source": "", "solution_str": "", "ground_truth": None}
    assert RewardJob(**job).failure is None
    assert RewardJob(**job, outcome=Answer(score=1.0)).failure is None
    assert RewardJob(**job, outcome=Answer(failure="it hung")).failure == "it hung"
