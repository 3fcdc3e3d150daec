"""Vision-language models in this process: the human of pages, and the critic that sees.

The human of frontend tasks compares two screenshots, so a model in its role must read pictures
(`VisionSpeaker`). The paper's frontend critic is such a model, too: it sees the solution's
screenshot (`Sight`) and has a regression head on the outcome (`vision_value_class`).
"""

import base64
import functools
import re

import torch
import transformers

from colbench import DOMAINS, critic_messages, first_request, render
from judge.browser import Browser
from judge.pages import open_picture, solution_page
from speakers.interface import Speaker, Utterance
from speakers.local import (
    count_tokens,
    default_device,
    load_config,
    load_model,
    pick_tokens,
    stop_tokens,
    uniform_numbers,
)

# -----------------------------------------------------------------------------
# Checkpoints, and what they read


def sees_pictures(path):
    """Whether the checkpoint is a vision-language model, as its config says."""
    return type(load_config(path)) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def load_processor(path):
    """What turns texts and pictures into the inputs of a vision-language model."""
    config = load_config(path)

    class StillProcessor(transformers.PROCESSOR_MAPPING[type(config)]):
        @classmethod
        def get_attributes(cls):  # without the part for videos, which needs torchvision
            return [name for name in super().get_attributes() if name != "video_processor"]

    StillProcessor.__name__ = StillProcessor.__base__.__name__  # save_pretrained writes it down
    try:
        processor = StillProcessor.from_pretrained(path)
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise SystemExit(
            f"{path}: could not open the processor ({error}); expected a vision-language"
            " checkpoint with its tokenizer and preprocessor_config.json; choose another"
        ) from None
    tokenizer = processor.tokenizer
    if not tokenizer.chat_template:  # older checkpoints keep it with the processor alone
        tokenizer.chat_template = processor.chat_template
    if not tokenizer.pad_token:
        tokenizer.pad_token = tokenizer.eos_token
    return processor


def picture_inputs(processor, conversations):
    """The model's inputs for conversations with pictures, as tensors padded on the left."""
    # A special token in a speaker's own words is removed: a picture's token without a picture
    # would stop the run.
    tokens = processor.tokenizer.added_tokens_decoder.values()
    special = "|".join(re.escape(str(token)) for token in tokens if token.special)
    conversations = [local_images(messages, special) for messages in conversations]
    texts = [render(processor.tokenizer, messages) for messages in conversations]
    pictures = [pictures_in(messages) for messages in conversations]
    return processor(
        text=texts, images=pictures if any(pictures) else None, padding=True, padding_side="left",
        add_special_tokens=False, return_tensors="pt")


def local_images(messages, unwanted=""):
    """The messages with PIL images in place of data addresses, as chat templates take them.

    Matches of the pattern `unwanted` are removed from the texts.
    """
    converted = []
    for message in messages:
        content = message["content"]
        if isinstance(content, str):
            content = re.sub(unwanted, "", content)
        else:
            content = [local_part(part, unwanted) for part in content]
        converted.append({**message, "content": content})
    return converted


def local_part(part, unwanted):
    """One part of a message, as in `local_images`."""
    if part["type"] == "image_url":
        data = part["image_url"]["url"].split(",", 1)[1]
        return {"type": "image", "image": open_picture(base64.b64decode(data))}
    return {**part, "text": re.sub(unwanted, "", part["text"])}


def pictures_in(messages):
    """The images of messages that `local_images` has made."""
    parts = [part for message in messages if not isinstance(message["content"], str)
             for part in message["content"]]
    return [part["image"] for part in parts if part["type"] == "image"]


# -----------------------------------------------------------------------------
# The human of pages


