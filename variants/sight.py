"""The vision-language model of variants/value_critic.py: the paper's critic of frontend tasks.

It reads a screenshot of the solution before the request, and a value head compares dialogues.
"""

import functools
import json

import torch
import transformers
from transformers.modeling_outputs import TokenClassifierOutput

from colbench import DOMAINS, image_part
from judge.browser import Browser
from judge.pages import solution_page
from runtime.models import load_config
from speakers.vision import load_processor, picture_inputs
from train_critic import critic_messages


class Sight:
    """What a vision-language critic reads with: its processor, and a browser for solution pages.

    `privileged` is the critic's flag. The browser opens when the first page is drawn: tasks of
    functions, and a critic that sees no solution, need no browser.
    """

    def __init__(self, path, privileged):
        self.processor, self.privileged = load_processor(path), privileged
        self.browser = None
        # caches of this object: every solution page is drawn once, and the last openings are kept
        # (few are enough, as rows of a task, and candidates of a state, follow each other)
        self.draw = functools.cache(self._draw)
        self.read = functools.lru_cache(8)(self._read)

    def opening_reader(self, task, opening):
        """A function without arguments that gives the model's inputs for the opening, which is the
        messages up to the first request.

        They show the solution before the request. Rows keep the function and not its result: the
        pixels of all tasks at once would fill the memory.
        """
        return functools.partial(self.read, json.dumps([task, opening]))

    def _read(self, task_and_opening):
        """The model's inputs. The argument is JSON, since a dict cannot be the key of a cache."""
        task, messages = json.loads(task_and_opening)
        picture = None  # without one, as for a page that cannot be drawn, the critic reads its text
        if self.privileged == "ground_truth" and DOMAINS[task["domain"]].pages:
            picture = self.draw(solution_page(task["ground_truth"]))
        if picture:
            request = {"type": "text", "text": messages[-1]["content"]}
            messages[-1]["content"] = [image_part(picture), request]
        else:
            messages = critic_messages(task, messages, self.privileged)
        return picture_inputs(self.processor, [messages])

    def _draw(self, page):
        if self.browser is None:
            self.browser = Browser()
        # twice if need be: on a busy machine, a page may take too long
        return self.browser.picture(page) or self.browser.picture(page)


def vision_value_class(path):
    """A vision-language checkpoint's class, with a value head in place of the language head.

    Its logits are (R, T, 1), as those of a text model with such a head.
    """
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
            if torch.is_grad_enabled():
                hidden = hidden + zero_of_vision(self)
            return TokenClassifierOutput(logits=self.score(hidden))

    # transformers looks up by these names how a checkpoint spells its weights
    VisionValue.__name__, VisionValue.__module__ = base.__name__, base.__module__
    return VisionValue


def zero_of_vision(model):
    """0, with a gradient of 0 for each weight of the vision encoder.

    Data-parallel ranks sum the gradients that they have, weight by weight, so all must have the
    same ones. A row without a picture does not use the vision encoder, and one with a picture may
    leave its last layers unused; added to the result, this zero gives all of them gradients.
    """
    decoder = {id(parameter) for parameter in model.get_decoder().parameters()}
    return 0.0 * sum(parameter.sum() for parameter in model.model.parameters()
                     if id(parameter) not in decoder)


def forward_seen(model, ids, input_ids, attention_mask, **seen):
    """The output for one row, `ids` (1, T), with the pictures of its opening.

    The other arguments are the model's inputs for the opening alone; the model finds the places of
    the pictures in the ids. The attention mask is left out: a single row has no padding.
    """
    opening_length = input_ids.shape[1]
    later = ids[:, opening_length:]
    # the token of a picture, spelled out by a human, is no picture
    later = later.masked_fill(later == model.config.image_token_id, 0)
    ids = torch.cat([ids[:, :opening_length], later], 1)
    inputs = {}
    for name, values in seen.items():
        if values.shape[:2] == input_ids.shape:  # of each token, such as its kind or what it sees
            # later tokens are as the last one of the opening, which is text, too
            last = values[:, -1:].expand(-1, later.shape[1], *values.shape[2:])
            values = torch.cat([values, last], 1)
        inputs[name] = values
    return model(input_ids=ids, use_cache=False, **inputs)
