import json
import os
import threading

from shardwise.config import ConfigError
from shardwise.rewards.worker import work


def answers(functions, messages, *, num_answers):
    """What a worker says to messages that are all there before it reads the first."""
    job_read, job_write = os.pipe()
    result_read, result_write = os.pipe()
    os.write(job_write, b"".join(json.dumps(message).encode() + b"\n" for message in messages))
    worker = threading.Thread(target=work, args=(functions, job_read, result_write))
    worker.start()
    with os.fdopen(result_read) as results:
        assert json.loads(results.readline()) == {"ready": os.getpid()}
        said = [json.loads(results.readline()) for _ in range(num_answers)]
        os.close(job_write)
        assert results.read() == ""  # the end of the jobs is its end
    worker.join()
    return said


def job(number, function, value):
    return {"job": number, "function": function, "arguments": {"value": value}}


def test_jobs_are_answered_in_their_order_by_the_function_they_name():
    functions = [lambda value: value + 1, lambda value: {"score": value, "twice": 2 * value}]
    assert answers(functions, [job(3, 0, 5), job(9, 1, 5), job(4, 0, -1)], num_answers=3) == [
        {"job": 3, "score": 6.0, "parts": {}},
        {"job": 9, "score": 5.0, "parts": {"twice": 10.0}},
        {"job": 4, "score": 0.0, "parts": {}},
    ]


def test_a_job_is_skipped_where_the_word_comes_before_its_turn():
    said = answers(
        [lambda value: value], [job(1, 0, 1), job(2, 0, 2), {"skip": 2}, {"skip": 7}, job(3, 0, 3)], num_answers=2
    )
    assert [answer["job"] for answer in said] == [1, 3]


def test_a_function_that_cannot_work_on_this_machine_ends_the_worker():
    def no_sandbox(value):
        raise ConfigError("no namespaces here")

    assert answers([no_sandbox], [job(1, 0, 1), job(2, 0, 2)], num_answers=1) == [{"error": "no namespaces here"}]
