"""The threads behind a rollout: batches, waits, early ends; nothing ever hangs."""

import contextlib
import random
import subprocess
import sys
import threading
import time
import types

import pytest
from conftest import ROOT
from parties import within

from speakers.pool import JudgeElsewhere, elsewhere, gather, run


def results(function, jobs, size):
    return within(lambda: sorted(run(function, jobs, size)))


class Model:
    """Doubles numbers, and notes its batches and the threads that it computed in."""

    def __init__(self):
        self.batches, self.threads = [], set()

    def double(self, numbers):
        self.batches.append(sorted(numbers))
        self.threads.add(threading.current_thread())
        return [2 * number for number in numbers]


def threads_left(before, seconds=5):
    """The threads that are still there after a while, and were not there before."""
    deadline = time.monotonic() + seconds
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    return set(threading.enumerate()) - before


# -----------------------------------------------------------------------------
# Batches


def test_results_come_as_jobs_end_and_so_many_run_at_a_time():
    together, most, lock = [], [], threading.Lock()
    five = threading.Barrier(5, timeout=60)

    def job(number):
        with lock:
            together.append(number)
            most.append(len(together))
        five.wait()  # so many are there at the same time
        with lock:
            together.remove(number)
        return number

    assert results(job, range(40), 5) == list(range(40))
    assert max(most) == 5


def test_all_that_ask_a_model_are_one_batch_in_the_thread_that_iterates():
    model, iterating = Model(), []

    def iterate():
        iterating.append(threading.current_thread())
        return list(run(lambda number: gather(model.double, number), range(12), 4))

    assert sorted(within(iterate)) == [2 * number for number in range(12)]
    assert [len(batch) for batch in model.batches] == [4, 4, 4]
    assert model.threads == set(iterating)


def test_a_batch_waits_for_a_job_that_works_between_two_questions():
    model = Model()

    def job(number):
        gather(model.double, number)
        time.sleep(0.2 * number)
        return gather(model.double, number)

    assert results(job, range(2), 2) == [0, 2]
    assert model.batches == [[0, 1], [0, 1]]


def test_threads_outside_of_a_run_compute_one_at_a_time():
    computing, most, answers = [], [], []

    def double(numbers):
        computing.append(1)
        most.append(len(computing))
        time.sleep(0.01)
        computing.pop()
        return [2 * number for number in numbers]

    def ask(number):
        answers.append(gather(double, number))

    threads = [threading.Thread(target=ask, args=[number], daemon=True) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(answers) == [2 * number for number in range(8)] and max(most) == 1


@pytest.mark.parametrize("what", ["server", "grade", "picture"])
def test_a_batch_waits_for_no_job_that_waits_for_a_server_the_judge_or_the_browser(what):
    model, released = Model(), threading.Event()
    judge = JudgeElsewhere(types.SimpleNamespace(
        grade=lambda task, answer: released.wait(10), picture=lambda page: released.wait(10)))

    def ask_server():
        with elsewhere():
            return released.wait(10)

    wait = {"server": ask_server, "grade": lambda: judge.grade(None, None),
            "picture": lambda: judge.picture(None)}[what]

    def job(number):
        if number == 0:
            assert wait()
        answer = gather(model.double, number)
        if number == 5:
            released.set()
        return answer

    assert results(job, range(6), 3) == [0, 2, 4, 6, 8, 10]
    assert model.batches[0] == [1, 2] and [0] in [batch[:1] for batch in model.batches[2:]]


# -----------------------------------------------------------------------------
# Early ends


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["job", "model", "elsewhere", "reader"])
def test_what_is_raised_at_any_moment_is_raised_by_the_run_without_threads_left(where, error, seed):
    before, draw = set(threading.enumerate()), random.Random(f"{where} {error.__name__} {seed}")
    fatal = draw.randrange(60)

    def fail(here, number):
        if (here, number) == (where, fatal):
            raise error("fatal")

    def compute(numbers):
        for number in numbers:
            fail("model", number)
        return numbers

    def job(number):
        mine = random.Random(number)
        for _ in range(mine.randrange(1, 5)):
            if mine.random() < 0.5:
                with elsewhere():
                    time.sleep(mine.random() * 0.002)
            gather(compute, number)
        with elsewhere():
            fail("elsewhere", number)
        fail("job", number)
        return number

    def read():
        for number in run(job, range(60), draw.choice([1, 8, 32])):
            fail("reader", number)

    with pytest.raises(error, match="fatal"):
        within(read)
    assert not threads_left(before)


def test_ctrl_c_ends_a_run_at_once_whatever_it_waits_for():
    program = """if True:
        import os, signal, time
        from speakers.pool import elsewhere, run
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
        def job(number):
            with elsewhere():
                os.write(1, b"waiting\\n")  # at the exit, no thread may be busy in print
                time.sleep(600)
        list(run(job, [1], 1))"""
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(2)
    _, errors = process.communicate(timeout=20)
    assert errors.strip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize("size", [1, 3, 16, 64])
@pytest.mark.parametrize("seed", range(3))
def test_a_mix_of_models_waits_and_failures_gives_every_job_its_own_answers(seed, size):
    first, second = Model(), Model()
    before = set(threading.enumerate())

    def job(number):
        draw, total, asked = random.Random(seed * 1000 + number), 0, 0
        for _ in range(draw.randrange(6)):
            kind = draw.choice(["first", "second", "wait", "no wait", "failure", "nested"])
            if kind == "wait":
                with elsewhere():
                    time.sleep(draw.random() * 0.004)
            elif kind == "no wait":
                with elsewhere():
                    pass
            elif kind == "failure":
                with contextlib.suppress(OSError), elsewhere():
                    raise OSError
            elif kind == "nested":  # waits may be, and a model asked in them
                with elsewhere(), elsewhere():
                    total += gather(first.double, number)
            else:
                model = first if kind == "first" else second
                total += gather(model.double, number)
            asked += kind in ("first", "second", "nested")
        assert total == 2 * number * asked
        return number

    count = 300
    assert results(job, range(count), size) == list(range(count))
    assert len(first.threads | second.threads) == 1
    assert all(len(batch) <= size for batch in first.batches + second.batches)
    assert not threads_left(before)


def test_what_most_jobs_ask_is_computed_first():
    order = []

    def few(numbers):
        order.append("few")
        return numbers

    def many(numbers):
        order.append("many")
        return numbers

    assert results(lambda number: gather(many if number else few, number), range(5), 5) == [
        0, 1, 2, 3, 4]
    assert order == ["many", "few"]


def test_each_answer_that_a_job_has_waited_for_is_told_wherever_it_came_from():
    model, told = Model(), []

    def job(number):
        with elsewhere():
            pass
        return gather(model.double, number)

    assert sorted(run(job, range(5), 2, lambda: told.append(1))) == [0, 2, 4, 6, 8]
    assert len(told) == 10


def test_a_job_that_waits_elsewhere_does_not_go_on_once_the_run_has_ended():
    released, ended, went_on = threading.Event(), threading.Event(), []

    def job(number):
        if number == 0:
            raise ValueError("fatal")
        try:
            with elsewhere():
                released.wait(60)
            went_on.append(number)
        finally:
            ended.set()

    with pytest.raises(ValueError, match="fatal"):
        list(run(job, range(2), 2))
    released.set()
    assert ended.wait(60) and not went_on
