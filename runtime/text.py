"""Words for messages."""


def counted(count, thing):
    """Such as "1 turn" or "2,000 turns"."""
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def harmless(text):
    """The text with whatever could steer a terminal spelled out, such as escape sequences."""
    text = text.replace("\r\n", "\n").expandtabs(4)
    return "".join(character if character.isprintable() or character == "\n"
                   else character.encode("unicode_escape").decode() for character in text)
