"""What travels between client, ensemble and stages: names of tensors, and the form of an answer."""

from __future__ import annotations

from dataclasses import dataclass

MODEL = "hbert"

# The ensemble's inputs and outputs.
TEXT = "TEXT"  # BYTES [1], UTF-8
TENANT = "TENANT"  # BYTES [1]
LABEL = "LABEL"  # BYTES [k]: one for a classification, one per entity for a tagging
SCORE = "SCORE"  # FP32 [k]: probability of the label; of an entity, the mean over its words
SPAN = "SPAN"  # INT32 [k, 2]: character offsets, end exclusive
TRUNCATED = "TRUNCATED"  # BOOL [1]: the text was longer than the base's maximum and was cut
LOGITS = "LOGITS"  # FP32 [1 or tokens, labels], when asked for

# Between the stages.
HIDDEN = "HIDDEN"  # FP16 [tokens, H]: merged window vectors
ARRIVED = "ARRIVED"  # INT64 [1]: when the request came, in nanoseconds of the server's monotonic clock
TOKENS = "TOKENS"  # INT32 [tokens, 3]: start and end character, number of the word; -1 for special tokens


@dataclass(frozen=True)
class LabelledSpan:
    """One answer: a class for the whole text, or one entity. Characters `start` to `end`, end exclusive."""

    label: str
    score: float
    start: int
    end: int
