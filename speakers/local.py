"""Language models in this process as speakers: batched sampling, kept caches."""

import contextlib
import dataclasses
import functools
import itertools
import math

import numpy
import torch
import torch.nn.functional as F
import transformers

from colbench import END_OF_THOUGHTS, THOUGHTS, encode_dialogue
from runtime.models import context_length, load_model, load_tokenizer
from runtime.seeds import derive_seed
from runtime.templates import (
    RefusedDialogue, UnnestedTemplate, end_of_turn, mark_before, render, short_prompt)
from speakers.attention import share_prompts
from speakers.interface import Speaker, SpeakerError, Utterance
from speakers.pool import gather

# Prompt tokens of a batch, padding included. In an 8B Llama, their keys and values take 17 GB,
# besides those of all dialogues.
TOKENS_AT_ONCE = 1 << 17

# -----------------------------------------------------------------------------
# The speaker


@dataclasses.dataclass
class KeptCache:
    """What a model has read and written of one dialogue."""

    ids: list  # token ids
    layers: list  # for each layer the keys and values of these tokens, (H, T, D) and (H, T, D)


@dataclasses.dataclass
class Sample:
    """One text in the making."""

    tokens: list = dataclasses.field(default_factory=list)  # without the token that ends it
    finished: bool = False  # whether the model ended it
    cache: KeptCache | None = None  # once it has left the batch, if it is the prompt's only sample


