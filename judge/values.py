"""How values are compared: each is written as a text, and equal values have equal texts.

The child calls `describe`, which gives the digest of the text. The parent calls `reason_of`, which
compares the digests of solution and answer. What "equal" means is Python's `==`, as far as
`Canonical` knows the type.
"""

import builtins
from collections import deque
from hashlib import blake2b
from json.encoder import encode_basestring

# A value that costs more than this, or is deeper, is not comparable.
MAX_VALUE_CHARACTERS, MAX_VALUE_DEPTH = 4_000_000, 60
NODE_COST = 12
ENCLOSED = {
    list: "[]",
    tuple: "()",
    deque: "||",
    set: "{}",
    frozenset: "{}",
    type({}.keys()): "{}",
    type({}.items()): "{}",
}
# Library types that equal each other when they print alike
NAMED_VALUES = {
    "uuid.UUID",
    "pathlib.PurePath",
    "pathlib._local.PurePath",
    "ipaddress._BaseAddress",
    "ipaddress._BaseNetwork",
}
# These dicts equal any dict of the same items. But two OrderedDicts must have the same order, too,
# and in two Counters a count of 0 is the same as none. Values that have such dicts in some places
# and plain ones in others may be called unequal where Python calls them equal, never the reverse
OWN_EQUALITY = {"collections.OrderedDict": "o", "collections.Counter": "c"}
BUILTIN_TYPES = {kind for kind in vars(builtins).values() if type(kind) is type} | {type(None)}


class Incomparable(Exception):
    """The value equals nothing: NaN, a function, a plain object, something too large to write."""


def describe(value, official: bool = False) -> str:
    """What the child reports of a value: "=digest" or "incomparable".

    Where the value holds an OrderedDict or a Counter, another digest follows for each, such as
    "=digest,cdigest": see OWN_EQUALITY.
    """
    try:
        writer = Canonical(official)
        digests = ["=" + digest_of(writer.text(value))]
        for kind in sorted(writer.seen):
            digests.append(kind + digest_of(Canonical(official, kind).text(value)))
        return ",".join(digests)
    except BaseException:  # the answer's own classes may raise anything while they are read
        return "incomparable"


