r"""What the base policies of the embedded worlds are made of: runs/make_toy_base.sh.

    python toy/make_base.py model EPISODES.jsonl... --output DIR
    python toy/make_base.py inform EPISODES.jsonl --output INFORMED.jsonl
    python toy/make_base.py recite EPISODES.jsonl --output RECITED.jsonl

`model` writes a checkpoint of random weights, with a tokenizer of the words in the episodes.
`inform` puts the solution in front of each episode's request, as the critic reads it. From such
dialogues variants/sft.py teaches a tiny model to read a solution in its context, as a pretrained
one can from the start. `recite` teaches the same in another way: the roles are swapped, and the
model says what the solution in front holds when it is asked, as the human does. So it never sees
which questions a solution makes worth asking.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from formats.read import load_episodes, read_episodes
from runtime.files import write_new

# -----------------------------------------------------------------------------
# The model


def toy_model(tokenizer):
    """A Llama of 0.6 to 0.8 million random parameters for the toy's tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=0,
        pad_token_id=0,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


# -----------------------------------------------------------------------------
# The tokenizer

# The answer's marker, a line of code and a tag are one token each, so that an answer has about as
# many tokens as a question.
TOKEN_PATTERN = "|".join([
    r" ?I WANT TO ANSWER:",
    r"\n(?:def |    )[^\n]+",
    r"\s?<[^>]*>",
    r"\n *\S+",
    r" ?[^\s?.:]+",
    r"[?.:]",
    r"\s+",
])
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'system' %}"
    "{{ '<once>' if 'you send one message' in m['content'] | lower else '' }}"
    "{% else %}"
    "{{ '<agent>' if m['role'] == 'assistant' else '<human>' }}{{ m['content'] }}<end>"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<agent>{% endif %}"
)


def toy_tokenizer(episodes):
    """A tokenizer with the words of the episodes' solutions and messages.

    Of the system message, its chat template keeps only whether the agent may send one message.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(TOKEN_PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2304,
        special_tokens=["<end>", "<human>", "<agent>", "<once>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts_to_read(episodes), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>"
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def texts_to_read(episodes):
    """Every text that a model of these episodes reads: the notes on solutions, the messages."""
    from train_critic import SOLUTION_NOTE  # late: toy/ stands below the scripts

    for episode in episodes:
        yield SOLUTION_NOTE.format(solution=episode["task"]["ground_truth"])
        for message in episode["dialogue_history"]:
            yield message.get("output") or message["content"]


# -----------------------------------------------------------------------------
# Commands


def model_command(args):
    """Write a model of random weights and its tokenizer."""
    transformers.logging.disable_progress_bar()
    episodes, _ = load_episodes(args.episodes)
    tokenizer = toy_tokenizer(episodes)
    model = toy_model(tokenizer)
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    print(f"{args.output}: {model.num_parameters():,} random weights, {len(tokenizer):,} tokens")


def inform_command(args):
    """Write the episodes with the solution in front of the request."""
    from train_critic import critic_messages  # late, as above

    informed = []
    for episode in read_episodes(args.episodes):
        history = critic_messages(episode["task"], episode["dialogue_history"])
        informed.append(episode | {"dialogue_history": history})
    write_new(args.output, informed)
    print(f"{args.output}: {len(informed)} episodes, each with its solution in front")


def recite_command(args):
    """Write the episodes' questions and replies as dialogues of one who recites the solution."""
    from train_critic import critic_messages  # late, as above

    recited = []
    for episode in read_episodes(args.episodes):
        request, *turns = episode["dialogue_history"]
        if len(turns) < 2:  # it answered at once
            continue
        first, *turns = turns[:-1]  # without the answer
        history = [{"role": "user", "content": f"{request['content']}\n{first['content']}"}]
        swapped = {"user": "assistant", "assistant": "user"}
        for message in turns:
            history.append({"role": swapped[message["role"]], "content": message["content"]})
        history = critic_messages(episode["task"], history)
        recited.append(episode | {"dialogue_history": history})
    write_new(args.output, recited)
    print(f"{args.output}: {len(recited)} dialogues that recite the solution in front")


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    model = commands.add_parser("model", help="a tiny model of random weights, and its tokenizer")
    model.add_argument("episodes", nargs="+", help="episodes whose words the tokenizer knows")
    model.add_argument("--output", required=True, help="checkpoint directory to write")
    model.set_defaults(command=model_command)
    inform = commands.add_parser("inform", help="episodes that show their solution first")
    inform.set_defaults(command=inform_command)
    recite = commands.add_parser("recite", help="dialogues that say what a solution holds")
    recite.set_defaults(command=recite_command)
    for command in (inform, recite):
        command.add_argument("episodes", help="file of episodes")
        command.add_argument("--output", required=True, help="FILE.jsonl to write")
    args = parser.parse_args(argv)
    args.command(args)


if __name__ == "__main__":
    main()
