"""Chat templates: messages as text, text as token ids, the token that closes an agent turn."""

import functools
import os

DATE = "26 Jul 2024"


class UnnestedTemplate(SystemExit):
    """The chat template cannot express a dialogue as one sequence of tokens with closed turns."""


class RefusedDialogue(SystemExit):
    """The chat template raises an error for these messages."""


@functools.lru_cache(maxsize=8)
def end_of_turn(tokenizer):
    """(id, text) of the token that closes an agent turn, the first one that follows its text."""
    template = getattr(tokenizer, "chat_template", None)
    if not template or (isinstance(template, dict) and "default" not in template):
        raise SystemExit(f"{tokenizer.name_or_path}: found a tokenizer without chat template,"
                         " expected an instruct model")
    dialogue = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"},
                {"role": "user", "content": "z"}]
    opening = render(tokenizer, dialogue[:1])
    whole = render(tokenizer, dialogue, add_generation_prompt=False)
    if not whole.startswith(opening + "y"):
        raise UnnestedTemplate(
            f"{tokenizer.name_or_path}: the chat template does not nest (an agent turn does not"
            " begin with the generation prompt), so turns cannot be told apart; expected a template"
            " like Llama's")
    closing = whole[len(opening) + 1:]
    if not closing or closing.startswith("z"):
        raise UnnestedTemplate(
            f"{tokenizer.name_or_path}: the chat template closes no agent turn, so a model cannot"
            " tell when to stop; expected a template like Llama's")
    token = tokenizer.encode(closing, add_special_tokens=False)[0]
    text = tokenizer.decode([token])
    if token not in tokenizer.added_tokens_decoder:
        raise UnnestedTemplate(
            f"{tokenizer.name_or_path}: the chat template closes an agent turn with the ordinary"
            f" text {text!r}, which a turn may hold itself; expected a token of its own, as"
            " Llama's template has")
    return token, text


def render(tokenizer, messages, add_generation_prompt=True):
    """The text that the chat template makes of messages.

    If the template has no system role, the system message opens the first request.
    """
    import jinja2

    opens_with_system = messages[0]["role"] == "system" and len(messages) > 1
    if opens_with_system and leaves_out_opening_system(tokenizer):
        return render(tokenizer, without_system(messages), add_generation_prompt)
    others = messages[1:] if opens_with_system else messages
    roles = {message["role"] for message in others if message["content"]}
    for role in roles - {"user", "assistant"}:
        if leaves_out(tokenizer, role):
            raise SystemExit(
                f"{tokenizer.name_or_path}: found a chat template that leaves out what messages of"
                f" the role {role!r} say, expected one that writes it; give a model with such a"
                " template, or give these messages the role 'user'")
    try:
        return applied(tokenizer, messages, add_generation_prompt)
    except jinja2.TemplateError as error:
        if opens_with_system:
            return render(tokenizer, without_system(messages), add_generation_prompt)
        roles = ", ".join(message["role"] for message in messages)
        raise RefusedDialogue(
            f"the chat template of {tokenizer.name_or_path} refuses the dialogue that begins"
            f" with {str(messages[0]['content'])[:80]!r}, of the roles {roles} ({error});"
            " expected roles that it takes; give a model with such a template, or leave these"
            " messages out") from None


def applied(tokenizer, messages, add_generation_prompt=True):
    """What the template makes of messages, always with the date DATE.

    Some templates print today's date, so prompts would change daily. Llama 3.2's takes the date as
    an option; others call a function, which is replaced here.
    """
    options = {"tokenize": False, "add_generation_prompt": add_generation_prompt,
               "date_string": DATE}
    template = tokenizer.get_chat_template()  # of several, the one named "default"
    if "strftime_now" in template:
        options["chat_template"] = (
            "{%- macro strftime_now(format) %}" + DATE + "{% endmacro -%}" + template)
    return tokenizer.apply_chat_template(messages, **options)


DIALOGUE = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]


@functools.lru_cache(maxsize=8)
def leaves_out_opening_system(tokenizer):
    """Whether the chat template silently writes nothing of a system message that comes first."""
    if "system" in str(tokenizer.chat_template):
        return False  # it knows the role, and what to omit of it (toy/base's)
    return gives_the_same(tokenizer, [{"role": "system", "content": "z"}, *DIALOGUE], DIALOGUE)


