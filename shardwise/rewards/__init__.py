"""Scores of completions: functions in killable child processes, and judges behind an endpoint. Imports no torch."""

from shardwise.rewards.base import Answer, RewardJob, RewardResult, Scorer
from shardwise.rewards.composite import CustomRewards, Rewards, check_rewards, make_rewards
from shardwise.rewards.math import exact_match, final_answer, gsm8k_score, math_verify_score, number_match
from shardwise.rewards.parts import is_correct
from shardwise.rewards.scores import read_score
from shardwise.rewards.user_code import describe_error, kind_of_callable, load_function, source_file