class LocalSpeaker(Speaker):
    """A transformers model that answers many conversations at once.

    The caches of the `batch_size` dialogues (keys of requests) that it answered last stay in
    `kept`, so that a turn costs only its new tokens. Each sample draws from a random stream of its
    own, so its text does not depend on the other conversations in the batch, up to rounding.
    """

    batches_at_once = 8  # so that it can form batches of prompts of similar length

    def __init__(self, path, settings, model=None, tokenizer=None):
        if tokenizer is None:
            tokenizer = load_tokenizer(path)
        if model is None:
            model = load_model(path, settings.device, dtype=settings.dtype)
        refuse_unfit_layers(model, path)
        self.tokenizer, self.model = tokenizer, model.eval()
        self.device = self.model.device
        self.temperature = settings.temperature
        self.max_new_tokens = settings.max_new_tokens
        self.batch_size = settings.batch_size
        self.stops = stop_tokens(self.model, tokenizer)
        self.context = context_length(self.model.config) or math.inf
        self.kept = {}  # dialogue key -> KeptCache, the one used last at the end

    def reply(self, request):
        said = gather(self.speak, request)
        if isinstance(said, SpeakerError):
            raise said
        return said

    def speak(self, requests):
        """For each request a list of n Utterances, or the SpeakerError that prevents them."""
        prompts, answers = {}, [None] * len(requests)
        for index, request in enumerate(requests):
            try:
                ids = encode_prompt(self.tokenizer, request.messages)
            except RefusedDialogue as reason:  # Mistral's templates refuse an empty agent message
                answers[index] = SpeakerError(str(reason))
                continue
            if len(ids) < self.context:
                prompts[index] = ids
            else:
                answers[index] = SpeakerError(
                    f"found a dialogue that fills the model's context of {self.context} tokens,"
                    " expected a shorter one")

        def order(index):  # not that of arrival: the same requests make the same batches
            return requests[index].n, len(prompts[index]), requests[index].seed

        ordered = sorted(prompts, key=order)
        for n, same_n in itertools.groupby(ordered, lambda index: requests[index].n):
            for batch in in_batches(same_n, lambda index: len(prompts[index]), TOKENS_AT_ONCE,
                                    max(1, self.batch_size // n)):
                said = self._answer([requests[index] for index in batch],
                                    [prompts[index] for index in batch], n)
                for row, index in enumerate(batch):
                    answers[index] = said[n * row:n * (row + 1)]
        return answers

    def _answer(self, requests, prompts, n):
        """The Utterances of one batch, n for each prompt."""
        caches = [self.kept.pop(request.key, None) for request in requests]
        samples = self._generate(prompts, caches, n, [request.seed for request in requests])
        for request, sample in zip(requests, samples[::n], strict=True):
            if request.key is not None and sample.cache:
                self.kept[request.key] = sample.cache
                if len(self.kept) > self.batch_size:
                    del self.kept[next(iter(self.kept))]  # most likely that of an ended dialogue
        return [Utterance(text_of(self.tokenizer, sample.tokens), sample.finished)
                for sample in samples]

    @torch.inference_mode()
    def _generate(self, prompts, caches, n, seeds):
        """The Samples, n for each prompt. `caches` (one for each prompt, or None) is emptied."""
        samples = [Sample() for _ in range(n * len(prompts))]
        uniform = uniform_numbers(seeds, n, self.max_new_tokens)  # a row for each sample

        cache, mask, logits = self._read(prompts, caches)
        if n > 1:  # each prompt was read once, and its samples attend to it together
            cache = share_prompts(self.model, cache, n)
            mask = mask.repeat_interleave(n, 0)
            logits = logits.repeat_interleave(n, 0)

        live = list(range(len(samples)))  # row r of the batch is samples[live[r]]
        for step in range(self.max_new_tokens):
            picked = pick_tokens(logits, uniform[live, step], self.temperature).tolist()
            staying = []  # rows
            for row, (index, token) in enumerate(zip(live, picked, strict=True)):
                sample, prompt = samples[index], prompts[index // n]
                if token in self.stops:
                    sample.finished = True
                else:
                    sample.tokens.append(token)
                limit = min(self.max_new_tokens, self.context - len(prompt))
                if not sample.finished and len(sample.tokens) < limit:
                    staying.append(row)
                elif n == 1:
                    sample.cache = kept_cache(prompt + sample.tokens, cache, mask[row], row)
            if not staying:
                break
            if len(staying) < len(live):
                live = [live[row] for row in staying]
                picked = [picked[row] for row in staying]
                rows = torch.tensor(staying, device=self.device)
                cache.batch_select_indices(rows)
                mask = mask[rows]
            mask = torch.cat([mask, mask.new_ones(len(live), 1)], 1)
            logits = self._forward(torch.tensor(picked, device=self.device)[:, None], mask, cache)
        return samples

    def _forward(self, new_ids, mask, cache):
        """Read new tokens, those of the last columns of `mask`; the next one's logits, (R, V)."""
        positions = (mask.cumsum(1)[:, -new_ids.shape[1]:] - 1).clamp(min=0)
        return self.model(
            input_ids=new_ids, attention_mask=mask, position_ids=positions,
            past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]

    def _read(self, prompts, caches):
        """Prefill: a cache of all prompts, its mask (R, T), and the next token's logits (R, V).

        Tokens that a kept cache holds are not computed again, with one exception: all rows read
        equally many new tokens, so a row with fewer reads some of its kept ones again. (Padding
        between kept and new tokens would use up a sliding window.) A row is one of these:

            padding  kept tokens | new tokens
            padding              | padding  new tokens      if the whole prompt is shorter
        """
        # of each row: how many tokens its kept cache holds, and how many of these are reused
        held = [0 if kept is None else common_prefix(ids, kept.ids)
                for ids, kept in zip(prompts, caches, strict=True)]
        most_new = max(len(ids) - count for ids, count in zip(prompts, held, strict=True))
        reused = [max(0, min(count, len(ids) - most_new))
                  for ids, count in zip(prompts, held, strict=True)]
        past = max(reused)  # columns of kept tokens; those of new tokens follow
        width = past + most_new
        mask = torch.zeros(len(prompts), width, dtype=torch.long, device=self.device)
        input_ids = torch.zeros_like(mask)
        for row, (ids, count) in enumerate(zip(prompts, reused, strict=True)):
            new_ids = ids[count:]
            mask[row, past - count:past] = 1
            mask[row, width - len(new_ids):] = 1
            input_ids[row, width - len(new_ids):] = torch.tensor(new_ids, device=self.device)
        cache = joined_cache(caches, reused)
        return cache, mask, self._forward(input_ids[:, past:], mask, cache)


def in_batches(items, length, tokens, size=None):
    """Split `items` into batches of at most `size` and of at most `tokens` tokens, with padding.

    `items` are sorted by length(item). One that is longer than `tokens` stands alone.
    """
    batch = []
    for item in items:
        too_large = (len(batch) + 1) * length(item) > tokens
        if batch and (too_large or len(batch) == size):
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


CACHED_KINDS = {"attention", "full_attention", "sliding_attention", "chunked_attention"}


def refuse_unfit_layers(model, path):
    """Refuse models with indexed or recurrent layers, and with layers that attend to pictures.

    Rows are padded, and they join and leave a batch. Keys and values allow this, a recurrent state
    does not.
    """
    config = model.config.get_text_config()
    if getattr(config, "cross_attention_layers", None):  # Llama 3.2 Vision
        raise SystemExit(f"{path}: found a model with layers that attend to pictures, expected one"
                         " that reads texts alone to sample from; serve it and give the server's"
                         " address")
    kinds = set(getattr(config, "layer_types", None) or ())
    unfit = sorted(kinds - CACHED_KINDS)
    # an architecture may have recurrent layers of which a model has none, such as Granite 4 Micro
    if unfit or (model._is_stateful and not kinds):
        raise SystemExit(f"{path}: found a model with indexed, compressed or recurrent layers"
                         f" ({', '.join(unfit) or type(model).__name__}), expected one of"
                         " attention layers alone to sample from; serve it and give the server's"
                         " address")


@functools.lru_cache(maxsize=8)
def opens_thoughts(tokenizer):
    """Whether the template, and not the model, opens the thoughts of a reasoning model."""
    prompt = short_prompt(tokenizer)
    return prompt.rstrip().endswith(tuple(opening.strip() for opening, _ in SPECIAL_THOUGHTS))


SPECIAL_THOUGHTS = (  # what opens and closes thoughts where special tokens do, which are left out
    (THOUGHTS, END_OF_THOUGHTS),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),  # gpt-oss
    ("<|channel>thought\n", "<channel|>"),  # Gemma 4
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ("<|think|>", "<|end|><|begin|>assistant<|content|>"),  # Solar Open
    ("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
)


def text_of(tokenizer, tokens):
    """The text of tokens without the special ones; thoughts stand between the usual tags."""
    # after a mark, since some tokenizers (Llama 2's) decode a text without the space that opens it
    mark, mark_ids = mark_before(tokenizer)
    tokens = mark_ids + tokens
    text = tokenizer.decode(tokens, skip_special_tokens=True).removeprefix(mark)
    whole = tokenizer.decode(tokens).removeprefix(mark)
    for tags in SPECIAL_THOUGHTS:
        if any(tag in whole for tag in tags) and not any(tag in text for tag in tags):
            opening, closing = tags
            tagged = whole.replace(opening, "").replace(closing, END_OF_THOUGHTS)
            for token in tokenizer.added_tokens_decoder.values():
                if token.special and str(token) != END_OF_THOUGHTS:
                    tagged = tagged.replace(str(token), "")
            return THOUGHTS + tagged
    if opens_thoughts(tokenizer) and END_OF_THOUGHTS not in text:
        return THOUGHTS + text  # they were cut; without the tag, they would pass for speech
    return text


def encode_prompt(tokenizer, messages):
    """Token ids of a prompt. Unlike training, sampling accepts a template that does not nest."""
    try:
        return encode_dialogue(tokenizer, messages, generation_prompt=True)[0]
    except UnnestedTemplate:
        return tokenizer.encode(render(tokenizer, messages), add_special_tokens=False)


# -----------------------------------------------------------------------------
# Which tokens end a text, and how one is picked


def stop_tokens(model, tokenizer):
    """The ids of the tokens that end a text, as the checkpoint and the chat template say."""
    ends = model.generation_config.eos_token_id
    ends = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id}
    # neither shows the end of a turn; the second may take parts of messages alone (LLaVA-NeXT)
    with contextlib.suppress(UnnestedTemplate, RefusedDialogue):
        ends.add(end_of_turn(tokenizer)[0])
    return ends - {None}


def uniform_numbers(seeds, n, length):
    """The random numbers of n samples for each seed, (n x seeds, length); each has its stream."""
    streams = [numpy.random.default_rng(derive_seed(seed, index)).random(length)
               for seed in seeds for index in range(n)]
    return torch.from_numpy(numpy.stack(streams))


def pick_tokens(logits, uniform, temperature):
    """One token for each row by inverse transform sampling; temperature 0 is greedy.

    logits (R, V), uniform (R,) in [0, 1) -> (R,)
    """
    if logits.isnan().any():
        raise SystemExit("found logits that are no numbers, expected numbers; the model's weights"
                         " are broken, or give --dtype float32")
    if temperature == 0:
        return logits.argmax(-1)
    probabilities = (logits.double() / temperature).softmax(-1)
    totals = probabilities.cumsum(-1)  # in float64: the sum of 128k float32 terms would lose mass
    threshold = uniform.to(totals) * totals[:, -1]
    return (totals <= threshold[:, None]).sum(-1)


# -----------------------------------------------------------------------------
# Kept caches


def common_prefix(ids, kept_ids):
    """How many leading tokens agree; the last of `ids` never counts, since it is read again."""
    limit = min(len(ids) - 1, len(kept_ids))
    for index in range(limit):
        if ids[index] != kept_ids[index]:
            return index
    return limit


def kept_cache(ids, cache, mask, row):
    """The KeptCache of one row, without its padding. The model has not read the last token yet."""
    columns = mask.nonzero().squeeze(1)
    layers = [(layer.keys[row][:, columns], layer.values[row][:, columns])
              for layer in cache.layers]
    return KeptCache(ids[:len(columns)], layers)


def joined_cache(caches, counts):
    """A cache whose rows are the first counts[r] tokens of caches[r] (None where the count is 0).

    It is a copy, made layer by layer. `caches` is emptied on the way, or all would be in memory
    twice.
    """
    joined = transformers.DynamicCache()
    if any(counts):
        kept = [cache for cache in caches if cache is not None]
        for layer in range(len(kept[0].layers)):
            # a missing cache, of which no token is taken, is replaced by any other
            states = [(cache or kept[0]).layers[layer] for cache in caches]
            keys, values = zip(*states, strict=True)
            joined.update(left_padded(keys, counts), left_padded(values, counts), layer)
            for cache in kept:
                cache.layers[layer] = None
    caches.clear()
    return joined


def left_padded(states, counts):
    """The first counts[r] positions of states[r] (H, T, D), padded on the left: (R, H, P, D)."""
    length = max(counts)
    return torch.stack([F.pad(state[:, :count], (0, 0, length - count, 0))
                        for state, count in zip(states, counts, strict=True)])
