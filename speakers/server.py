"""OpenAI-compatible servers as speakers (vLLM, SGLang, `transformers serve`, ...).

This is how a 70B human, or a policy too slow for the local speaker, runs on an engine made for it.
The address and the model's name are checked before anything is asked.
"""

import datetime
import email.utils
import http.client
import ipaddress
import json
import os
import random
import re
import ssl
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

from tqdm import tqdm

from colbench import THOUGHTS
from runtime.seeds import derive_seed
from runtime.text import counted, harmless
from speakers.interface import Speaker, SpeakerError, Utterance
from speakers.pool import elsewhere

MAX_FAILURES_IN_A_ROW = 20  # requests, each with all retries; then it gives up on the server
TOLD_AFTER = 10  # seconds that attempts of one request have failed, after which a message says so
# worth a retry; by 501, some servers say what others say by 404
TRANSIENT_STATUS = (408, 409, 425, 429, 500, *range(502, 1000))
REFUSED_STATUS = (400, 413, 422)  # this request is wrong, mostly too long
# before a first answer, these mean a wrong key, path or model name, or an address that has moved
WRONG_ADDRESS_STATUS = (401, 403, 404, 301, 302, 303, 307, 308)
# what reading an answer raises if its body makes no sense
SENSELESS = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
# Parameters that some servers refuse (max_tokens: OpenAI's reasoning models; top_p: these, Kimi,
# Claude beside a temperature, and TGI and Qwen, whose limit is below 1; seed: Mistral, Gemini),
# each with what takes its place, if anything
OTHER_NAMES = {"max_tokens": "max_completion_tokens", "top_p": None, "seed": None}
UNSUPPORTED = re.compile(
    "unsupported|not support|not permitted|unrecognized|unknown|cannot both|and < 1.0|deprecated"
    "|is allowed|range of top_p", re.IGNORECASE)
MAX_RETRY_AFTER = 60  # seconds; a server that asks for a longer pause gets this one
QUOTA_PAUSES = 50  # `pause`s after a 429 without Retry-After: most quotas are those of a minute
# reasons for which a text is not whole, and those for which it is none
CUT = ("length", "model_length", "max_tokens", "MAX_TOKENS", "model_context_window_exceeded")
FAILED = ("error", "abort", "content_filter", "sensitive", "network_error",
          "insufficient_system_resource", "SAFETY", "RECITATION", "BLOCKLIST",
          "PROHIBITED_CONTENT", "SPII", "OTHER")  # those in capitals are Gemini's
MODEL_LIST_ATTEMPTS = 4
MODEL_LIST_TIMEOUT = 10  # seconds, or `timeout` if that is shorter
MAX_NAMES = 20  # model names in a message
DETAIL_CHARACTERS = 300  # of a server's own words in a message
BUSY = "; if it has too many requests at once, give a smaller --batch_size"
NAME_FLAGS = "name it with --agent_model, --human_model or --critic_model"


