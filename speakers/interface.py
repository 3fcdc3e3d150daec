"""What a speaker is: whoever answers conversations, as agent, human or grader model."""

from typing import Any, NamedTuple

from colbench import without_thoughts


class Request(NamedTuple):
    """One conversation to answer.

    `messages` are {"role": "system" | "user" | "assistant", "content": ...}, whose content is a
    text, or a list of parts in the OpenAI format (pictures).
    """

    messages: list
    n: int = 1  # how many answers, each drawn on its own
    seed: int = 0
    task: dict | None = None  # for scripts, and for the critic of best_of_n.py; no model reads it
    key: Any = None  # names the dialogue, of which a speaker may keep what it has computed


class SpeakerError(Exception):
    """Why one conversation could not be answered."""


class Utterance(NamedTuple):
    text: str
    finished: bool  # false if it was cut at the token limit

    @property
    def spoken(self):
        """The text without a model's thoughts, which may reveal the solution; SpeakerError if they
        never end."""
        said = without_thoughts(self.text)
        if said is None:
            raise SpeakerError("found thoughts that never end, expected words after them; turn the"
                               " model's thinking off, or raise --human_max_new_tokens for a human,"
                               " --critic_max_new_tokens for a grader")
        return said


class Speaker:
    """Answers conversations."""

    # as a human: true if it reads the dialogue itself, as scripts do; else the domain's human_view
    reads_history = False
    given_up = None  # why it is no longer asked, such as a server that is down; None: it is asked
    batches_at_once = 1  # how many batches of candidates to ask it for at a time
    tokenizer = None  # that of a model in this process, whose template is checked before play

    def reply(self, request):
        """A list of n Utterances; raises SpeakerError. It blocks, and many threads may call it.

        Equal messages and seeds give equal texts, up to rounding, whatever else is asked meanwhile.
        Wait for a server or another program inside of `elsewhere()`, and with a time limit; let a
        model compute through `gather` (both in speakers/pool.py).
        """
        raise NotImplementedError


class SpeakerSettings(NamedTuple):
    """How a speaker samples. A scripted speaker ignores all of it."""

    model_name: str | None = None  # for servers: which of their models
    temperature: float = 1.0  # 0 is greedy
    max_new_tokens: int = 1024
    batch_size: int = 64  # for local models: samples computed together, and dialogues kept
    device: str | None = None  # for local models; None: the GPU if there is one
    dtype: str | None = None  # for local models; None: bf16 on a GPU, fp32 on a CPU


def stop_if_given_up(*speakers):
    """End a run whose server does not answer, once all that was in flight is on disk."""
    for speaker in speakers:
        if speaker.given_up:
            raise SystemExit(f"found a server that answers no request ({speaker.given_up}),"
                             " expected one that does; start it again, then rerun the same command"
                             " to resume; or correct its address, the model's name or its key"
                             " (OPENAI_API_KEY, or the party's own)")
