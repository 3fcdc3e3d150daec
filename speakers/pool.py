"""Plain functions side by side, a thread for each; what they ask of a model is computed in batches.

    for row in run(function, jobs, size): ...     function(job) of all jobs, `size` at a time
    with elsewhere(): ...                         inside a job: wait for a server, the judge, ...
    answer = gather(compute, request)             inside a job: compute([request, ...]) for many

A job that gathers sleeps until no other job is awake: each one asks, too, or waits elsewhere. Then
the thread that iterates over `run` computes one batch, and no other thread ever computes: torch
keeps one set of threads, Ctrl-C arrives where the work is, and nobody locks a model. Outside of
`run`, in a notebook or a test, `gather` computes at once and `elsewhere` does nothing.

Why nothing hangs:
  1. At any time a job is awake, or asks a model, or waits elsewhere, or has ended; `Pool` changes
     this under one lock. A job ends whatever it raises, since `Pool.carry_out` catches all.
  2. As long as a job is awake, it runs; in the end it asks, waits or ends, and says so.
  3. If none is awake and one asks, `run` computes a batch. Whoever is in it is awake before its
     thread goes on, so no second batch can overlook it.
  4. If none is awake and none asks, all wait elsewhere, for what has a time limit of its own.
  5. If `run` ends early (an exception, Ctrl-C, a reader who has seen enough), it is `over`: jobs
     that ask or wait are ended, and all threads are daemons, so none keeps the process alive.
A job that waits for something without saying so delays the others' batches. It must not wait for
what another job holds while that one asks a model: hold no lock while you gather.
"""

import contextlib
import itertools
import threading
from concurrent.futures import Future

CURRENT = threading.local()  # .job: the Job that this thread carries out, if it does


class Job:
    """One call that `run` makes. Its Future holds what comes out."""

    def __init__(self, pool):
        self.pool = pool
        self.outcome = Future()


class Pool:
    """What the threads of one `run` share."""

    def __init__(self):
        self.changed = threading.Condition()  # guards all of these
        self.awake = set()  # jobs that compute, and may still ask a model
        self.asking = {}  # job -> (compute, request, Future of the answer)
        self.ended = []  # jobs whose outcome was not read yet
        self.over = False  # nobody reads, and nobody computes any more

    # In the threads of the jobs

    def carry_out(self, job, function, argument):
        CURRENT.job = job
        try:
            job.outcome.set_result(function(argument))
        except BaseException as error:  # it is raised where the outcome is read
            job.outcome.set_exception(error)
        with self.changed:
            self.awake.discard(job)
            self.ended.append(job)
            self.changed.notify()

    def ask(self, job, compute, request):
        answer = Future()
        with self.changed:
            self.refuse_if_over()
            self.asking[job] = compute, request, answer
            self.sleep(job)
        return answer.result()

    def sleep(self, job):
        """Called with the lock."""
        self.awake.discard(job)
        if not self.awake:
            self.changed.notify()

    def leave(self, job):
        with self.changed:
            self.sleep(job)

    def come_back(self, job):
        with self.changed:
            self.refuse_if_over()
            self.awake.add(job)

    def refuse_if_over(self):
        if self.over:
            raise SystemExit("the run has ended")  # ends the thread, silently

    # In the thread that iterates

    def start(self, function, argument):
        job = Job(self)
        with self.changed:
            self.awake.add(job)
        threading.Thread(
            target=self.carry_out, args=(job, function, argument), daemon=True).start()

    def compute_until_jobs_end(self):
        """The jobs that have ended; batches are computed until there is one."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.ended or (self.asking and not self.awake))
                if self.ended:
                    ended, self.ended = self.ended, []
                    return ended
                compute, batch = self.largest_batch()
            answers = compute([self.asking[job][1] for job in batch])
            with self.changed:
                self.awake.update(batch)
                for job, value in zip(batch, answers, strict=True):
                    _, _, answer = self.asking.pop(job)
                    answer.set_result(value)

    def largest_batch(self):
        """(function, jobs): the model that most jobs ask, and these jobs."""
        groups = {}
        for job, (compute, _, _) in self.asking.items():
            groups.setdefault(compute, []).append(job)
        return max(groups.items(), key=lambda group: len(group[1]))

    def close(self):
        with self.changed:
            self.over = True
            for _, _, answer in self.asking.values():
                answer.set_exception(SystemExit("the run has ended"))


def run(function, jobs, size):
    """Yield function(job) of each job as it ends; what a call raises is raised here.

    `jobs` is read as calls end, so that it can stop early.
    """
    pool, jobs, live = Pool(), iter(jobs), 0
    try:
        while True:
            for job in itertools.islice(jobs, size - live):
                pool.start(function, job)
                live += 1
            if not live:
                return
            for ended in pool.compute_until_jobs_end():
                live -= 1
                yield ended.outcome.result()
    finally:
        pool.close()


@contextlib.contextmanager
def elsewhere():
    """Wait inside of this for anything but a model in this process; batches do not wait for you."""
    job = getattr(CURRENT, "job", None)
    if job is None:
        yield
        return
    job.pool.leave(job)
    try:
        yield
    finally:
        job.pool.come_back(job)


class JudgeElsewhere:
    """A judge whose calls are waited for elsewhere."""

    has_answered = True  # as of a speaker

    def __init__(self, judge):
        self.judge = judge

    @property
    def given_up(self):
        """As of a speaker; a judge that asks a model says what its speaker does."""
        return getattr(self.judge, "given_up", None)

    def grade(self, task, answer):
        with elsewhere():
            return self.judge.grade(task, answer)

    def picture(self, page):
        with elsewhere():
            return self.judge.picture(page)


def gather(compute, request):
    """compute([request, ...])[i], in one batch with what other jobs ask of the same function."""
    job = getattr(CURRENT, "job", None)
    if job is None:
        return compute([request])[0]
    return job.pool.ask(job, compute, request)
