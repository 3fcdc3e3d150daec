"""Vision-language models in this process: the human of pages, who compares two screenshots."""

import base64
import inspect
import itertools
import re

import torch
import transformers
from transformers.models.auto.processing_auto import processor_class_from_name
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from colbench import image_part
from judge.browser import placeholder_picture
from judge.pages import open_picture
from runtime.models import load_config, load_model
from runtime.templates import render
from speakers.interface import Speaker, Utterance
from speakers.local import pick_tokens, stop_tokens, text_of, uniform_numbers
from speakers.pool import gather

# -----------------------------------------------------------------------------
# Checkpoints, and what they read


def load_processor(path):
    """What turns texts and pictures into the inputs of a vision-language model."""
    try:
        processor = without_videos(processor_class(path)).from_pretrained(path)
    except (OSError, ValueError, TypeError, IndexError, ImportError) as error:
        reason = " ".join(str(error).split())
        missing = "install what it names, or " if isinstance(error, ImportError) else ""
        raise SystemExit(
            f"{path}: could not open the processor ({reason}); expected a vision-language"
            f" checkpoint with its tokenizer and preprocessor_config.json; {missing}choose another"
        ) from None
    tokenizer = processor.tokenizer
    if processor.chat_template:  # the tokenizer's may be missing, or that of the text model
        tokenizer.chat_template = processor.chat_template
    if not tokenizer.pad_token:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.chat_template:  # `end_of_turn` refuses a tokenizer without one
        refuse_blind(processor, path)
    return processor


def processor_class(path):
    """The class that the checkpoint names (Pixtral's is not its model's), or that of its model."""
    of_processor, _ = transformers.ProcessorMixin.get_processor_dict(path)
    of_pictures, _ = transformers.ImageProcessingMixin.get_image_processor_dict(path)
    for file in of_processor, of_pictures, get_tokenizer_config(path):
        found = processor_class_from_name(file.get("processor_class", ""))
        if found:
            return found
    config = load_config(path)
    if type(config) not in transformers.PROCESSOR_MAPPING:
        raise SystemExit(f"{path}: found a model of type {config.model_type} whose files name no"
                         " processor, expected a processor_class in preprocessor_config.json;"
                         " choose another, or serve it and give the server's address")
    return transformers.PROCESSOR_MAPPING[type(config)]


def without_videos(base):
    """The processor's class without its part for videos, which needs torchvision, if it can do
    without.
    """
    video = inspect.signature(base.__init__).parameters.get("video_processor")
    if video is None or video.default is video.empty:
        return base

    class StillProcessor(base):
        @classmethod
        def get_attributes(cls):
            return [name for name in super().get_attributes() if name != "video_processor"]

    StillProcessor.__name__ = base.__name__  # save_pretrained writes it down
    return StillProcessor


def refuse_blind(processor, path):
    """Refuse a processor whose chat template, such as that of a text model, takes no pictures."""
    picture = image_part(placeholder_picture("https://picsum.photos/64/64"))
    text = {"type": "text", "text": "x"}
    with_picture = [{"role": "user", "content": [picture, text]}]
    text_alone = [{"role": "user", "content": [text]}]
    try:
        picture_inputs(processor, [with_picture])
        seen, _ = local_images(with_picture)
        if render(processor.tokenizer, seen) == render(processor.tokenizer, text_alone):
            # transformers 5.20 raises no error of its own
            raise ValueError("Found total 0 places for a picture")
    except (ValueError, TypeError, IndexError) as error:
        raise SystemExit(f"{path}: found a chat template that takes no pictures ({error}), expected"
                         " that of a vision-language model; put it into chat_template.jinja, or"
                         " choose another") from None


def picture_inputs(processor, conversations):
    """The model's inputs for conversations with pictures, as tensors padded on the left."""
    # A special token in a speaker's own words is removed: a picture's token without a picture
    # would stop the run.
    tokens = processor.tokenizer.added_tokens_decoder.values()
    special = "|".join(re.escape(str(token)) for token in tokens if token.special)
    conversations = [local_images(messages, special) for messages in conversations]
    texts = [render(processor.tokenizer, messages) for messages, _ in conversations]
    pictures = [images for _, images in conversations]
    return processor(
        text=texts, images=pictures if any(pictures) else None, padding=True, padding_side="left",
        add_special_tokens=False, return_tensors="pt")


def local_images(messages, unwanted=""):
    """(messages as chat templates take them, with images in place of data addresses; the images).

    Matches of the pattern `unwanted` are removed from the texts.
    """
    converted, images = [], []
    for message in messages:
        content = message["content"]
        if isinstance(content, str):
            content = without(content, unwanted)
        else:
            content = [local_part(part, unwanted) for part in content]
            images += [part["image"] for part in content if part["type"] == "image"]
        converted.append({**message, "content": content})
    return converted, images


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


# -----------------------------------------------------------------------------
# The human of pages


class VisionSpeaker(Speaker):
    """A vision-language transformers model that answers conversations with pictures.

    It samples like LocalSpeaker, but keeps no cache from turn to turn: the pictures come first in
    the prompt, and each turn has new ones.
    """

    def __init__(self, path, settings):
        self.processor = load_processor(path)
        self.model = load_model(path, settings.device, transformers.AutoModelForImageTextToText,
                                settings.dtype).eval()
        self.temperature = settings.temperature
        self.max_new_tokens = settings.max_new_tokens
        self.batch_size = settings.batch_size
        tokenizer = self.processor.tokenizer
        self.stops = stop_tokens(self.model, tokenizer)
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
        return Utterance(text_of(self.processor.tokenizer, ids), finished=bool(ends))
