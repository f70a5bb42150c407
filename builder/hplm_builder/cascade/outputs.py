"""Computes what all levels of a tenant answer to labelled texts, whole and pruned, and keeps it as one artifact."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as packed_arrays

from hplm.cascade.level_outputs import CalibratedLevel, CascadeOutputs, LevelOutputs, PartOutputs, PrunedBy
from hplm.cascade.offline import draws_of
from hplm.cascade.pruning import prune
from hplm.core.text import TextOrPair
from hplm.core.wire import LabelledSpan
from hplm.errors import CorruptArtifactError, unusable
from hplm.store import artifact
from hplm.store.cascade_outputs import KIND
from hplm.tasks.examples import LabelledText
from hplm_builder.cascade.levels import Answered, Level
from hplm_builder.cascade.used_texts import write_used

# Degrees of pruning that are tried, in this order. With 1.5 most words of a text are gone, so no more are tried.
ALPHAS = tuple(round(0.5 + 0.1 * step, 1) for step in range(11))
# The accuracy that a level may lose if its texts are pruned. The degrees end before the first with which it loses more.
MOST_LOSS = 0.02
# The number of the plan while it has none, by which the draws of the proof are made.
UNNUMBERED = 0
# The fields of LevelOutputs that are arrays.
_ARRAYS = ("logits", "confidence", "right", "tokens", "entities")
Tick = Callable[[int], None]


def calibrate_levels(
    levels: Sequence[Level], examples: Sequence[LabelledText], tick: Tick = lambda count: None
) -> tuple[list[Level], list[float], list[list[Answered]]]:
    """Return the levels in ascending accuracy on `examples`, with their temperatures and what they answer.

    `tick` is called with the number of texts of each batch.
    """
    texts = [example.text_or_pair for example in examples]
    found = []
    for level in levels:
        answered = level.answer(texts, wants_importance=_can_prune(levels), tick=tick)
        judged = level.judge(answered, examples, 1.0)
        found.append((judged.accuracy, level, level.calibrate(answered, examples, judged.right), answered))
    found.sort(key=lambda one: one[0])
    return [one[1] for one in found], [one[2] for one in found], [one[3] for one in found]


def compute_part(
    levels: Sequence[Level],
    temperatures: Sequence[float],
    examples: Sequence[LabelledText],
    *,
    alphas: Mapping[tuple[int, int], Sequence[float]] | None = None,
    answered: Sequence[Sequence[Answered]] | None = None,
    tick: Tick = lambda count: None,
) -> PartOutputs:
    """Return what all levels answer to `examples`, which are at least one.

    A level's texts are pruned by the importances of each level before it. By default alpha rises through ALPHAS while the level
    loses at most MOST_LOSS. `alphas` names other degrees, by the numbers of both levels. `answered` is what the levels answer
    to the whole texts, if it was computed already. `tick` is called with the number of texts of each batch.
    """
    texts = [example.text_or_pair for example in examples]
    answered = answered or [level.answer(texts, wants_importance=_can_prune(levels), tick=tick) for level in levels]
    whole = [
        level.judge(each, examples, temperature)
        for level, each, temperature in zip(levels, answered, temperatures, strict=True)
    ]
    pruned: dict[PrunedBy, LevelOutputs] = {}
    if _can_prune(levels):
        for by, reader in combinations(range(len(levels)), 2):
            least = whole[reader].accuracy - MOST_LOSS
            before, texts_before = list(answered[reader]), list(texts)
            for alpha in ALPHAS if alphas is None else alphas.get((by, reader), ()):
                texts_now = [prune(text, one.importance, alpha) for text, one in zip(texts, answered[by], strict=True)]
                _answer_changed(levels[reader], before, texts_before, texts_now, tick)
                outputs = levels[reader].judge(before, examples, temperatures[reader])
                if alphas is None and outputs.accuracy < least:
                    break
                pruned[by, reader, alpha] = outputs
    draws = draws_of(levels[0].tenant.card.name, UNNUMBERED, texts, len(levels))
    return PartOutputs(tuple(whole), levels[0].gold(examples), draws, pruned)


def _answer_changed(
    level: Level, answered: list[Answered], before: list[TextOrPair], now: Sequence[TextOrPair], tick: Tick
) -> None:
    """Bring `answered` and `before` up to the texts `now`; texts that did not change are not computed again."""
    changed = [number for number, text in enumerate(now) if text != before[number]]
    for number, one in zip(changed, level.answer([now[number] for number in changed], tick=tick), strict=True):
        answered[number], before[number] = one, now[number]


def _can_prune(levels: Sequence[Level]) -> bool:
    """Return whether texts are pruned: those of taggings never are, because their answers are about places in the text."""
    return len(levels) > 1 and not levels[0].task.takes_entities


def save_outputs(folder: Path, outputs: CascadeOutputs, used: Set[int] = frozenset()) -> None:
    """Publish the outputs as one artifact, with checksums. `used` see `hplm_builder.cascade.used_texts`. Raises OSError."""
    meta = {
        "tenant": outputs.tenant,
        "task": outputs.task,
        "labels": list(outputs.labels),
        "levels": [asdict(level) for level in outputs.levels],
    }
    arrays: dict[str, Any] = {}
    answers: dict[str, Any] = {}
    for name, part in (("select", outputs.select), ("proof", outputs.proof)):
        arrays |= {f"{name}.gold": part.gold, f"{name}.draws": part.draws}
        members = {**{f"whole.{number}": one for number, one in enumerate(part.whole)}}
        members |= {f"pruned.{by}.{reader}.{alpha}": one for (by, reader, alpha), one in part.pruned.items()}
        for key, one in members.items():
            arrays |= {f"{name}.{field}.{key}": np.ascontiguousarray(getattr(one, field)) for field in _ARRAYS}
            answers[f"{name}.{key}"] = [[list(vars(span).values()) for span in spans] for spans in one.answers]
    with artifact.publish(folder, KIND, meta) as partial:
        (partial / "outputs.safetensors").write_bytes(packed_arrays(arrays))
        (partial / "answers.json").write_text(json.dumps(answers))
        write_used(partial, used)


def load_outputs(folder: Path) -> CascadeOutputs:
    """Load and verify what `save_outputs` published.

    Raises MissingArtifactError, CorruptArtifactError or StoreUnavailableError.
    """
    stored = artifact.read(folder, KIND)
    try:
        arrays = load_arrays(stored.read_bytes("outputs.safetensors", verify=True))
        answers = json.loads(stored.read_bytes("answers.json", verify=True))
        meta = stored.meta
        levels = tuple(CalibratedLevel(**level) for level in meta["levels"])
        parts = [_part_of(name, arrays, answers, len(levels)) for name in ("select", "proof")]
        return CascadeOutputs(meta["tenant"], meta["task"], tuple(meta["labels"]), levels, *parts)
    except OSError as error:
        raise unusable(f"{folder}: the outputs cannot be read", error) from error
    except (KeyError, TypeError, ValueError, SafetensorError) as error:
        raise CorruptArtifactError(f"{folder} holds no outputs of a cascade ({error!r}); update the tenant") from error


def _part_of(name: str, arrays: Mapping[str, Any], answers: Mapping[str, Any], levels: int) -> PartOutputs:
    def outputs(key: str) -> LevelOutputs:
        spans = tuple(tuple(LabelledSpan(*span) for span in text) for text in answers[f"{name}.{key}"])
        logits, confidence, right, tokens, entities = (arrays[f"{name}.{field}.{key}"] for field in _ARRAYS)
        return LevelOutputs(logits, confidence, right, tokens, entities, spans)

    pruned: dict[PrunedBy, LevelOutputs] = {}
    prefix = f"{name}.logits.pruned."
    for array in arrays:
        if array.startswith(prefix):
            by, reader, alpha = array.removeprefix(prefix).split(".", 2)
            pruned[int(by), int(reader), float(alpha)] = outputs(array.removeprefix(f"{name}.logits."))
    whole = tuple(outputs(f"whole.{number}") for number in range(levels))
    return PartOutputs(whole, arrays[f"{name}.gold"], arrays[f"{name}.draws"], pruned)
