r"""Rules for the names of streams, consumers and nodes (JetStream's, plus a printable-only rule).

A name is 1 to 255 bytes of UTF-8, printable, and free of white space and of ``. * > / \``: those
characters separate or match subject tokens and path segments.
"""

from typing import Final

NAME_BYTES_MAX: Final = 255
PATH_SEPARATORS: Final = frozenset("/\\")
_FORBIDDEN: Final = PATH_SEPARATORS | frozenset(".*>")


def name_problem(name: str) -> str | None:
    """Return why ``name`` is not a valid stream or consumer name, or None if it is one."""
    if not name:
        return "a name must not be empty"
    if len(name) > NAME_BYTES_MAX:  # do not look at every character of a longer one
        return f"a name must not be longer than {NAME_BYTES_MAX} bytes"
    # This check comes before `encode`: lone surrogates are not printable, and it would raise.
    if not name.isprintable() or any(char.isspace() for char in name):
        return "a name must not contain white space or control characters"
    if len(name.encode()) > NAME_BYTES_MAX:
        return f"a name must not be longer than {NAME_BYTES_MAX} bytes"
    bad = _FORBIDDEN.intersection(name)
    if bad:
        return f"a name must not contain {' '.join(sorted(bad))}"
    return None
