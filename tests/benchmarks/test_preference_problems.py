import json

from benchmarks.preference_problems import preference_problems, wrong_response
from shardwise.data import arithmetic_problems


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_pairs_hold_the_right_answer_and_one_with_a_wrong_digit(tmp_path):
    files = preference_problems(tmp_path / "pairs", seed=0, num_held_out=1000)
    sft = arithmetic_problems(tmp_path / "sft", seed=0, num_held_out=1000, worked=True)
    for pairs, supervised in ((files.pairs_train, sft.sft_train), (files.pairs_validation, sft.sft_validation)):
        rows = read(pairs)
        assert [{"prompt": row["prompt"], "response": row["chosen"]} for row in rows] == read(supervised)
        for row in rows:
            (steps, right), (same_steps, wrong) = row["chosen"].split(), row["rejected"].split()
            assert steps == same_steps
            assert sum(a != b for a, b in zip(right, wrong, strict=True)) == 1, row
            assert str(int(wrong)) == wrong, "no leading zero"
    assert {row["rejected"][3] for row in read(files.pairs_train)} == set("0123456789")


def test_labelled_problems_are_the_sides_of_the_pairs(tmp_path):
    files = preference_problems(tmp_path, seed=0, num_held_out=1000)
    labels = []
    for pair, row in zip(read(files.pairs_train), read(files.labelled_train), strict=True):
        assert row["prompt"] == pair["prompt"]
        assert row["response"] == pair["chosen" if row["label"] else "rejected"]
        labels.append(row["label"])
    assert 0.48 < sum(labels) / len(labels) < 0.52


def test_preference_problems_depend_on_the_seed_alone(tmp_path):
    def contents(name, seed):
        files = preference_problems(tmp_path / name, seed=seed, num_held_out=50)
        return [path.read_bytes() for path in (files.pairs_train, files.pairs_validation, files.labelled_train)]

    assert contents("a", 7) == contents("b", 7)
    assert contents("a", 7) != contents("c", 8)
    assert wrong_response("47+85=", "12 132", seed=0) == "12 131"
