"""The reward of a web page: how similar its screenshot is to that of the solution's page.

    grade_page(task, answer, draw, clip) -> Grade(reward, None, reasons)

The page is cut out of the answer by the official rule (`extract_html`), both pages are drawn by
judge/browser.py, and the screenshots are compared: by the cosine of their CLIP embeddings, which is
the paper's reward (`ClipReward`), or without a model (`embedded_similarity`).
"""

import functools
import io
import re
import threading

from judge.browser import Browser, PageError
from judge.sandbox import SOLUTION_FAILED, Grade

PAPERS_CLIP = "openai/clip-vit-base-patch32"

# -----------------------------------------------------------------------------
# Pages in texts


def official_addresses(text):
    """The text with random pictures replaced by picsum's picture 48, as in the published tasks."""
    picture = r"https://picsum.photos/id/48/\1/\2"
    text = re.sub(r"https://source\.unsplash\.com/random/(\d+)x(\d+)/\?[\w=]+", picture, text)
    return re.sub(r"https://picsum\.photos/(\d+)/(\d+)", picture, text)


def extract_html(text):
    """The official rule: a message's first <html> block, else its first <body> block, else ""."""
    text = official_addresses(text or "")
    return first_block(text, "html") or first_block(text, "body")


def first_block(text, tag):
    """The first match of `<tag.*?>.*?</tag>`, "" if there is none.

    A regular expression would take cubic time where a model repeats an opening tag to its limit.
    """
    start = text.find(f"<{tag}")
    opened = text.find(">", start + len(tag) + 1)
    end = text.find(f"</{tag}>", opened)
    if -1 in (start, opened, end):
        return ""
    return text[start:end + len(f"</{tag}>")]


def replace_page(text, words):
    """The message with `words` in the place of its page."""
    text = official_addresses(text)  # as extract_html does, so the page is a part of this text
    page = extract_html(text)
    return text.replace(page, words) if page else text


def last_page(history):
    """The last page that the agent showed, or the empty string."""
    for entry in reversed(history):
        if entry["role"] == "assistant":
            page = extract_html(entry["content"])
            if page:
                return page
    return ""


def graded_page(answer, history):
    """The page that counts: the answer's, or the last one shown if the answer holds none."""
    return extract_html(answer) or last_page(history)


def solution_page(solution):
    """A task's solution as it is drawn: cut out as answers are, so that an equal one has reward 1.

    A solution without <html> and <body> is drawn whole.
    """
    return extract_html(solution) or official_addresses(solution)


# -----------------------------------------------------------------------------
# The reward


def grade_page(task, answer, draw, clip=None):
    """A Grade: the answer's page against the solution's. Without a page the reward is 0.

    `draw(page)` gives PNG bytes or raises PageError, as Browser.render does. With clip=None the
    embedded similarity is used. Success is None: pages have no tests to pass.
    """
    page = extract_html(answer)
    if not page:
        return Grade(0.0, None, {"page": "no page in the answer"})
    try:
        picture = draw(page)
    except PageError as error:
        return Grade(0.0, None, {"page": str(error)})
    try:
        solution = draw(solution_page(task["ground_truth"]))
    except PageError as error:
        return Grade(0.0, None, {"page": SOLUTION_FAILED, "solution": str(error)})
    similarity = clip.similarity if clip else embedded_similarity
    return Grade(similarity(picture, solution), None, {"page": "rendered"})


class PageJudge:
    """Draws pages in one browser, a page at a time, and grades answers; threads may share it."""

    def __init__(self, clip=None):
        """`clip`: a CLIP model; None: the paper's; "none": the embedded similarity instead."""
        self.browser = Browser()
        self.clip = None if clip == "none" else ClipReward(clip or PAPERS_CLIP)
        self.lock = threading.Lock()
        self.closed = False
        # every turn of a dialogue shows the human the same solution page
        self.draw = functools.lru_cache(256)(self._render)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed = True  # after a Ctrl-C, many threads may still wait for pages
        with self.lock:
            self.browser.close()

    def _render(self, page):
        if self.closed:  # the browser would start again
            raise SystemExit("found a page to draw after the judge was closed")
        return self.browser.render(page)

    def grade(self, task, answer):
        with self.lock:
            return grade_page(task, answer, self.draw, self.clip)

    def picture(self, page):
        """The PNG of a page, None where it cannot be drawn."""
        with self.lock:
            try:
                return self.draw(page)
            except PageError:
                return None


