"""Vision-language models in this process: the human of pages, who compares two screenshots."""

import base64
import itertools
import re

import torch
import transformers

from judge.pages import open_picture
from runtime.models import default_device, load_config, load_model
from runtime.templates import render
from speakers.interface import Speaker, Utterance
from speakers.local import (
    opens_thoughts, pick_tokens, stop_tokens, uniform_numbers, with_opening)
from speakers.pool import gather

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
            content = without(content, unwanted)
        else:
            content = [local_part(part, unwanted) for part in content]
        converted.append({**message, "content": content})
    return converted


def local_part(part, unwanted):
    """One part of a message, as in `local_images`."""
    if part["type"] == "image_url":
        data = part["image_url"]["url"].split(",", 1)[1]
        return {"type": "image", "image": open_picture(base64.b64decode(data))}
    return {**part, "text": without(part["text"], unwanted)}


def without(text, unwanted):
    """The text without matches of the pattern, nor those that a removal puts together."""
    while (shorter := re.sub(unwanted, "", text)) != text:
        text = shorter
    return text


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
        self.processor = load_processor(path)
        self.model = load_model(path, settings.device or default_device(),
                                transformers.AutoModelForImageTextToText, settings.dtype).eval()
        self.temperature = settings.temperature
        self.max_new_tokens = settings.max_new_tokens
        self.batch_size = settings.batch_size
        tokenizer = self.processor.tokenizer
        self.stops = stop_tokens(self.model, tokenizer)
        self.opens_thoughts = opens_thoughts(tokenizer)
        # in place of the checkpoint's own, whose top_p and penalties LocalSpeaker ignores, too
        self.model.generation_config = transformers.GenerationConfig(
            eos_token_id=sorted(self.stops), pad_token_id=tokenizer.pad_token_id)

    def reply(self, request):
        return gather(self.speak, request)

    def speak(self, requests):
        """For each request a list of n Utterances."""
        conversations = [request.messages for request in requests for _ in range(request.n)]
        uniform = torch.cat([  # a row for each sample
            uniform_numbers([request.seed], request.n, self.max_new_tokens)
            for request in requests])
        utterances = []
        for start in range(0, len(conversations), self.batch_size):
            end = start + self.batch_size
            utterances += self._generate(conversations[start:end], uniform[start:end])
        said = iter(utterances)
        return [list(itertools.islice(said, request.n)) for request in requests]

    @torch.inference_mode()
    def _generate(self, conversations, uniform):
        """One Utterance for each conversation; uniform (R, max_new_tokens)."""
        inputs = picture_inputs(self.processor, conversations)
        inputs = inputs.to(self.model.device, self.model.dtype)
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
        return Utterance(with_opening(text, self.opens_thoughts), finished=bool(ends))
