"""An OpenAI-compatible server that computes nothing.

It can fail in every way and can take its time. Any number of requests is served at once, as an
engine with continuous batching does.
"""

import contextlib
import json
import random
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from runtime.seeds import derive_seed

TIMEOUT = 0.6  # of the client, in seconds
FAULTS = (
    "429", "500", "503", "error without end", "cut body", "not JSON", "not an object",
    "empty choices", "no text", "no message", "an error", "silence", "closed connection", "drops",
    "brackets",
)
SENSELESS_BODIES = {
    "not JSON": b"<html>",
    "not an object": b'["choices"]',
    "empty choices": b'{"choices": []}',
    "no text": b'{"choices": [{"message": {"content": null}}]}',
    "no message": b'{"choices": [{"message": null}]}',
    "an error": b'{"error": {"message": "no credits left"}}',
    "brackets": b"[" * 100_000,
}


class Server(ThreadingHTTPServer):
    """Answers from (messages, seed) alone, but for a seeded share of calls, which have the fault.

    After `dies_after` calls, all of them fail. `models` are the names that it lists under
    `path`/models; with None it has no list. With `mean`, replies take unequally long, on average
    so many seconds. A test's own `say(handler, body)` and `get(handler)` may reply in its place:
    they return what is true if they did.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, answer, fault_rate=0.0, fault=None, dies_after=None, models=None,
                 mean=0.0, say=lambda handler, body: False, get=lambda handler: False):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.models, self.say, self.get = answer, models, say, get
        self.fault_rate, self.fault, self.dies_after = fault_rate, fault, dies_after
        self.draw, self.lock, self.calls = random.Random(0), threading.Lock(), 0
        self.seen_faults, self.seen_keys, self.seen_models = set(), set(), set()
        self.mean = mean
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def drawn_fault(self):
        with self.lock:
            if self.dies_after is not None and self.calls > self.dies_after:
                return "503"
            fault = self.fault if self.draw.random() < self.fault_rate else None
            self.seen_faults.add(fault)
            return fault

    def latency(self):
        with self.lock:
            return self.mean and self.draw.expovariate(1 / self.mean)

    def handle_error(self, request, client_address):
        """Silent: some clients hang up on purpose."""


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        """Silent."""

    def do_GET(self):
        self.server.seen_keys.add(self.headers.get("Authorization"))
        if self.server.get(self):
            return
        if self.server.models is None or self.path != "/v1/models":
            self.reply(404, b"not found")
            return
        rows = [{"id": name, "object": "model"} for name in self.server.models]
        self.reply(200, json.dumps({"object": "list", "data": rows}).encode())

    def do_POST(self):
        body = self.body()
        key = self.headers.get("Authorization")
        self.server.seen_keys.add(key)
        self.server.seen_models.add(body["model"])
        with self.server.lock:
            self.server.calls += 1
        if self.server.say(self, body):
            return
        fault = self.server.drawn_fault()
        time.sleep(self.server.latency())
        choices = []
        for index in range(body["n"]):
            text = self.server.answer(body, derive_seed(body["seed"], index))
            message = {"role": "assistant", "content": text}
            choices.append({"message": message, "finish_reason": "stop"})
        whole = json.dumps({"choices": choices}).encode()
        if fault == "closed connection":
            self.close_connection = True
        elif fault == "silence":
            time.sleep(2 * TIMEOUT)
        elif fault == "error without end":
            self.reply(500, b"{", length=100)
            self.wfile.flush()
            time.sleep(2 * TIMEOUT)
        elif fault == "drops":  # each arrives in time, the whole does not
            self.reply(200, b"", length=len(whole) + 8)
            with contextlib.suppress(OSError):  # the client hangs up
                for drop in [b" "] * 8 + [whole]:
                    self.wfile.write(drop)
                    time.sleep(TIMEOUT / 3)
        elif fault == "cut body":
            self.reply(200, whole[:len(whole) // 2], length=len(whole))
        elif fault in ("429", "500", "503"):
            self.reply(int(fault), f"busy, {key}".encode())
        else:
            self.reply(200, SENSELESS_BODIES.get(fault, whole))

    def body(self):
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def reply(self, status, body, length=None, headers=()):
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)
        return True

    def choose(self, message, reason="stop"):
        """Reply with one choice."""
        choice = {"message": message, "finish_reason": reason}
        return self.reply(200, json.dumps({"choices": [choice]}).encode())


@contextlib.contextmanager
def running(answer, **options):
    server = Server(answer, **options)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def small_talk(body, seed):
    """What the models `agent` and `human` say at this turn with this seed."""
    draw = random.Random(seed)
    if body["model"] == "human":
        return f"Detail {draw.randrange(1000)}."
    turn = sum(message["role"] == "assistant" for message in body["messages"])
    if draw.random() < 0.15 + 0.05 * turn:
        return f"I WANT TO ANSWER: x = {draw.randrange(1000)}"
    return f"What about {draw.randrange(1000)}?"
