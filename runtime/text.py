"""Words for messages."""

import unicodedata


def counted(count, thing):
    """Such as "1 turn" or "2,000 turns"."""
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def harmless(text):
    """The text with whatever could steer a terminal spelled out, such as escape sequences."""
    text = text.replace("\r\n", "\n").expandtabs(4)
    return "".join(character if is_harmless(character)
                   else character.encode("unicode_escape").decode() for character in text)


def is_harmless(character):
    # Python calls all spaces but one unprintable, such as those of Chinese and French texts
    return character.isprintable() or character == "\n" or unicodedata.category(character) == "Zs"


def with_interval(number, factor, unit="", sign="", digits=1):
    """Such as "56.8 % [53.7, 59.9]"; a dash where there is nothing to count, or no interval."""
    if number is None:
        return "–"
    value, low, high = [None if number[end] is None else f"{factor * number[end]:{sign}.{digits}f}"
                        for end in ("value", "low", "high")]
    return f"{value}{unit} [–]" if low is None else f"{value}{unit} [{low}, {high}]"


def markdown(rows):
    """A table that reads well on a terminal, too."""
    rows = [[text.replace("|", "\\|") for text in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    lines = []
    for row in rows:
        padded = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        lines.append("| " + " | ".join(padded) + " |")
    return "\n".join(lines)