@functools.lru_cache(maxsize=64)
def leaves_out(tokenizer, role):
    """Whether the chat template silently writes nothing of this role's later messages.

    Some templates write a system message only if it opens the dialogue.
    """
    # with one text or another, since any message may change how the turn before it is written
    one, other = ([*DIALOGUE, {"role": role, "content": text}] for text in ("z", "other"))
    return gives_the_same(tokenizer, one, other)


def gives_the_same(tokenizer, messages, others):
    """Whether the template makes the same text of both; False if it refuses one of them."""
    import jinja2

    try:
        return applied(tokenizer, messages) == applied(tokenizer, others)
    except jinja2.TemplateError:
        return False


def without_system(messages):
    """The messages with the system message at the head of the first request."""
    system, content = messages[0]["content"] + "\n\n", messages[1]["content"]
    if isinstance(content, str):
        content = system + content
    else:
        content = [{"type": "text", "text": system}, *content]
    return [{"role": "user", "content": content}, *messages[2:]]


def prompt_ids(tokenizer, texts):
    """Token ids of texts that a template has made."""
    return [shared(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


OBJECTS = {}  # id -> its one int object


def shared(ids):
    """The ids, each as its one object: a trainer holds all rows, and an object for each token, as
    tokenizers return them, would take 32 bytes more.
    """
    return [OBJECTS.setdefault(token, token) for token in ids]


def template_ids(tokenizer, earlier, later, after_turn):
    """Token ids of what a dialogue's text has gained: from `earlier` to `later`, as a template made
    both.

    After a finished turn, it is encoded with the end-of-turn token in front, which is cut off
    again: some tokenizers put a space before a text that stands alone, and some end-of-turn tokens
    (Phi-3's) absorb the newline after them.
    """
    if not later.startswith(earlier):
        kept = os.path.commonprefix([later, earlier])
        raise UnnestedTemplate(
            f"{tokenizer.name_or_path}: the chat template does not nest (it changes earlier turns"
            f" when later ones come, here from {earlier[len(kept):][:60]!r} on), so a dialogue is"
            " not one sequence; expected a template that keeps them, like Llama's; take another"
            " model, or edit its template")
    text = later[len(earlier):]
    if not after_turn:
        return prompt_ids(tokenizer, [text])[0]
    end_id, end_text = end_of_turn(tokenizer)
    [ids] = prompt_ids(tokenizer, [end_text + text])
    return ids[ids.index(end_id) + 1:]


def turn_ids(tokenizer, texts, finished):
    """Token ids of agent turns, as a model samples them after the prompt.

    A finished turn ends with its end-of-turn token. A text that spells a special token, such as
    </s> on a page, is encoded as ordinary text.
    """
    end_id, _ = end_of_turn(tokenizer)
    marks = [mark_before(tokenizer, text[:1].isspace()) for text in texts]
    encoded = tokenizer([mark + text for (mark, _), text in zip(marks, texts, strict=True)],
                        add_special_tokens=False, split_special_tokens=True)["input_ids"]
    turns = [ids[len(mark_ids):] for ids, (_, mark_ids) in zip(encoded, marks, strict=True)]
    return [shared(ids + [end_id] if done else ids)
            for ids, done in zip(turns, finished, strict=True)]


def short_prompt(tokenizer):
    """The text of a prompt, to see how prompts end."""
    try:
        return render(tokenizer, [{"role": "user", "content": "x"}])
    except RefusedDialogue:  # some templates take parts of messages alone (LLaVA-NeXT's)
        return render(tokenizer, [{"role": "user", "content": [{"type": "text", "text": "x"}]}])


@functools.lru_cache(maxsize=16)
def mark_before(tokenizer, before_space=False):
    """(text, its token ids) to put before a turn, and to cut off again.

    Some tokenizers (Llama 2's) set a space before every text, which is not there after a prompt
    that ends in ordinary text. A turn that begins with white space gets a letter as its mark, since
    two line ends may be one token.
    """
    prompt = short_prompt(tokenizer)
    before, word, both = prompt_ids(tokenizer, [prompt, "x", prompt + "x"])
    if both == before + word:
        return "", []
    mark, other = ("x", "\n") if before_space else ("\n", "x")
    line, word, both = prompt_ids(tokenizer, [mark, other, mark + other])
    if both != line + word and both[:len(line)] == line:
        return mark, line
    return "", []
