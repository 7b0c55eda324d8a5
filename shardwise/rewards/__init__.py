"""Scores of completions: functions by import path, called in killable child processes. Imports no torch."""

from shardwise.rewards.base import RewardJob, RewardResult, load_function
from shardwise.rewards.math import exact_match, final_answer, gsm8k_score, math_verify_score, number_match
from shardwise.rewards.pool import RewardPool, check_function
