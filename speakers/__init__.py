"""Speakers: whoever answers conversations, as agent or as human. `load_speaker` opens one.

speakers/interface.py says what a speaker is. Importing this package needs the standard library
alone; torch and transformers are loaded only for a speaker that runs a model in this process.
"""

from runtime.names import check_spec, is_scripted, is_server
from speakers.interface import DEFAULT_SETTINGS
from speakers.scripted import ScriptedSpeaker
from speakers.server import ServerSpeaker


def load_speaker(spec, role="agent", settings=DEFAULT_SETTINGS, pictures=False):
    """The speaker that `spec` names, for `role` ("agent" or "human"; it matters if scripted).

    spec       scripted or scripted:MANNER    the parties of the embedded worlds, without a model
               http://host:port/v1            an OpenAI-compatible server
               anything else                  a Hugging Face name or a checkpoint directory
    pictures   whether conversations hold pictures, which a vision-language model must read
    """
    check_spec(spec)
    name, _, manner = spec.partition(":")
    if name == "scripted":
        return ScriptedSpeaker(role, manner)
    if is_server(spec):
        return ServerSpeaker(spec, settings)
    if not pictures:
        from speakers.local import LocalSpeaker

        return LocalSpeaker(spec, settings)

    from speakers.vision import VisionSpeaker, sees_pictures

    if not sees_pictures(spec):
        raise SystemExit(
            f"{spec}: found a text-only model, expected a vision-language one, since the {role} of"
            " frontend tasks looks at pictures of pages; choose one such as"
            " Qwen/Qwen2-VL-7B-Instruct, or a server of one")
    return VisionSpeaker(spec, settings)


def check_speakers(args):
    """Refuse names that can mean no speaker, before any of them is opened."""
    check_spec(args.agent)
    check_spec(args.human or "scripted")


def refuse_unused(parser, args):
    """Refuse flags that do nothing for the speakers that --agent and --human name."""
    human = args.human or "scripted"
    no_effect = [  # (when, flags, reason)
        (not is_server(args.agent), ["agent_model"],
         f"because {args.agent} is not the address of a server"),
        (not is_server(human), ["human_model"], "because --human is not the address of a server"),
        (is_scripted(args.agent), ["temperature", "max_new_tokens"], "by a scripted agent"),
        (is_scripted(human), ["human_prompt", "human_temperature", "human_max_new_tokens"],
         "by a scripted human"),
    ]
    for applies, names, reason in no_effect:
        if applies:
            parser.refuse_ignored(args, names, reason)
