"""Domains that an evaluation makes for itself, in its own folder: built once, by whoever of its processes comes first."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hplm.engine import lower_layers as lowers
from hplm.errors import DataError
from hplm.models import base as bases
from hplm.models.base import Base
from hplm.models.device import choose_device
from hplm.models.layers import WindowEncoder
from hplm.reporting.progress import Report
from hplm.store import artifact
from hplm_builder.data.corpus_file import read_corpus
from hplm_builder.domains.domain_build import DomainSettings, build_domain, estimate_domain
from hplm_builder.domains.domain_corpus import prepare_corpus
from hplm_builder.domains.masked_lm import MaskedLm, train
from hplm_builder.evaluation.search.eval_task import EvalTask
from hplm_builder.evaluation.search.run_store import BusyError, RunStore
from hplm_builder.evaluation.search.variants import ServedDomain
from hplm_builder.evaluation.studies.task_corpora import OVERLAP_WORDS, OWN, write_corpus
from hplm_builder.tenants.bodies import Half

CORPUS, ABOUT = "corpus.jsonl", "about.json"


class HalvesMaskedLm(MaskedLm):
    """A base of which any of its halves trains, for comparison: a domain trains the lower one alone."""

    def __init__(self, lower: WindowEncoder, base: Base, counts: Any, seed: int, halves: Sequence[Half]) -> None:
        super().__init__(lower, base.load_upper(), counts, seed)
        self.lower.requires_grad_("lower" in halves)
        self.upper.requires_grad_("higher" in halves)
        self.lower.word_embeddings.requires_grad_(False)

    def lower_parameters(self) -> list[torch.nn.Parameter]:
        """What the optimizer takes beside the head."""
        return [p for half in (self.lower, self.upper) for p in half.parameters() if p.requires_grad]


@dataclass(frozen=True)
class DomainBuilder:
    """Below the domain that is served at `parent`, each task's from the corpus that `sources` names, see `corpora`.

    What another process is building raises BusyError.
    """

    parent: ServedDomain
    settings: DomainSettings
    sources: Mapping[str, str]
    results: RunStore
    device: torch.device

    def lineage(self, task: EvalTask, report: Report) -> list[Path | str]:
        """The task's domain, built where it is not there yet."""
        place = self._place(task)
        served = self.parent

        def build(corpus: Path) -> dict[str, Any]:
            return build_domain(
                served.store,
                served.base.config.name,
                served.lineage,
                place / "1",
                corpus,
                self.settings,
                report,
                work=place / "work",
                device=self.device.type,
            )

        self._built(task, place, build)
        return [(place / "1").absolute(), *served.lineage]

    def estimate_s(self, task: EvalTask, also: Sequence[Sequence[Half]], report: Report) -> float:
        """Seconds that the task's domain would take, and `pretrained` of each of `also`; what is there takes none."""
        places = [self._place(task), *(self._place(task, halves) for halves in also)]
        if not (missing := sum(not (place / ABOUT).is_file() for place in places)):
            return 0.0
        served = self.parent
        with tempfile.TemporaryDirectory(prefix="hplm-eval-") as folder:
            corpus = write_corpus(Path(folder) / CORPUS, task, self.sources[task.name])
            name, settings = served.base.config.name, self.settings
            given = served.store, name, served.lineage, corpus, settings, report
            found = estimate_domain(*given, device=self.device.type)
        return missing * float(found["estimated_s"])

    def about(self, task: EvalTask) -> dict[str, Any]:
        """What is known of a built domain: corpus, held-out loss before and after, sizes. Raises DataError where it is gone."""
        path = self._place(task) / ABOUT
        try:
            found: dict[str, Any] = json.loads(path.read_text())
        except OSError as error:
            raise DataError(
                f"{path} cannot be read: {error.strerror}; runs over that domain are there: give --resume another folder"
            ) from error
        return found

    def pretrained(self, task: EvalTask, halves: Sequence[Half], report: Report) -> Base:
        """The whole base further pretrained on the task's corpus, as long as a domain is; only `halves` of it train."""
        place = self._place(task, halves)

        def build(corpus: Path) -> dict[str, Any]:
            base, settings = self.parent.base, self.settings
            found = prepare_corpus(read_corpus(corpus), base, settings.min_corpus_tokens, settings.seed, report)
            # From where the domain starts too.
            lower = lowers.of_lineage(self.parent.store, base, self.parent.lineage)
            model = HalvesMaskedLm(lower, base, found.token_counts, settings.seed, halves)
            model.to(choose_device(self.device.type))
            losses = train(model, found.text, found.held, found.known, settings, report)
            state = model.lower.state_dict(), model.upper.state_dict()
            bases.save(place / "base", base.config, *state, base.tokenizer_path.read_bytes(), {"masked_lm": losses})
            return {"masked_lm": losses}

        self._built(task, place, build)
        return bases.load(place / "base")

    def name(self, task: EvalTask) -> str:
        """Tells a task's domain from one of another corpus, of other settings or over another base.

        Every task has its own: of a corpus that several share, each lacks what is in its test part.
        """
        source, served = self.sources[task.name], self.parent
        text = artifact.sha256(Path(source)) if Path(source).is_file() else source
        of = json.dumps([text, task.digest, OVERLAP_WORDS, asdict(self.settings), served.about()], sort_keys=True)
        label = task.name if source == OWN else Path(source).name.partition(".")[0]
        return f"{label.lower()}-{hashlib.sha256(of.encode()).hexdigest()[:8]}"

    def _place(self, task: EvalTask, halves: Sequence[Half] = ()) -> Path:
        """Of the task's domain, or of what `pretrained` makes."""
        return self.results.folder / "domains" / "-".join((self.name(task), *halves))

    def _built(self, task: EvalTask, place: Path, build: Callable[[Path], dict[str, Any]]) -> None:
        about = place / ABOUT
        if about.is_file():
            return
        with self.results.claim(f"domains/{place.name}") as is_ours:
            if not is_ours:
                raise BusyError(f"another process builds {place}")
            if about.is_file():
                return
            found = build(write_corpus(place / CORPUS, task, self.sources[task.name]))
            partial = about.with_suffix(".partial")
            partial.write_text(json.dumps(found, indent=1))
            partial.replace(about)
            (place / CORPUS).unlink()
            shutil.rmtree(place / "work", ignore_errors=True)