def open_picture(png):
    """The PIL image of PNG bytes."""
    from PIL import Image

    return Image.open(io.BytesIO(png)).convert("RGB")


class ClipReward:
    """Cosine of CLIP image embeddings: the paper's frontend reward.

    Of a tall page, only the middle square is compared: CLIP's processor crops so, also in the
    official code.
    """

    def __init__(self, name):
        # CLIPImageProcessor, the other one, needs torchvision and scales a little differently.
        import torch
        from transformers import CLIPImageProcessorPil, CLIPModel

        device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            model, report = CLIPModel.from_pretrained(name, output_loading_info=True)
            self.processor = CLIPImageProcessorPil.from_pretrained(name)
        except (OSError, ValueError, RuntimeError) as error:
            raise SystemExit(
                f"found no CLIP model {name} ({error}), expected its name or directory; download "
                "it on a machine with network, or pass --clip none for the embedded similarity"
            ) from error
        if report["missing_keys"]:  # they would be random
            first = sorted(report["missing_keys"])[0]
            raise SystemExit(f"{name}: found no weights {first}, expected all of a CLIP model;"
                             " choose another --clip")
        self.model = model.to(device).eval()
        # all answers to a task are compared with the same solution
        self.embed_solution = functools.lru_cache(256)(self._embed)

    def similarity(self, picture, solution):
        """Cosine in [0, 1] of a screenshot with its solution's."""
        return (self._embed(picture) * self.embed_solution(solution)).sum().clamp(0, 1).item()

    def _embed(self, png):
        """The embedding of a screenshot, of length 1."""
        import torch

        pixels = self.processor(images=[open_picture(png)], return_tensors="pt")["pixel_values"]
        with torch.inference_mode():
            outputs = self.model.vision_model(pixel_values=pixels.to(self.model.device))
            projected = self.model.visual_projection(outputs.pooler_output)[0]  # (dimension,)
            return torch.nn.functional.normalize(projected.float(), dim=0)


def embedded_similarity(png_a, png_b):
    """Similarity in [0, 1] of two screenshots without a model.

    It is the mean of three agreements. Layout compares mean colours cell by cell, so a block of the
    wrong colour or in the wrong position counts by its area. Detail compares contrast, which is
    where text and edges are, so a blank page in the right colour is not half right. Colour compares
    histograms, which forgives a block that only moved. For layout and detail, the part that only
    the longer page has counts as disagreement.
    """
    import numpy

    mean_a, contrast_a, colours_a = page_features(png_a)
    mean_b, contrast_b, colours_b = page_features(png_b)
    shared = min(len(mean_a), len(mean_b))  # rows of cells that both pages have
    rows = max(len(mean_a), len(mean_b))

    difference = numpy.abs(mean_a[:shared] - mean_b[:shared]).max(axis=2)
    layout = numpy.clip(1 - 2 * difference, 0, 1).mean() * shared / rows

    common = numpy.minimum(contrast_a[:shared], contrast_b[:shared]).sum()
    either = contrast_a.sum() + contrast_b.sum() - common
    detail = common / either if either > 1e-6 else 1.0

    colour = numpy.minimum(colours_a, colours_b).sum()
    return float(min(1.0, (layout + detail + colour) / 3))


def page_features(png):
    """Mean colour and contrast of each cell, (rows, 64, 3), and the share of each of 64 colours.

    A cell is a square of 20 pixels. The page is first scaled to a quarter: 5 pixels a cell.
    """
    import numpy
    from PIL import Image

    picture = open_picture(png)
    rows = max(1, round(picture.height / 20))
    picture = picture.resize((64 * 5, rows * 5), Image.Resampling.BOX)
    pixels = numpy.asarray(picture)  # (rows * 5, 64 * 5, 3)
    cells = pixels.reshape(rows, 5, 64, 5, 3).astype(numpy.float32) / 255
    levels = pixels // 64  # four levels of each of red, green and blue
    colours = levels[..., 0] * 16 + levels[..., 1] * 4 + levels[..., 2]
    shares = numpy.bincount(colours.ravel(), minlength=64) / colours.size
    return cells.mean(axis=(1, 3)), cells.std(axis=(1, 3)), shares
