"""What a speaker is: an object of any class, with the two methods below and perhaps the rest.

speak(conversations, n=1, seeds=None, tasks=None, keys=None) answers many conversations at once.
For each conversation it returns, in the same order, a list of n Utterances, or one SpeakerError if
this conversation could not be answered while others may be.
    conversations   lists of messages {"role": "system" | "user" | "assistant", "content": ...};
                    `content` is a text, or a list of parts in the OpenAI format (pictures)
    n               how many texts to sample for each conversation
    seeds           an integer for each conversation (default: 0). Equal messages and seeds give
                    equal texts, whatever other conversations are in the call
    tasks           the task of each conversation; only scripted speakers read it
    keys            a name for the dialogue of each conversation. A speaker may use it to keep what
                    it has computed for the dialogues that it answered last

count_tokens(texts) returns how many tokens the texts have together, or None if that is unknown.

submit(request) (optional) starts one Request and returns the Future of its reply: n Utterances or a
SpeakerError. Servers have it, so that no request waits for another one.

reply(request) (optional) is a generator for collect.interleave that returns the reply. A speaker
made of others has it, such as best of N; it then needs no `speak`.

given_up (optional) is None, or the reason why a server is no longer asked: no new dialogue starts.
has_answered (optional; a missing attribute means True) is whether it has answered anything so far.

reads_history (optional; a missing attribute means False) is True for a human that reads the plain
dialogue history in place of the messages that a human model reads, as scripted humans do.
"""

from typing import Any, NamedTuple


class Utterance(NamedTuple):
    text: str
    finished: bool  # false if it was cut at the token limit


class Request(NamedTuple):
    """One conversation to answer; the fields are those of `speak`."""

    messages: list
    n: int = 1
    seed: int = 0
    task: dict | None = None
    key: Any = None


class SpeakerError(Exception):
    """Why one conversation could not be answered; `speak` returns it in place of its texts.

    `refused`: the request itself is wrong (mostly too long), so a retry is useless.
    """

    def __init__(self, reason, refused=False):
        super().__init__(reason)
        self.refused = refused


class SpeakerSettings(NamedTuple):
    """How a speaker samples. A scripted speaker ignores all of it."""

    model_name: str | None = None  # for servers: which of their models
    temperature: float = 1.0  # 0 is greedy
    max_new_tokens: int = 1024
    batch_size: int = 64  # samples computed together; for servers: requests in flight
    device: str | None = None  # for local models; None: the GPU if there is one
    dtype: str | None = None  # for local models; None: bf16 on a GPU, fp32 on a CPU


DEFAULT_SETTINGS = SpeakerSettings()