def digest_of(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class Canonical:
    """Writes a value as text, so that values of known types are equal when their texts are.

    Subclasses of built-in types are reduced to their base value by methods of the base, such as
    `int.__index__`, so that no method of the answer decides; those of library types speak for
    themselves.
    """

    def __init__(self, official: bool, own: str = ""):
        self.official = official
        self.own = own  # the kind of OWN_EQUALITY that is written by the rules of its own ==
        self.seen: set[str] = set()  # the kinds of OWN_EQUALITY in the value
        self.left = MAX_VALUE_CHARACTERS

    def text(self, value, depth: int = 0) -> str:
        if depth > MAX_VALUE_DEPTH or self.left < 0:
            raise Incomparable
        written = self.scalar(value)
        self.left -= NODE_COST + len(written)
        return written or self.container(value, depth + 1) or self.library(value, depth + 1)

    def scalar(self, value) -> str:
        """The text of a scalar, "" for other values."""
        if value is None or value is Ellipsis:
            return repr(value)
        if isinstance(value, str):
            return encode_basestring(value)
        if isinstance(value, int):
            # Hexadecimal, as decimal digits are limited in number and take quadratic time.
            return format(int.__index__(value), "x")
        if isinstance(value, float):
            return self.ratio(float.__float__(value))
        if isinstance(value, complex):
            real, imaginary = map(self.ratio, complex.__getnewargs__(value))
            return real if imaginary == "0" else f"{real}+{imaginary}j"
        if isinstance(value, (bytes, bytearray)):
            base = bytes if isinstance(value, bytes) else bytearray
            return "bytes " + base.hex(value)  # hexadecimal alone is an int
        if type(value) is type and value in BUILTIN_TYPES:
            return f"type {value.__name__}"
        return ""

    def ratio(self, number) -> str:
        """The exact rational value: 1, 1.0, True, Decimal(1) and Fraction(1) are one number."""
        if number != number:
            raise Incomparable
        if number in (float("inf"), float("-inf")):
            return "inf" if number > 0 else "-inf"
        top, bottom = number.as_integer_ratio()
        return f"{top:x}" if bottom == 1 else f"{top:x}/{bottom:x}"

    def container(self, value, depth: int) -> str:
        """The text of a built-in container, "" for other values."""
        if isinstance(value, dict):
            return self.dictionary(value, depth)
        for base, (opening, closing) in ENCLOSED.items():
            if isinstance(value, base):
                if base.__len__(value) * NODE_COST > self.left:
                    raise Incomparable
                parts = [self.text(item, depth) for item in base.__iter__(value)]
                if opening == "{":
                    parts.sort()
                return opening + ",".join(parts) + closing
        if isinstance(value, range):
            short = value[:1] == value  # empty or one number, whatever its step
            ends = value if short else (value[0], value[-1], value.step)
            return f"range{[format(end, 'x') for end in ends]}"
        return ""

    def dictionary(self, value, depth: int) -> str:
        names = {f"{base.__module__}.{base.__name__}" for base in type(value).__mro__}
        kinds = {kind for name, kind in OWN_EQUALITY.items() if name in names}
        self.seen |= kinds
        own = self.own if self.own in kinds else ""
        pairs = [(self.text(key, depth), self.text(item, depth))
                 for key, item in dict.items(value)]
        if own == "c":
            pairs = [(key, item) for key, item in pairs if item != "0"]
        if own != "o":
            pairs.sort()
        return f"<{own}{','.join(f'{key}:{item}' for key, item in pairs)}>"

    def library(self, value, depth: int) -> str:
        """The text of a value of a known library type, a dataclass or an enum.

        Types are known by name, so that no library is imported for them.
        """
        kind = type(value)
        names = {f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__}
        if "decimal.Decimal" in names and value.is_finite() and abs(value.adjusted()) > 5000:
            return f"decimal{value.normalize()}"
        if names & {"decimal.Decimal", "fractions.Fraction"}:
            return self.ratio(value)
        if names & {"datetime.datetime", "datetime.time"}:
            offset = value.utcoffset()
            if offset is not None and "datetime.datetime" in names:
                value, offset = value - offset, "UTC"
            return f"time {value.replace(tzinfo=None).isoformat()} {offset}"
        if "datetime.date" in names:
            return f"date {value.isoformat()}"
        if "datetime.timedelta" in names:
            return f"delta {value.days} {value.seconds} {value.microseconds}"
        if "datetime.timezone" in names:
            return f"zone {value.utcoffset(None)}"
        if "numpy.ndarray" in names and value.shape:
            if self.official and value.size != 1:
                raise Incomparable  # `if expected == array` raises in the published grader
            if self.official:
                return self.text(value.ravel().tolist()[0], depth)
            return f"array{value.shape}{self.text(value.ravel().tolist(), depth)}"
        if names & {"numpy.ndarray", "numpy.generic"} and type(value.item()) is not kind:
            return self.text(value.item(), depth)
        if names & NAMED_VALUES:
            return f"{kind.__name__}{encode_basestring(str(value))}"
        if self.official:
            raise Incomparable  # the published grader meets two different classes of the same name
        if "enum.Enum" in names:
            return f"{kind.__name__}.{value._name_ or self.text(value._value_, depth)}"
        if hasattr(kind, "__dataclass_fields__"):
            fields = [entry.name for entry in kind.__dataclass_fields__.values()
                      if entry.compare and hasattr(value, entry.name)]  # InitVars are no attributes
            texts = [f"{name}={self.text(getattr(value, name), depth)}" for name in fields]
            return f"{kind.__name__}({','.join(texts)})"
        raise Incomparable


NOTHING = describe(None)  # a solution that returns None has failed


def is_value(outcome: str) -> bool:
    """Whether a test gave a value, as opposed to an error or something incomparable."""
    return outcome.startswith("=")


def reason_of(expected: str, outcome: str) -> str:
    """The reason of one test: "passed", "wrong", or why there is no value."""
    if outcome == "incomparable":
        return "wrong"
    if not is_value(outcome):
        return outcome
    # "=", for a dict's equality, or a kind of OWN_EQUALITY -> digest
    ours, theirs = ({digest[0]: digest[1:] for digest in described.split(",")}
                    for described in (expected, outcome))
    shared = ours.keys() & theirs.keys()
    equal = any(ours[kind] == theirs[kind] for kind in shared & {"=", "c"})
    in_order = all(ours[kind] == theirs[kind] for kind in shared & {"o"})
    return "passed" if equal and in_order else "wrong"
