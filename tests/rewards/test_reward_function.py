from shardwise.rewards.reward_function import call_function


def test_call_function_turns_sys_exit_and_a_wrong_signature_into_failures():
    def leaves(**_):
        raise SystemExit(4)

    assert call_function(leaves, {})["failure"].startswith("SystemExit: 4 (test_reward_function.py line ")
    assert (
        "unexpected keyword argument 'extra_info'" in call_function(lambda solution: 1, {"extra_info": {}})["failure"]
    )
