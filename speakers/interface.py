"""What a speaker is: whoever answers conversations, as agent, human or grader model."""

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


class LocalRequest(NamedTuple):
    """A request to a speaker that computes in this process, see collect.interleave."""

    speaker: Any
    request: Request


class Speaker:
    """Answers conversations: lists of messages {"role": "system" | "user" | "assistant",
    "content": ...}, whose content is a text, or a list of parts in the OpenAI format (pictures).
    """

    # as a human: whether it reads the dialogue history (scripted humans), or `Referee.human_view`
    reads_history = False
    given_up = None  # why it is no longer asked, such as a server that is down
    has_answered = True  # whether it has answered anything so far

    def speak(self, conversations, n=1, seeds=None, tasks=None, keys=None):
        """For each conversation a list of n Utterances, or one SpeakerError.

        `seeds` holds an integer for each conversation (default: 0): equal messages and seeds give
        equal texts, up to rounding, whatever other conversations are in the call. `tasks` are read
        by scripted speakers only. `keys` name the dialogues, of which a speaker may keep what it
        has computed.
        """
        raise NotImplementedError

    def reply(self, request):
        """What it answers to one Request: n Utterances, or a SpeakerError.

        A generator for collect.interleave: it yields what it waits for.
        """
        return (yield LocalRequest(self, request))

    def count_tokens(self, texts):
        """How many tokens the texts have together; None where that is unknown."""
        return None


class SpeakerSettings(NamedTuple):
    """How a speaker samples. A scripted speaker ignores all of it."""

    model_name: str | None = None  # for servers: which of their models
    temperature: float = 1.0  # 0 is greedy
    max_new_tokens: int = 1024
    batch_size: int = 64  # samples computed together; for servers: requests in flight
    device: str | None = None  # for local models; None: the GPU if there is one
    dtype: str | None = None  # for local models; None: bf16 on a GPU, fp32 on a CPU


DEFAULT_SETTINGS = SpeakerSettings()