class ServerSpeaker(Speaker):
    """Retries each request with back-off, and gives up on a server that keeps failing.

    There are as many requests in flight as threads that ask: one for each dialogue that is played.

    retries   attempts for each request, the first one included
    pause     seconds before the first retry; doubled before each further one
    timeout   seconds that a request may go without an answer
    role      "agent", "human" or "grader", whose key it is
    """

    def __init__(self, url, settings, retries=8, pause=0.2, timeout=300, role="agent"):
        self.url = url.rstrip("/")
        self.opener = opener_for(url)
        self.retries, self.pause, self.timeout = retries, pause, timeout
        self.key = api_key(role)
        # Servers take their defaults from the checkpoint's recommendation, which often cuts the
        # policy down to its likelier words. top_p 1 undoes that in part; top_k and penalties have
        # to be switched off where the server starts, since not all servers know them.
        self.sampling = {
            "temperature": settings.temperature,
            "max_tokens": settings.max_new_tokens,
            "top_p": 1,
        }
        self.lock = threading.Lock()
        self.failures_in_a_row = 0
        self.told = False  # whether a message has named failed attempts since the last answer
        self.has_answered = False  # any request at all
        self.takes_n = False  # whether it has answered a request for more than one answer
        self.refuses_n = False  # whether it refuses such requests
        self.left_out = frozenset()  # parameters that it refuses, and that requests lack
        self.model_name = self._checked_name(settings.model_name)

    def reply(self, request):
        with elsewhere():
            return self._answer(request.messages, request.n, request.seed)

    def _answer(self, messages, n, seed):
        """n utterances for one conversation."""
        utterances, one_by_one = [], self.refuses_n
        while len(utterances) < n:  # some servers ignore `n`: ask until there are enough
            missing = 1 if one_by_one else n - len(utterances)
            request_seed = derive_seed(seed, len(utterances)) % 2**31
            try:
                said = self._request(messages, missing, request_seed)
            except Refused:  # some servers refuse an `n` above 1
                if missing == 1:
                    raise
                said = self._request(messages, 1, request_seed)
                one_by_one = True
                self.refuses_n = not self.takes_n  # if it takes them, this one was a passing fault
            self.takes_n |= len(said) > 1
            if self._are_copies(said, messages, request_seed):
                said, one_by_one = said[:1], True
            utterances += said
        return utterances[:n]

    def _are_copies(self, said, messages, seed):
        """Whether the server has drawn these with one seed, as SGLang's deterministic mode does.

        Then two more agree with each other, but not with these.
        """
        if len(said) == 1 or len(set(said)) > 1 or self.sampling["temperature"] == 0:
            return False
        more = self._request(messages, 2, derive_seed(seed, "more") % 2**31)
        return len(more) > 1 and len(set(more)) == 1 and more[0] != said[0]

    def _request(self, messages, n, seed):
        """The utterances of one request, retried; SpeakerError if there are none."""
        left_out = self.left_out
        began = time.monotonic()
        for attempt in range(self.retries):
            if self.given_up:
                raise SpeakerError(f"the server was given up: {self.given_up}")
            body = self._body(messages, n, seed, left_out)
            try:
                utterances = self._attempt(body)
            except Unavailable as error:
                reason, asked_pause = error.args
            except SpeakerError as error:  # the request is wrong, and a retry would not mend it
                reason = str(error)
                name = isinstance(error, Refused) and refused_parameter(reason, body)
                if name:
                    left_out |= {name}
                    continue
                raise self._counted_failure(reason, type(error)) from None
            else:
                self.failures_in_a_row, self.told = 0, False
                self.has_answered = True
                if left_out:
                    self._leave_out(left_out)
                return utterances
            self._tell(time.monotonic() - began, reason)
            if attempt < self.retries - 1:
                back_off = self.pause * 2**attempt * random.uniform(0.5, 1)
                time.sleep(asked_pause + back_off)
        raise self._counted_failure(reason)

    def _attempt(self, body):
        """The utterances of one attempt; Unavailable if a retry may help, SpeakerError if not."""
        try:
            return utterances_of(self._ask("/chat/completions", body, self.timeout))
        except (OSError, http.client.HTTPException, *SENSELESS) as error:
            # the connection was closed, nothing came, or the body is cut or makes no sense
            reason = self._shown(f"{type(error).__name__}: {error}")
            if isinstance(error, TimeoutError):  # a slow server may have a long queue
                reason += BUSY
            raise Unavailable(reason, 0) from None

    def _counted_failure(self, reason, kind=SpeakerError):
        """The error of a failed request. After too many in a row, the server is given up."""
        if not self.has_answered:
            reason += way_to(self.url)
        if kind is Refused and self.has_answered:
            self.failures_in_a_row = 0  # the server is alive, only this request is wrong
        else:
            self.failures_in_a_row += 1
        # with a wrong address, no other request would fare better
        hopeless = kind is WrongAddress and not self.has_answered
        if hopeless or self.failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            self.given_up = self.given_up or f"{self.url}: {reason}"  # the first one says most
        return kind(f"{self.url}: {reason}")

    def _body(self, messages, n, seed, left_out):
        """A request without some parameters, or with what takes their place."""
        body = {"model": self.model_name, "messages": messages, "n": n, "seed": seed}
        body |= self.sampling
        for name in left_out:
            value, other = body.pop(name), OTHER_NAMES[name]
            if other:
                body[other] = value
        return body

    def _leave_out(self, names):
        """Leave these parameters out of later requests, as one without them was answered."""
        with self.lock:
            new = sorted(names - self.left_out)
            self.left_out |= names
        for name in new:
            other = OTHER_NAMES[name]
            instead = f"with {other} instead" if other else "without it"
            tqdm.write(f"{self.url}: refuses {name}; requests go on {instead}", sys.stderr)

    def _tell(self, seconds, reason):
        """Print why a request has no answer after so many seconds, once until the next answer."""
        with self.lock:
            tell = seconds > TOLD_AFTER and not self.told
            self.told |= tell
        if tell:
            tqdm.write(f"{self.url}: no answer for {seconds:.0f} seconds ({reason}); it is asked"
                       " again, and if that does not help, the run ends and can be resumed",
                       sys.stderr)

    def _ask(self, path, body, timeout):
        """The JSON that the server has under `path`, in one attempt; `body` None is a GET.

        SpeakerError: the request is wrong. Any other error may be temporary.
        """
        # some hosts of APIs refuse urllib's own name (HTTP 403, "error code: 1010")
        headers = {"Content-Type": "application/json", "User-Agent": "sweet-rl-colbench"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with self.opener.open(request, timeout=timeout) as response:
                answer = read_within(response, timeout)
        except urllib.error.HTTPError as error:
            with error:
                detail = read_within(error, timeout).decode(errors="replace")
            raise self._error_of(error, detail) from None
        try:
            return json.loads(answer)
        except ValueError as error:
            found = " ".join(answer.decode(errors="replace").split())  # maybe a web page
            raise ValueError(f"{error} in the answer: {found}") from None

    def _error_of(self, error, detail):
        """What to raise for an HTTPError that came with these words of the server."""
        detail = " ".join(detail.split())  # pages of proxies have many lines
        if "Location" in error.headers:  # a redirect
            detail = f"moved to {error.headers['Location']} ({detail})"
        reason = f"HTTP {error.code}: {self._shown(detail)}"
        if error.code in TRANSIENT_STATUS:
            seconds = retry_after(error)
            if error.code == 429:
                reason += BUSY
                if "Retry-After" not in error.headers:
                    seconds = QUOTA_PAUSES * self.pause
            return Unavailable(reason, seconds)
        if error.code in WRONG_ADDRESS_STATUS:
            return WrongAddress(reason)
        return Refused(reason) if error.code in REFUSED_STATUS else SpeakerError(reason)

    def _shown(self, text):
        """A server's words for a message, without the API key, which some servers repeat."""
        if self.key:
            text = text.replace(self.key, "(the API key)")
        return harmless(text)[:DETAIL_CHARACTERS]  # cut last: no part of a key is left

    # -------------------------------------------------------------------------
    # The check at the start

    def _checked_name(self, name):
        """The model to ask for, compared with the server's list where it has one."""
        try:
            models = self._models("/models")
            if models is None and self._models("/v1/models") is not None:
                raise SystemExit(f"{self.url}: found no API there but one at {self.url}/v1,"
                                 " expected the address of an OpenAI-compatible API; give"
                                 f" {self.url}/v1")
        except Unavailable:  # requests have more patience with its faults
            return name
        if not models or name in models:
            return name
        # a proxy such as LiteLLM may list patterns ("openai/*") of the names that it takes
        has_patterns = any("*" in model for model in models)
        if name is None:
            if len(models) == 1 and not has_patterns:
                return models[0]
            raise SystemExit(f"{self.url}: found {counted(len(models), 'model')}, expected the name"
                             f" of one of them: {listed(models)}; {NAME_FLAGS}")
        # `transformers serve` loads checkpoint directories that it does not list, and APIs on the
        # internet know further names for what they list, such as "models/NAME" without "models/"
        if has_patterns or os.path.isdir(name) or not is_near(self.url):
            return name
        raise SystemExit(f"{self.url}: found no model {name!r} on this server, expected one"
                         f" of: {listed(models)}; {NAME_FLAGS}")

    def _models(self, path):
        """The names of the models that the server lists under `path`.

        None if there is no list; Unavailable if that remains open. A server that nobody can
        connect to ends the run.
        """
        for attempt in range(MODEL_LIST_ATTEMPTS):
            if attempt:
                time.sleep(self.pause * 2**attempt)
            try:
                listing = self._ask(path, None, min(self.timeout, MODEL_LIST_TIMEOUT))
                names = [model["id"] for model in listing["data"]]
                return list(dict.fromkeys(names)) if all_texts(names) else None
            except SpeakerError:
                return None
            except (Unavailable, OSError, http.client.HTTPException, *SENSELESS) as error:
                failure = error
        if isinstance(failure, SENSELESS):
            return None
        if isinstance(failure, (urllib.error.URLError, http.client.InvalidURL)):
            reason = getattr(failure, "reason", failure)  # why no connection came about
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise SystemExit(f"{self.url}: found a certificate that this machine does not trust"
                                 f" ({reason}), expected one of a known authority; name the file of"
                                 " its authority's certificate in the environment variable"
                                 " SSL_CERT_FILE, then rerun the command")
            raise SystemExit(f"{self.url}: found no server ({reason}{way_to(self.url)}), expected"
                             " one that answers; start it or correct the address, then rerun the"
                             " command")
        raise Unavailable(str(failure), 0)


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would take the API key to another host; here it is an HTTP error."""

    def redirect_request(self, *_):
        return None


def is_near(url):
    """Whether a server runs on this machine or in its network."""
    host = urllib.parse.urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_private  # so are 127.0.0.1, ::1 and 0.0.0.0
    except ValueError:
        return "." not in host  # localhost, node7


def opener_for(url):
    """What opens a server's addresses: directly if it is near, where a proxy of the environment
    (http_proxy) would not find it.
    """
    proxies = [urllib.request.ProxyHandler({})] if is_near(url) else []
    return urllib.request.build_opener(NoRedirects, *proxies)


def way_to(url):
    """For messages on failed requests: which proxy they went through, "" if through none."""
    parts, proxies = urllib.parse.urlsplit(url), urllib.request.getproxies()
    direct = is_near(url) or urllib.request.proxy_bypass(parts.netloc)
    if direct or parts.scheme not in proxies:
        return ""
    return (f"; asked through the proxy of the environment variable {parts.scheme}_proxy;"
            f" no_proxy={parts.hostname} would ask it directly")


class Refused(SpeakerError):
    """What a server says to a request that is itself wrong, so that a retry is useless."""


class WrongAddress(SpeakerError):
    """What a server says to a key, a path or a model's name that it does not know."""


class Unavailable(Exception):
    """An error that may be temporary: (reason, seconds that the server asks to wait, or 0)."""


def api_key(role):
    """The key of this party's server, such as HUMAN_API_KEY, else the one for all, or None.

    An empty one means none. No message may quote it.
    """
    own = f"{role.upper()}_API_KEY"
    name = own if own in os.environ else "OPENAI_API_KEY"
    key = os.environ.get(name, "").strip()
    if not key:
        return None
    if not (key.isascii() and key.isprintable()):  # http.client would quote it in its error
        raise SystemExit(f"{name}: found a key with unprintable or non-ASCII characters, expected"
                         " one line of ASCII; set it again")
    return key


def read_within(response, seconds):
    """The body of a response. The time limit of a socket is one for each part that arrives."""
    end, body = time.monotonic() + seconds, b""
    while part := response.read1(1 << 16):
        body += part
        if time.monotonic() > end:
            raise TimeoutError(f"no whole answer within {seconds:g} seconds")
    return body


def retry_after(error):
    """The seconds that an HTTPError asks to wait, by a number or a date; 0 if it names neither."""
    asked = error.headers.get("Retry-After", "").strip()
    if re.fullmatch(r"\d+(\.\d+)?", asked, re.ASCII):
        seconds = float(asked)
    else:
        try:
            date = email.utils.parsedate_to_datetime(asked)
            seconds = (date - datetime.datetime.now(datetime.timezone.utc)).total_seconds()
        except (ValueError, TypeError, OverflowError):  # no date, or one without a time zone
            seconds = 0
    return min(max(seconds, 0), MAX_RETRY_AFTER)


def refused_parameter(reason, body):
    """The parameter of a request that the server refuses and that has a substitute, or None."""
    for name in OTHER_NAMES:
        if name in body and UNSUPPORTED.search(reason) and re.search(rf"\b{name}\b", reason):
            return name
    return None


def utterances_of(answer):
    """The texts of an answer to /chat/completions, without those that have failed; an error if it
    has none. There may be fewer than were asked for.
    """
    choices = answer.get("choices") or []
    if answer.get("error"):
        raise ValueError(f"an error in place of an answer: {answer['error']}")
    if not choices:
        raise ValueError(f"an answer without choices: {answer}")
    sound = [choice for choice in choices if not fault_of(choice)]
    if not sound:
        raise ValueError(f"an error in place of an answer: {fault_of(choices[0])}")
    details = (answer.get("usage") or {}).get("completion_tokens_details") or {}
    texts = [text_of(choice, details.get("reasoning_tokens")) for choice in sound]
    if not all_texts(texts):
        raise ValueError("an answer without text")
    return [Utterance(text.encode(errors="replace").decode(),  # without halves of surrogate pairs
                      choice.get("finish_reason") not in CUT)
            for text, choice in zip(texts, sound, strict=True)]


def fault_of(choice):
    """What the server says has gone wrong with a choice, or None."""
    if choice.get("error"):
        return choice["error"]
    reason = choice.get("finish_reason")
    return reason if reason in FAILED else None


def text_of(choice, has_thought):
    """The text of a choice, None if it has none. `has_thought`: in tokens that are not shown."""
    message, reason = choice["message"], choice.get("finish_reason")
    content = message.get("content")
    if isinstance(content, list):  # the format allows parts, of which some are thoughts
        texts = [part["text"] for part in content if part.get("type", "text") == "text"]
        has_thought = has_thought or len(texts) < len(content)
        content = "".join(texts)
    if not content and message.get("refusal"):
        content = message["refusal"]  # the API has it in a key of its own
    if reason in CUT and not (content or "").strip():
        parsed_away = message.get("reasoning_content") or message.get("reasoning") or has_thought
        if content is None or parsed_away:
            return THOUGHTS  # which were cut
    if content is None and reason == "stop":
        return ""  # SGLang's word for an empty text
    return content


def all_texts(values):
    return all(isinstance(value, str) for value in values)


def listed(names):
    """Names for a message, at most MAX_NAMES of them."""
    shown = harmless(", ".join(names[:MAX_NAMES]))
    return f"{shown} and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else shown
