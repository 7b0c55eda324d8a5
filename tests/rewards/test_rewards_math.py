import pytest

from shardwise.config import RewardConfig
from shardwise.rewards import RewardJob, Rewards, exact_match, final_answer, gsm8k_score, number_match


def call(function, solution, truth):
    return function(data_source="test", solution_str=solution, ground_truth=truth, extra_info={})


@pytest.mark.parametrize(
    ("solution", "truth", "score"),
    [
        ("3 + 4 = 7\n#### 7", "They add up.\n#### 7", 1.0),
        ("#### 8", "#### 7", 0.0),
        ("so the answer is 42", "42", 1.0),  # no marker: the last number
        ("The answer is 42.", "#### 42", 1.0),  # the dot ends the sentence
        ("#### 1,234", "#### 1234", 1.0),
        ("It costs $1,000,000.50 in total", "1000000.5", 1.0),
        ("#### $18", "#### 18", 1.0),
        (r"\boxed{\$18}", "18", 1.0),
        ("#### -5", "#### -5", 1.0),
        ("#### 5", "#### -5", 0.0),
        ("7-5=2, so 7-5", "5", 1.0),  # the minus is an operator
        ("10 - 5", "5", 1.0),
        ("x = -3", "-3", 1.0),
        ("#### \u22125", "-5", 1.0),  # the minus sign of typesetting
        ("#### \u22125", "5", 0.0),
        ("#### -5", "#### \u22125", 1.0),
        ("\\boxed{\u2212\\$1,234}", "-1234", 1.0),
        ("7\u22125", "5", 1.0),
        ("5e\u22122", "0.05", 1.0),
        ("- 5 apples", "5", 1.0),  # a list item
        ("#### 3 is wrong\n#### 4", "4", 1.0),  # the last marker
        ("#### 4 apples and 5 pears", "4", 1.0),  # the first number after it
        ("7 #### ", "7", 0.0),  # a marker without a number is no answer
        ("#### seven", "7", 0.0),
        ("no number", "7", 0.0),
        ("", "7", 0.0),
        ("#### 7.0", "#### 7", 1.0),
        ("#### .5", "0.50", 1.0),
        ("we choose 3,4", "4", 1.0),  # a list, no thousands
        ("2e3", "2000", 1.0),
        ("**12**", 12, 1.0),  # a number as ground truth
        ("#### 70", "7", 0.0),
    ],
)
def test_gsm8k_score_hand_worked(solution, truth, score):
    assert call(gsm8k_score, solution, truth) == score


@pytest.mark.parametrize(
    ("solution", "truth", "score"),
    [
        ("first 3 then 9", "9", 1.0),
        ("9 then 3", "9", 0.0),
        ("#### 3, not 4", "4", 1.0),
        ("", "4", 0.0),
        ("it is \u22124", "-4", 1.0),
        ("it is \u22124", "4", 0.0),
    ],
)
def test_number_match_takes_the_last_number(solution, truth, score):
    assert call(number_match, solution, truth) == score


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("first 3\n#### 1,234.50", "1234.5"),
        ("so it is 7.0.", "7"),
        ("-0", "0"),
        ("2e3", "2000"),
        ("100", "100"),
        ("-.250", "-0.25"),
        ("\\boxed{\u2212.250}", "-0.25"),
        ("12345678901234567890123456789012345", "12345678901234567890123456789012345"),
        (r"\boxed{3} or \boxed{\frac{1}{2}} it is, not 9", r"\frac{1}{2}"),
        (r"\boxed{1{,}000}", "1{,}000"),
        (r"\boxed{ 1,000 }", "1000"),
        (r"cut off in \boxed{12", "12"),
        ("  I do not know \n", "I do not know"),
        ("", ""),
    ],
)
def test_final_answer_is_one_spelling_of_each_answer(text, answer):
    assert final_answer(text) == answer


def test_exact_match_ignores_white_space_around():
    assert call(exact_match, " 12 \n", "12") == 1.0
    assert call(exact_match, "1 2", "12") == 0.0
    assert call(exact_match, "12", 12) == 1.0


@pytest.mark.parametrize("function", [gsm8k_score, number_match])
def test_ground_truth_without_a_number_is_an_error_not_a_zero(function):
    with pytest.raises(ValueError, match="'seven' holds no number"):
        call(function, "7", "seven")


def test_trap_23_math_verify_score_judges_equivalence_in_a_worker():
    cases = [
        ("so it is $0.5$", "1/2", 1.0),
        (r"\boxed{\frac{2}{4}}", "0.5", 1.0),
        (r"The answer is $\sqrt{8}$", r"2\sqrt{2}", 1.0),
        (r"$\frac12$", r"$\frac{1}{2}$", 1.0),
        ("so it is $0.4$", "1/2", 0.0),
        ("I do not know", "1/2", 0.0),
        (r"\boxed{18.90}", r"\$18.90", 1.0),  # a currency is no delimiter
        (r"\boxed{\$18.90}", r"\$18.90", 1.0),
        (r"so it is $\$36$", r"\$36", 1.0),
        (r"\boxed{\$36.5}", r"\$36", 0.0),
        (r"\boxed{36}", r"$\$36$", 1.0),
        (r"\boxed{36}", r"$36", 1.0),
        (r"\boxed{0.00001}", 0.00001, 1.0),  # Python writes 1e-05
        (r"\boxed{e-5}", 0.00001, 0.0),
        (r"\boxed{6.02 \times 10^{23}}", "6.02e+23", 1.0),
        (r"\boxed{602000000000000000000000}", "6.02e+23", 1.0),
        (r"\boxed{6.03 \times 10^{23}}", "6.02e+23", 0.0),
        (r"\boxed{10000000000000000}", 1e16, 1.0),
        (r"\boxed{2e}", "2e", 1.0),
    ]
    config = RewardConfig(functions="shardwise.rewards.math:math_verify_score", num_workers=1, on_failure="value")
    jobs = [RewardJob(uid=s, data_source="test", solution_str=s, ground_truth=t) for s, t, _ in cases]
    unreadable = RewardJob(uid="bad", data_source="test", solution_str="3", ground_truth="")
    with Rewards(config) as pool:
        *results, bad = pool.score([*jobs, unreadable])
    assert [(result.score, result.failure) for result in results] == [(score, None) for *_, score in cases]
    assert "ground_truth '' holds no formula" in bad.failure
