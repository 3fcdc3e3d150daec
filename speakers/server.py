"""OpenAI-compatible servers as speakers (vLLM, SGLang, `transformers serve`, ...).

This is how a 70B human, or a policy too slow for the local speaker, runs on an engine made for it.
"""

import http.client
import json
import os
import random
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from colbench import derive_seed
from speakers.interface import SpeakerError, Utterance

MAX_FAILURES_IN_A_ROW = 20  # requests, each with all its retries; then the server is given up
MAX_SILENCE = 6  # in time limits (`timeout`): without any answer for so long, it is given up, too
TRANSIENT_STATUS = (408, 409, 425, 429)  # and all from 500 up: worth a retry


class ServerSpeaker:
    """Sends many requests at once and retries them with back-off, until a server is given up.

    retries   attempts for each request
    pause     seconds before the first retry; doubled before each further one
    timeout   seconds that a request may go without an answer
    """

    def __init__(self, url, settings, retries=8, pause=0.2, timeout=300):
        self.url, self.model_name = url.rstrip("/"), settings.model_name
        self.retries, self.pause, self.timeout = retries, pause, timeout
        # Servers take their defaults from the checkpoint's recommendation, which often cuts the
        # policy down to its likelier words; top_p 1 samples from the policy itself.
        self.sampling = {
            "temperature": settings.temperature,
            "max_tokens": settings.max_new_tokens,
            "top_p": 1,
        }
        self.pool = ThreadPoolExecutor(settings.batch_size)
        self.failures_in_a_row = 0
        self.failing_since = None  # when the first failed attempt since the last answer began
        self.given_up = None  # the reason, once the server is given up

    def speak(self, conversations, n=1, seeds=None, tasks=None, keys=None):
        if self.given_up:  # errors of requests in flight are on disk; nothing new is started
            raise SystemExit(
                f"{self.url}: found no answer to many requests in a row ({self.given_up}), expected"
                " a running server; start it again, then give the same command again to go on")
        self.failing_since = None  # the time between two calls is no silence of the server
        if seeds is None:
            seeds = [0] * len(conversations)

        def answer(conversation):
            messages, seed = conversation
            return self._answer(messages, n, seed)

        return list(self.pool.map(answer, zip(conversations, seeds, strict=True)))

    def count_tokens(self, texts):
        return None  # the server's tokenizer is not known

    def _answer(self, messages, n, seed):
        """n utterances for one conversation, or the SpeakerError in their place."""
        utterances = []
        while len(utterances) < n:  # some servers ignore `n`: ask until there are enough
            missing = n - len(utterances)
            request_seed = derive_seed(seed, len(utterances)) % 2**31
            try:
                choices = self._request(messages, missing, request_seed)
            except SpeakerError as error:
                return error
            for choice in choices:
                text = choice["message"]["content"]
                text = text.encode(errors="replace").decode()  # without halves of surrogate pairs
                finished = choice.get("finish_reason") != "length"
                utterances.append(Utterance(text.strip(), finished))
        return utterances[:n]

    def _request(self, messages, n, seed):
        """The choices of one request, retried; SpeakerError if there are none."""
        body = {"model": self.model_name, "messages": messages, "n": n, "seed": seed}
        body |= self.sampling
        refused = False
        for attempt in range(self.retries):
            if self.given_up:
                raise SpeakerError(f"{self.url} was given up: {self.given_up}")
            began = time.monotonic()
            try:
                choices = self._post(body)
            except SpeakerError as error:  # the request is wrong, and a retry would not mend it
                reason, refused = str(error), error.refused
                break
            except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
                # the connection was closed, nothing came, or the body is cut or makes no sense
                reason = f"{type(error).__name__}: {error}"
            else:
                self.failures_in_a_row, self.failing_since = 0, None
                return choices
            since = self.failing_since  # read once: other threads reset it
            if since is None:
                since = began
            self.failing_since = since
            if time.monotonic() - since > MAX_SILENCE * self.timeout:
                self.given_up = reason
            elif attempt < self.retries - 1:
                time.sleep(self.pause * 2**attempt * random.uniform(0.5, 1))
        self.failures_in_a_row += 1
        if self.failures_in_a_row >= MAX_FAILURES_IN_A_ROW and not self.given_up:
            self.given_up = reason
        raise SpeakerError(f"{self.url}: {reason}", refused)

    def _post(self, body):
        """The choices of one attempt.

        SpeakerError: the request is wrong. Any other error may pass, and the attempt is repeated.
        """
        headers = {"Content-Type": "application/json"}
        key = os.environ.get("OPENAI_API_KEY")
        if key:
            headers["Authorization"] = f"Bearer {key}"
        address, data = f"{self.url}/chat/completions", json.dumps(body).encode()
        request = urllib.request.Request(address, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                choices = json.loads(response.read())["choices"]
        except urllib.error.HTTPError as error:
            with error:
                detail = error.read(300).decode(errors="replace")
            if key:
                detail = detail.replace(key, "(the API key)")  # some servers repeat it
            reason = f"HTTP {error.code}: {detail}"
            if error.code in TRANSIENT_STATUS or error.code >= 500:
                raise OSError(reason) from None
            refused = error.code == 400
            if refused:
                self.failures_in_a_row = 0  # the server is alive, only this request is wrong
            raise SpeakerError(reason, refused) from None
        if not choices:
            raise ValueError("an answer without choices")
        if any(not isinstance(choice["message"]["content"], str) for choice in choices):
            raise ValueError("an answer without text")
        return choices
