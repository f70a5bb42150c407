"""What travels between client, ensemble and stages: names of tensors, and the form of an answer."""

from __future__ import annotations

from dataclasses import dataclass

MODEL = "hbert"

# The ensemble's inputs and outputs, of each text of a request; `hplm.serving.multi_text` has how several go in one tensor.
TEXT = "TEXT"  # BYTES [1], UTF-8; [2] of a tenant that was trained on pairs
TENANT = "TENANT"  # BYTES [1]
LABEL = "LABEL"  # BYTES [k]: one for a classification, one per entity for a tagging, "score" for a regression
SCORE = "SCORE"  # FP32 [k]: probability of the label; of an entity, mean over its words; of a regression, its value
SPAN = "SPAN"  # INT32 [k, 2]: character offsets, end exclusive; a pair's count on over the second text, see `hplm.core.text`
TRUNCATED = "TRUNCATED"  # BOOL [1]: the text was longer than the base's maximum and was cut
LOGITS = "LOGITS"  # FP32 [1 or tokens, labels], when asked for
# Fills the logits of several texts up to the largest. It is the least float32, which no head computes: JSON has it, unlike
# NaN, and a softmax gives it 0.
LOGITS_FILLER = -(2.0 - 2.0**-23) * 2.0**127

# The one label of a regression.
REGRESSION_LABEL = "score"

# Between the stages.
HIDDEN = "HIDDEN"  # FP16 [tokens, H]: merged window vectors
TOKENS = "TOKENS"  # INT32 [tokens, 3]: start and end character, number of the word; -1 for special tokens
# INT64 [3]: how many tokens the text has; which version of the tenant the first stage has found, so that the second takes the
# same; when the request came, in nanoseconds of the server's monotonic clock. The last two are negative where not known.
REQUEST_META = "REQUEST_META"

# Triton's own words where too much waits before a stage, and where a request has waited there for its `timeout`: over gRPC
# UNAVAILABLE, both of them.
TRITON_FULL = "Exceeds maximum queue size"
TRITON_EXPIRED = "Request timeout expired"

# Manage requests: JSON objects as BYTES [1].
MANAGER = "manager"  # one answer
MANAGER_WATCH = "manager_watch"  # an event for every change of a job, over gRPC streaming only
REQUEST = "REQUEST"
RESPONSE = "RESPONSE"
JOB_UNFINISHED = ("queued", "running")  # states of a job that others follow
# Of files that jobs read; what is sent has one of either.
DATA_ENDINGS = (".jsonl", ".csv", ".tsv", ".conll")
CORPUS_ENDINGS = (".txt", ".jsonl", ".txt.gz", ".jsonl.gz")
UPLOAD_ENDINGS = tuple(dict.fromkeys((*DATA_ENDINGS, *CORPUS_ENDINGS)))


@dataclass(frozen=True)
class LabelledSpan:
    """One answer: a class for the whole text, one entity, or a regression's value. Characters `start` to `end`, exclusive."""

    label: str
    score: float
    start: int
    end: int