class VisionSpeaker(Speaker):
    """A vision-language transformers model that answers conversations with pictures.

    It samples like LocalSpeaker, but keeps no cache from turn to turn: the pictures come first in
    the prompt, and each turn has new ones.
    """

    def __init__(self, path, settings):
        self.device = settings.device or default_device()
        self.processor = load_processor(path)
        self.model = load_model(
            path, self.device, "AutoModelForImageTextToText", settings.dtype).eval()
        self.temperature = settings.temperature
        self.max_new_tokens = settings.max_new_tokens
        self.batch_size = settings.batch_size
        tokenizer = self.processor.tokenizer
        self.stops = stop_tokens(self.model, tokenizer)
        # in place of the checkpoint's own, whose top_p and penalties LocalSpeaker ignores, too
        self.model.generation_config = transformers.GenerationConfig(
            eos_token_id=sorted(self.stops), pad_token_id=tokenizer.pad_token_id)

    def speak(self, conversations, n=1, seeds=None, tasks=None, keys=None):
        if seeds is None:
            seeds = [0] * len(conversations)
        uniform = uniform_numbers(seeds, n, self.max_new_tokens)  # a row for each sample
        copies = [messages for messages in conversations for _ in range(n)]
        utterances = []
        for start in range(0, len(copies), self.batch_size):
            end = start + self.batch_size
            utterances += self._generate(copies[start:end], uniform[start:end])
        return [utterances[start:start + n] for start in range(0, len(utterances), n)]

    def count_tokens(self, texts):
        return count_tokens(self.processor.tokenizer, texts)

    @torch.inference_mode()
    def _generate(self, conversations, uniform):
        """One Utterance for each conversation; uniform (R, max_new_tokens)."""
        inputs = picture_inputs(self.processor, conversations)
        inputs = inputs.to(self.device, self.model.dtype)
        width = inputs["input_ids"].shape[1]

        def force_picked(ids, logits):
            """Leave one possible token in each row: the one that `uniform` picks."""
            step = ids.shape[1] - width
            picked = pick_tokens(logits, uniform[:, step], self.temperature)
            return torch.full_like(logits, -torch.inf).scatter(1, picked[:, None], 0.0)

        output = self.model.generate(
            **inputs, max_new_tokens=self.max_new_tokens,
            logits_processor=transformers.LogitsProcessorList([force_picked]))
        return [self._utterance(ids) for ids in output[:, width:].tolist()]

    def _utterance(self, ids):
        """The text before the first token that ends it."""
        ends = [index for index, token in enumerate(ids) if token in self.stops]
        if ends:
            ids = ids[:ends[0]]
        text = self.processor.tokenizer.decode(ids, skip_special_tokens=True)
        return Utterance(text, finished=bool(ends))


# -----------------------------------------------------------------------------
# A critic that sees: the paper's frontend critic is a vision-language model with a regression head


class Sight:
    """What a vision-language critic reads with: its processor, and a browser for solution pages.

    `privileged` is the critic's flag. The browser opens with the first page: functions, and a
    critic that sees no solution, need none.
    """

    def __init__(self, path, privileged):
        self.processor, self.privileged = load_processor(path), privileged
        self.browser = None
        self.draw = functools.cache(self._draw)  # draws every solution page once
        # rows of a task, and candidates of a state, come one after the other: few are enough
        self.read = functools.lru_cache(8)(self._read)

    def opening_reader(self, task, messages):
        """A function without arguments that gives the model's inputs up to the first request.

        They show the solution before the request. Rows keep the function and not its result: the
        pixels of all tasks at once would fill the memory.
        """
        opening = messages[:first_request(messages) + 1]
        # tuples and texts, which a cache can look up
        opening = tuple((message["role"], message["content"]) for message in opening)
        return functools.partial(self.read, task["domain"], task["ground_truth"], opening)

    def _read(self, domain, solution, opening):
        messages = [{"role": role, "content": content} for role, content in opening]
        picture = None  # without one, as for a page that cannot be drawn, the critic reads its text
        if self.privileged == "ground_truth" and DOMAINS[domain].pages:
            picture = self.draw(solution_page(solution))
        task = {"domain": domain, "ground_truth": solution}
        seen = critic_messages(task, messages, self.privileged, picture)
        return picture_inputs(self.processor, [seen])

    def _draw(self, page):
        if self.browser is None:
            self.browser = Browser()
        return self.browser.picture(page)


def vision_value_class(path):
    """A vision-language checkpoint's class, with a value head in place of the language head.

    Its logits are (R, T, 1), as those of a text model with such a head.
    """
    from transformers.modeling_outputs import TokenClassifierOutput

    config = load_config(path)
    base = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]

    class VisionValue(base):
        _tied_weights_keys = None

        def __init__(self, config):
            super().__init__(config)
            del self.lm_head
            self.score = torch.nn.Linear(config.get_text_config().hidden_size, 1)
            self.post_init()

        def forward(self, **inputs):
            hidden = self.model(**inputs).last_hidden_state  # (R, T, D)
            if "pixel_values" not in inputs:
                hidden = hidden + zero_with_gradients(self.parameters_of_vision())
            return TokenClassifierOutput(logits=self.score(hidden))

        def parameters_of_vision(self):
            decoder = {id(parameter) for parameter in self.get_decoder().parameters()}
            return [parameter for parameter in self.model.parameters()
                    if id(parameter) not in decoder]

    # transformers looks up by these names how a checkpoint spells its weights
    VisionValue.__name__, VisionValue.__module__ = base.__name__, base.__module__
    return VisionValue


def zero_with_gradients(parameters):
    """0, with a gradient of 0 for each of `parameters`.

    Data-parallel ranks sum the gradients that they have, weight by weight, so all must have the
    same ones. A row without a picture does not use the vision encoder; added to its result, this
    zero gives the encoder's weights gradients all the same.
    """
    return 0.0 * sum(parameter.sum() for parameter in parameters)
