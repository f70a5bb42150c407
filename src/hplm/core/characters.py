"""Characters that people and programs see differently: characters without a picture, and texts that look alike."""

from __future__ import annotations

import re
import unicodedata

# Format characters and fillers. The tags of flags (U+E0020 to U+E007F) are left out: without its tags a flag is another one.
_FORMAT = (
    "\u00ad\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufeff\uffa0"
    "\ufff9-\ufffb"
)
# Marks that only select how the character before them is drawn.
_SELECTORS = "\u034f\ufe00-\ufe0f\U000e0100-\U000e01ef"
_UNSEEN = re.compile(f"[{_FORMAT}{_SELECTORS}]")
_ENDS = re.compile(rf"\A[\s{_FORMAT}]+|[\s{_FORMAT}]+\Z")


def trimmed(text: str) -> str:
    """Return `text` without white space and format characters at its ends."""
    return _ENDS.sub("", text)


def shown(text: str) -> str:
    r"""Return `text` for a message: `\u200b` for U+200B, and likewise for all that cannot be seen, except tabs and newlines."""
    if text.isprintable() and _UNSEEN.search(text) is None:
        return text
    return "".join(character if _is_seen(character) else f"\\u{ord(character):04x}" for character in text)


def _is_seen(character: str) -> bool:
    return character in "\t\n" or (character.isprintable() and _UNSEEN.match(character) is None)


def without_unseen(text: str) -> str:
    """Return what a person sees of a text: without format characters, each space a plain one, letters composed."""
    return unicodedata.normalize("NFC", re.sub(r"\s", " ", _UNSEEN.sub("", text))).strip()


def alike(text: str) -> str:
    """Return a key that is equal for texts that a person takes for the same: in any case, width and composition."""
    seen = without_unseen(text)
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", seen).casefold()).strip()
