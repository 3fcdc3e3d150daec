"""A chat server whose replies take unequally long, to time rollouts. It computes nothing.

    python tests/slow_server.py --mean 0.3     prints its address, then serves

The models `agent` and `human` speak fixed lines. A line depends on the messages and the seed alone;
how long it takes is drawn anew for each request, as on an engine that others use, too. Any number
of requests is served at a time, as an engine with continuous batching does.
"""

import argparse
import asyncio
import contextlib
import http.client
import json
import math
import random
import subprocess
import sys

SPREAD = 0.9  # of the logarithm of the latencies
LONGEST = 4  # latencies are at most so many means long


class SlowServer:
    def __init__(self, mean):
        self.mean = mean
        self.draw = random.Random(0)
        self.requests = 0
        self.slept = 0.0  # seconds of all latencies
        self.in_flight = self.most_in_flight = 0

    async def connect(self, reader, writer):
        """One request, then the connection ends."""
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await self.serve(reader, writer)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client has gone
        finally:
            self.in_flight -= 1
            writer.close()

    async def serve(self, reader, writer):
        method, path, headers = await read_head(reader)
        if method == "GET":
            answers = {"/v1/models": self.models, "/figures": self.figures}
            if path in answers:
                reply(writer, 200, json.dumps(answers[path]()).encode())
            else:
                reply(writer, 404, b"not found")
            return
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        self.requests += 1
        seconds = self.latency()
        self.slept += seconds
        await asyncio.sleep(seconds)
        reply(writer, 200, json.dumps({"choices": self.choices(body)}).encode())

    def latency(self):
        drawn = self.draw.lognormvariate(math.log(self.mean) - SPREAD**2 / 2, SPREAD)
        return min(drawn, LONGEST * self.mean)

    def choices(self, body):
        made = []
        for index in range(body.get("n", 1)):
            text = self.line(body, random.Random(f"{body['seed']} {index}"))
            made.append({"message": {"role": "assistant", "content": text},
                         "finish_reason": "stop"})
        return made

    def line(self, body, draw):
        if body["model"] == "human":
            return f"Detail {draw.randrange(1000)}."
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        if draw.random() < 0.15 + 0.05 * turn:
            return f"I WANT TO ANSWER: x = {draw.randrange(1000)}"
        return f"What about {draw.randrange(1000)}?"

    def models(self):
        return {"object": "list", "data": [{"id": "agent"}, {"id": "human"}]}

    def figures(self):
        return {"requests": self.requests, "slept": self.slept,
                "most_in_flight": self.most_in_flight}


async def read_head(reader):
    """(method, path, headers with names in lower case) of a request."""
    request, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    method, path, _ = request.split()
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return method, path, headers


def reply(writer, status, body):
    lines = [f"HTTP/1.1 {status} .", f"Content-Length: {len(body)}", "Connection: close"]
    writer.write("\r\n".join([*lines, "", ""]).encode() + body)


# -----------------------------------------------------------------------------
# From other files


class Address:
    """A running server as its users see it."""

    def __init__(self, url):
        self.url = url  # with /v1

    def figures(self):
        """What it has done so far."""
        connection = http.client.HTTPConnection(self.url.split("/")[2])
        connection.request("GET", "/figures")
        with contextlib.closing(connection):
            return json.loads(connection.getresponse().read())


@contextlib.contextmanager
def slow_server(mean):
    """The Address of a server in a process of its own."""
    command = [sys.executable, __file__, "--mean", str(mean)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Address(process.stdout.readline().strip())
        finally:
            process.terminate()


async def main(args):
    handler = SlowServer(args.mean)
    server = await asyncio.start_server(handler.connect, "127.0.0.1", args.port, backlog=1024)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", flush=True)
    await server.serve_forever()


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument("--mean", type=float, default=0.3, help="seconds that a reply takes")
    return parser.parse_args()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(parse_args()))
