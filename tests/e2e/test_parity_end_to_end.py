"""`shardwise parity` as a user calls it."""


def test_a_model_is_compared_with_itself_in_the_rollout_engine(assets, shell):
    done = shell("shardwise", "parity", str(assets.model), "-p", "47+85=", "--max-tokens", "5")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"{assets.model}: trainer and embedded rollout engine in float32, prompts: 1\n")
    assert done.out.endswith("the same: within the bounds of float32, 0.001 on average and 0.01 for a token\n")


def test_two_processes_are_refused(assets, shell):
    done = shell("shardwise", "parity", str(assets.model), "--nproc", "2")
    assert done.code == 2
    assert "unrecognized arguments: --nproc 2" in done.err
