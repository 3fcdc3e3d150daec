"""Seeds that depend on what is drawn, and on nothing else."""

import hashlib


def derive_seed(*parts):
    """A 63-bit seed from `parts` alone: world size, batches and PYTHONHASHSEED do not matter."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1
