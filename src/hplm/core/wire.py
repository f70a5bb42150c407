"""The wire format between client, ensemble and stages: names of models and tensors, and the form of an answer."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hplm.core import roles

MODEL = roles.DEFAULT_NAME  # the model of the first base
ROUTER = roles.ROUTE_NAME  # takes and gives the same tensors, for the tenants of every base
CASCADE = roles.CASCADE_NAME  # does as ROUTER, and answers tenants with a plan by several levels

# The ensemble's inputs and outputs for each text of a request. `hplm.serving.multi_text` packs several texts in one tensor.
TEXT = "TEXT"  # BYTES [1], UTF-8; [2] for a tenant that was trained on pairs
TENANT = "TENANT"  # BYTES [1]
# BYTES [1], optional: the key of the text's tenant, if the server needs keys. Without KEY the key in the header counts.
KEY = "KEY"
LABEL = "LABEL"  # BYTES [k]: one for a classification, one per entity for a tagging, "score" for a regression
SCORE = "SCORE"  # FP32 [k]: probability of the label; for an entity the mean over its words; for a regression the value
SPAN = "SPAN"  # INT32 [k, 2]: character offsets, end exclusive; for those of a pair see `hplm.core.text`
TRUNCATED = "TRUNCATED"  # BOOL [1]: the text was longer than the base's maximum and was cut
STUDENTS = "STUDENTS"  # INT32 [1]: how many of the tenant's students have answered; 1 if it has none
LOGITS = "LOGITS"  # FP32 [1 or tokens, labels], if requested
# Fills the logits of several texts up to the largest. It is the least float32, which no head computes: JSON has it, unlike
# NaN, and a softmax gives it 0.
LOGITS_FILLER = -(2.0 - 2.0**-23) * 2.0**127

# How a level of a cascade decides on a text, and what it has decided: tensors of NAME_dispatch.
DISPATCH = (
    "DISPATCH"  # FP32 [5]: temperature, cut-off, slope, draw, 1 if importances are wanted; see `hplm.cascade.dispatch`
)
ROUTE = "ROUTE"  # INT32 [1]: 1 for a text that should go to the next level, otherwise 0
CONFIDENCE = "CONFIDENCE"  # FP32 [1]: the calibrated probability that the answer is right
# FP32 [words, 3]: first character, end, and importance of each word, a multiple of the mean over the text's tokens. There are
# no words unless the text is re-routed and importances are wanted. Rows of -1 fill several texts up to the largest.
IMPORTANCE = "IMPORTANCE"
# The model `cascade` has further outputs. Its CONFIDENCE is NaN for a tenant without a plan. Its ROUTE is the number of
# further levels that have answered the text.
LEVEL = "LEVEL"  # BYTES [1]: the base that answered last
LATE = "LATE"  # BOOL [1]: the next level should have answered too, and could not in time or at all

# Seconds from a request's arrival to its deadline at most: a day. A longer deadline is most likely in another unit.
LONGEST_DEADLINE_S = 86_400.0

# The only label of a regression.
REGRESSION_LABEL = "score"

# Tensors between the stages.
HIDDEN = "HIDDEN"  # FP16 [tokens, H]: merged window vectors of a hierarchical base
IDS = "IDS"  # INT32 [tokens, 2]: token ids and token types of a whole base, in place of HIDDEN
STATES = "STATES"  # FP32 [tokens, H]: hidden states after the layers of an encode stage, for the next encode stage
TOKENS = "TOKENS"  # INT32 [tokens, 3]: start and end character, number of the word; -1 for special tokens
# INT64 [3]: the number of tokens; the version of the tenant that the first stage used, so that the second uses the same; the
# arrival of the request in nanoseconds of the server's monotonic clock. The last two are negative if unknown.
REQUEST_META = "REQUEST_META"
# UINT8 [70], optional: the proof of one of the server's stages that it has checked the key, see `hplm.access.gate`.
PROOF = "PROOF"

# The parameter of requests that one of our models sends to another. Triton hands it on to the steps of an ensemble. Its value
# says what was charged for each text, see `hplm.access.quotas.Charge`, with commas between.
INNER = "hplm_inner"
# The name of a parameter with which `hplm serve` marks its own questions, see `hplm.access.gate.SERVER`. If the server needs no
# keys, any client may set it; else the proof counts.
PROBE = "hplm_probe"
# A job that does not exist: readiness asks the manager about it.
NO_JOB = "no-job"

# Ends of Triton's own messages if its queue before a stage is full, and if a request has waited there longer than its
# `timeout`. Over gRPC both are UNAVAILABLE.
TRITON_FULL = "Exceeds maximum queue size"
TRITON_EXPIRED = "Request timeout expired"
# Messages of Triton 24.10, with the status INTERNAL, about a model whose process has died. The second text is for a process
# that died while it held the lock of its health. The third is for a step of the ensemble that ended without an answer.
DEAD_STUB = re.compile(
    r"Stub process ('[^']*' )?is not healthy|Failed to obtain the health mutex|in ensemble '[^']*', unexpected deadlock"
)
# The beginning of Triton's message for a model that is not loaded, with the status UNAVAILABLE or NOT_FOUND.
UNKNOWN_MODEL = "Request for unknown model"
# Triton puts this before the message of a step of the ensemble.
ENSEMBLE_PREFIX = re.compile(r"\Ain ensemble '[^']*', ")

# Manage requests are JSON objects as BYTES [1].
MANAGER = roles.MANAGER.name  # answers once
REQUEST = "REQUEST"
RESPONSE = "RESPONSE"
JOB_UNFINISHED = ("queued", "running")  # states of a job that will change
# Endings of files that jobs read; an uploaded file has one of both kinds.
DATA_ENDINGS = (".jsonl", ".csv", ".tsv", ".conll")
CORPUS_ENDINGS = (".txt", ".jsonl", ".txt.gz", ".jsonl.gz")
UPLOAD_ENDINGS = tuple(dict.fromkeys((*DATA_ENDINGS, *CORPUS_ENDINGS)))


@dataclass(frozen=True)
class LabelledSpan:
    """One answer: the class of a text, an entity, or the value of a regression. It covers characters `start` to `end`."""

    label: str
    score: float
    start: int
    end: int
