"""Speakers: whoever answers conversations, as agent or as human. `load_speaker` opens one.

speakers/interface.py says what a speaker is. Importing this package needs tqdm and the standard
library; torch and transformers are loaded only for a speaker that runs a model in this process.
"""

from runtime.names import check_spec, is_scripted, is_server
from speakers.interface import SpeakerSettings
from speakers.scripted import ScriptedSpeaker
from speakers.server import ServerSpeaker

DEFAULT_SETTINGS = SpeakerSettings()


def load_speaker(spec, role="agent", settings=DEFAULT_SETTINGS, pictures=False):
    """The speaker that `spec` names, for `role` ("agent", "human", or "grader" for best of N).

    spec       scripted or scripted:MANNER    the parties of the embedded worlds, without a model
               http://host:port/v1            an OpenAI-compatible server
               anything else                  a Hugging Face name or a checkpoint directory
    pictures   whether conversations hold pictures, which a vision-language model must read
    """
    check_spec(spec)
    if is_scripted(spec):
        _, _, manner = spec.partition(":")
        return ScriptedSpeaker(role, manner)
    if is_server(spec):
        return ServerSpeaker(spec, settings, role=role)
    if not pictures:
        from speakers.local import LocalSpeaker

        return LocalSpeaker(spec, settings)

    from runtime.models import sees_pictures
    from speakers.vision import VisionSpeaker

    if not sees_pictures(spec):
        raise SystemExit(
            f"{spec}: found a text-only model, expected a vision-language one, since the {role} of"
            " frontend tasks looks at pictures of pages; choose one such as"
            " Qwen/Qwen2-VL-7B-Instruct, or a server of one")
    return VisionSpeaker(spec, settings)
