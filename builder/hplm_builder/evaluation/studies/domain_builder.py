"""Building a study's own domains in its --resume folder. The first process that needs a domain builds it."""

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
from hplm.models.lower import LowerEncoder
from hplm.reporting.progress import Report
from hplm.store import artifact
from hplm_builder.data.corpus_file import read_corpus
from hplm_builder.domains.domain_build import DomainSettings, build_domain, estimate_domain
from hplm_builder.domains.domain_corpus import prepare_corpus
from hplm_builder.domains.masked_lm import MaskedLm, train
from hplm_builder.evaluation.search.eval_task import EvalTask
from hplm_builder.evaluation.search.run_store import BusyError, RunStore
from hplm_builder.evaluation.search.served_domain import ServedDomain
from hplm_builder.evaluation.studies.task_corpora import OVERLAP_WORDS, OWN, write_corpus
from hplm_builder.tenants.bodies import Half

CORPUS, ABOUT = "corpus.jsonl", "about.json"


class HalvesMaskedLm(MaskedLm):
    """A masked language model in which the given halves of a base train. (A domain trains the lower half only.)"""

    def __init__(self, lower: LowerEncoder, base: Base, counts: Any, seed: int, halves: Sequence[Half]) -> None:
        super().__init__(lower, base.load_upper(), counts, seed)
        self.lower.requires_grad_("lower" in halves)
        self.upper.requires_grad_("higher" in halves)
        self.lower.word_embeddings.requires_grad_(False)

    def lower_parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters that train beside the head."""
        return [p for half in (self.lower, self.upper) for p in half.parameters() if p.requires_grad]


@dataclass(frozen=True)
class DomainBuilder:
    """Builds a domain for each task below `parent`, from the corpus that `sources` names (see `task_corpora`).

    A method raises BusyError if another process is building what is needed.
    """

    parent: ServedDomain
    settings: DomainSettings
    sources: Mapping[str, str]
    results: RunStore
    device: torch.device

    def lineage(self, task: EvalTask, report: Report) -> list[Path | str]:
        """Return the lineage of the task's domain, which is built if it is missing."""
        folder = self._folder(task)
        served = self.parent

        def build(corpus: Path) -> dict[str, Any]:
            return build_domain(
                served.store,
                served.base.config.name,
                served.lineage,
                folder / "1",
                corpus,
                self.settings,
                report,
                work=folder / "work",
                device=self.device.type,
            )

        self._build_once(task, folder, build)
        return [(folder / "1").absolute(), *served.lineage]

    def estimate_s(self, task: EvalTask, also: Sequence[Sequence[Half]], report: Report) -> float:
        """Estimate the seconds to build what is missing: the task's domain, and `pretrained` bases for each of `also`."""
        folders = [self._folder(task), *(self._folder(task, halves) for halves in also)]
        if not (missing := sum(not (folder / ABOUT).is_file() for folder in folders)):
            return 0.0
        served = self.parent
        with tempfile.TemporaryDirectory(prefix="hplm-eval-") as temporary:
            corpus = write_corpus(Path(temporary) / CORPUS, task, self.sources[task.name])
            name, settings = served.base.config.name, self.settings
            cost = estimate_domain(
                served.store, name, served.lineage, corpus, settings, report, device=self.device.type
            )
        return missing * float(cost["estimated_s"])

    def about(self, task: EvalTask) -> dict[str, Any]:
        """Return the description of a built domain: corpus, held-out loss, sizes. Raises DataError if it is gone."""
        path = self._folder(task) / ABOUT
        try:
            about: dict[str, Any] = json.loads(path.read_text())
        except OSError as error:
            raise DataError(
                f"{path} cannot be read: {error.strerror}; the folder has runs over that domain, but not the domain: "
                "give --resume another folder"
            ) from error
        return about

    def pretrained(self, task: EvalTask, halves: Sequence[Half], report: Report) -> Base:
        """Return the base, further pretrained on the task's corpus for as long as a domain; only `halves` of it train."""
        folder = self._folder(task, halves)

        def build(corpus: Path) -> dict[str, Any]:
            base, settings = self.parent.base, self.settings
            prepared = prepare_corpus(read_corpus(corpus), base, settings.min_corpus_tokens, settings.seed, report)
            # Start from the lower layers from which the domain starts.
            lower = lowers.of_lineage(self.parent.store, base, self.parent.lineage)
            model = HalvesMaskedLm(lower, base, prepared.token_counts, settings.seed, halves)
            model.to(choose_device(self.device.type))
            losses = train(model, prepared.text, prepared.held_out, prepared.vocabulary, settings, report).summary()
            state = model.lower.state_dict(), model.upper.state_dict()
            bases.save(folder / "base", base.config, *state, base.tokenizer_path.read_bytes(), {"masked_lm": losses})
            return {"masked_lm": losses}

        self._build_once(task, folder, build)
        return bases.load(folder / "base")

    def name(self, task: EvalTask) -> str:
        """Return a name that depends on the task, the corpus, the settings and the base of the domain.

        Tasks that share a corpus have domains of their own, because each domain leaves out the task's test texts.
        """
        source, served = self.sources[task.name], self.parent
        text = artifact.sha256(Path(source)) if Path(source).is_file() else source
        key = json.dumps([text, task.digest, OVERLAP_WORDS, asdict(self.settings), served.about()], sort_keys=True)
        label = task.name if source == OWN else Path(source).name.partition(".")[0]
        return f"{label.lower()}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"

    def _folder(self, task: EvalTask, halves: Sequence[Half] = ()) -> Path:
        """Return the folder of the task's domain, or of the `pretrained` base if `halves` are given."""
        return self.results.folder / "domains" / "-".join((self.name(task), *halves))

    def _build_once(self, task: EvalTask, folder: Path, build: Callable[[Path], dict[str, Any]]) -> None:
        """Run `build` once over all processes: its result in ABOUT marks `folder` as complete. Raises BusyError."""
        about = folder / ABOUT
        if about.is_file():
            return
        with self.results.claim(f"domains/{folder.name}") as is_ours:
            if not is_ours:
                raise BusyError(f"another process is building {folder}")
            if about.is_file():
                return
            result = build(write_corpus(folder / CORPUS, task, self.sources[task.name]))
            partial = about.with_suffix(".partial")
            partial.write_text(json.dumps(result, indent=1))
            partial.replace(about)
            (folder / CORPUS).unlink()
            shutil.rmtree(folder / "work", ignore_errors=True)
