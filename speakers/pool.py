"""Plain functions side by side, a thread for each; what they ask of a model is computed in batches.

    for row in run(function, arguments, size): ...   function(argument) of each, `size` at a time
    with elsewhere(): ...                            in a job: wait for a server, the judge, ...
    answer = gather(compute, request)                in a job: compute([request, ...]) for many

A job is one call function(argument), in a thread of its own. One that gathers sleeps until no other
job is awake: each one asks, too, or waits elsewhere. Then the thread that iterates over `run`
computes one batch, and no other thread ever computes: torch keeps one set of threads, Ctrl-C
arrives where the work is, and nobody locks a model. Outside of `run`, in a notebook or a test,
`gather` computes at once, a thread at a time, and `elsewhere` does nothing.

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
import contextvars
import itertools
import threading
from concurrent.futures import Future

ALONE = threading.RLock()  # held while a thread outside of `run` computes
# The pool and the job of a thread
CURRENT = contextvars.ContextVar("CURRENT", default=(None, None))  # as it is outside of `run`


class Pool:
    """What the threads of one `run` share. A job is known by the Future of its outcome."""

    def __init__(self, on_answer):
        self.on_answer = on_answer  # called when a job has the answer that it has waited for
        self.changed = threading.Condition()  # guards all that follows
        self.awake = set()  # jobs whose threads run; each may still ask a model
        self.asking = {}  # job -> (compute, request, Future of the answer)
        self.ended = []  # jobs whose outcome was not read yet
        self.over = False  # nobody reads, and nobody computes any more

    def start(self, function, argument):
        """Start a job in a thread of its own."""
        job = Future()
        with self.changed:
            self.awake.add(job)
        threading.Thread(
            target=self.carry_out, args=(job, function, argument), daemon=True).start()

    def carry_out(self, job, function, argument):
        """What the thread of a job does."""
        CURRENT.set((self, job))
        try:
            job.set_result(function(argument))
        except BaseException as error:  # it is raised where the outcome is read
            job.set_exception(error)
        with self.changed:
            self.ended.append(job)
            self.awake.discard(job)
            self.changed.notify()

    def sleep(self, job):
        """Note that a job waits, for a model or elsewhere."""
        with self.changed:
            self.awake.discard(job)
            if not self.awake:
                self.changed.notify()

    def refuse_if_over(self):
        if self.over:
            raise SystemExit("the run has ended")  # ends the thread, silently

    def take_ended(self):
        """Wait for jobs that have ended, and return them; [] if a batch has to come first."""
        with self.changed:
            self.changed.wait_for(lambda: self.ended or (self.asking and not self.awake))
            ended, self.ended = self.ended, []
        return ended

    def compute_batch(self):
        """Compute what is asked of the model that most jobs ask; all of them sleep."""
        groups = {}
        with self.changed:
            for job, (compute, request, answer) in self.asking.items():
                groups.setdefault(compute, []).append((job, request, answer))
        compute, batch = max(groups.items(), key=lambda group: len(group[1]))
        values = compute([request for _, request, _ in batch])
        with self.changed:
            for (job, _, answer), value in zip(batch, values, strict=True):
                del self.asking[job]
                self.awake.add(job)
                answer.set_result(value)


def run(function, arguments, size, on_answer=lambda: None):
    """Yield function(argument) of each argument as it ends; what a call raises is raised here.

    `arguments` is read as calls end, so that it can stop early. A job calls `on_answer` in its
    thread whenever it has the answer that it has waited for.
    """
    pool, waiting, live = Pool(on_answer), iter(arguments), 0
    try:
        while True:
            for argument in itertools.islice(waiting, size - live):
                pool.start(function, argument)
                live += 1
            if not live:
                return
            ended = pool.take_ended()
            if not ended:
                pool.compute_batch()
            for job in ended:
                live -= 1
                yield job.result()
    finally:
        with pool.changed:
            pool.over = True
            for _, _, answer in pool.asking.values():
                answer.set_exception(SystemExit("the run has ended"))


@contextlib.contextmanager
def elsewhere():
    """Wait inside of this for anything but a model in this process; batches do not wait for you."""
    pool, job = CURRENT.get()
    if pool is None:
        yield
        return
    pool.sleep(job)
    try:
        yield
    finally:
        with pool.changed:
            pool.refuse_if_over()
            pool.awake.add(job)
    pool.on_answer()


class JudgeElsewhere:
    """A judge whose calls are waited for elsewhere."""

    def __init__(self, judge):
        self.judge = judge

    @property
    def given_up(self):
        """Why the judge is no longer asked; only one that asks a model can have a reason."""
        return getattr(self.judge, "given_up", None)

    def grade(self, task, answer):
        with elsewhere():
            return self.judge.grade(task, answer)

    def picture(self, page):
        with elsewhere():
            return self.judge.picture(page)


def gather(compute, request):
    """compute([request, ...])[i], in one batch with what other jobs ask of the same function."""
    pool, job = CURRENT.get()
    if pool is None:
        with ALONE:
            return compute([request])[0]
    answer = Future()
    with pool.changed:
        pool.refuse_if_over()
        pool.asking[job] = compute, request, answer
        pool.sleep(job)
    value = answer.result()
    pool.on_answer()
    return value
