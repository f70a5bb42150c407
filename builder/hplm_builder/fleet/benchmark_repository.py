"""Model repositories for benchmarks: a base, a PLOT, a pool of texts, and thousands of synthetic or fine-tuned tenants."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from rich.progress import Progress
from torch import nn

from hplm.adapters import bank_file
from hplm.adapters.packed import PackedAdapter, packed_width, to_bfloat16
from hplm.adapters.students import Students
from hplm.adapters.tenant import Head, Pooling, Tenant, TenantCard
from hplm.core.settings import REDUCTION_FACTOR, WHOLE, BaseConfig, EncodeSettings, LookupSettings
from hplm.core.text import TextEncoder
from hplm.engine.lower_layers import load_lower, make_lower
from hplm.engine.lower_layers import lower_form as find_lower_form
from hplm.engine.lower_layers import pack as pack_lower
from hplm.engine.open_domain import open_features
from hplm.engine.windows.encoder import WindowEncoder
from hplm.errors import ArtifactError, ConfigError, CorruptArtifactError
from hplm.models import base as bases
from hplm.models.base import Base
from hplm.models.device import CPU, choose_dtype
from hplm.models.layers import OriginalEncoder, UpperLayers
from hplm.registry.registry import Registry
from hplm.reporting.progress import bar_report
from hplm.reporting.samples import unseen_paragraphs
from hplm.store.layout import Store
from hplm_builder.convert.base import MINILM, ensure_base, minilm_folder, shipped_with
from hplm_builder.convert.whole import make_whole_base, publish_whole_base
from hplm_builder.data.text_sources import SOURCES
from hplm_builder.export.model_folders import export
from hplm_builder.export.register import ROOT_OF_WHOLE, banks_of, fresh_bank, name_root, publish_bank, served
from hplm_builder.fleet.demo import PLOT_SOURCES
from hplm_builder.fleet.fine_tuned_fleet import DATA, FineTunedFleet, fine_tune_fleet
from hplm_builder.tables.plot_tables import count_grams, has_plot, write_ngrams
from hplm_builder.tenants.bodies import ADAPTER_AT

Shape = Literal["minilm", "bert-base"]
BERT_BASE = "bert-base"
BANK = "fleet"
PLOT = "pool"
TEXTS = "texts.txt"
ABOUT = "fleet.json"
WHOLE_TOKENS = 256  # most tokens of a text over a whole base, as over the shipped bases
MOST_LABELS = 20
# The pool: how many sentences, and their shortest and longest in tokens; the mean is about 20 tokens.
POOL_TEXTS, POOL_SHORTEST, POOL_LONGEST = 400, 8, 30
# Large enough that swapping two tenants shows in every logit, small enough that the size of activations does not change.
ADAPTER_STD = 0.08
HEAD_STD = 0.1


def draw_texts(encoder: TextEncoder, seed: int) -> list[str]:
    """Return the pool of texts: distinct sentences of WikiText that no table has counted, in a seeded order."""
    sentences = sorted({s.strip() for p in unseen_paragraphs() for s in p.split(" . ")})
    order = np.random.default_rng(seed).permutation(len(sentences))
    candidates = [sentences[i] for i in order[: 8 * POOL_TEXTS]]
    lengths = [len(encoded.ids) for encoded in encoder.encode(candidates)]
    fitting = [
        text for text, length in zip(candidates, lengths, strict=True) if POOL_SHORTEST <= length <= POOL_LONGEST
    ]
    return fitting[:POOL_TEXTS]


def make_fleet(
    store: Store,
    base: Base,
    name: str,
    count: int,
    seed: int,
    progress: Progress,
    *,
    pooling: Pooling = "mean",
    reduction_factor: int = REDUCTION_FACTOR,
    students: Sequence[int] = (1,),
) -> int:
    """Write a bank of `count` different synthetic tenants `tenant-00000`, ... with 2 to 20 labels; return how many.

    Adapters are random by `seed`; their bottleneck is the hidden size over `reduction_factor`. Heads read what `pooling` says.
    Tenants have these numbers of students of the form `shared`, in turn.
    """
    if count < 1:
        raise ConfigError(f"a fleet needs at least one tenant, got {count}")
    config, rng = base.config, np.random.default_rng(seed)
    hidden = config.hidden_size
    reduced = config.reduced_size(reduction_factor)
    layers, width = config.adapted_layers, packed_width(hidden, reduced)
    # All tenants share one stream of noise, each from another position, because drawing noise for each would take minutes.
    positions = 8 * count * max(students)
    noise = to_bfloat16(rng.standard_normal(layers * width + positions, dtype=np.float32) * ADAPTER_STD)
    starts = rng.choice(positions, (count, max(students)), replace=False)

    def synthetic_tenant(number: int, of_students: npt.NDArray[np.int64]) -> Tenant:
        own = students[number % len(students)]
        weights = [noise[start : start + layers * width].reshape(layers, width) for start in of_students[:own]]
        labels = tuple(f"label-{i:02d}" for i in range(rng.integers(2, MOST_LABELS + 1)))
        tenant = f"tenant-{number:05d}"
        card = TenantCard(
            tenant, "classification", labels, base.fingerprint, pooling, adapter_at=ADAPTER_AT, students=own
        )
        head = Head(
            rng.standard_normal((len(labels), hidden), dtype=np.float32) * np.float32(HEAD_STD),
            rng.standard_normal(len(labels), dtype=np.float32) * np.float32(HEAD_STD),
        )
        packed = tuple(PackedAdapter(one, hidden, reduced) for one in weights)
        if own == 1:
            return Tenant(card, packed[0], head)
        # Later students correct the first, so their alphas are less than its 1.
        alphas = np.array([1, *[0.5] * (own - 1)], np.float32)
        return Tenant(card, packed[0], head, students=Students(alphas, packed, None, (0.0,) * own))

    tracked = progress.track(starts, description=f"{name}: tenants")
    tenants = (synthetic_tenant(number, start) for number, start in enumerate(tracked))
    return bank_file.write(store.bank(name), base.fingerprint, tenants)


def make_bert_base(store: Store, lower_form: str, seed: int) -> Base:
    """Save a base of BERT-base's shape with seeded weights and MiniLM's tokenizer: good for measurements, not for answers."""
    is_windows = lower_form == WindowEncoder.form
    config = BaseConfig(
        name=BERT_BASE,
        vocab_size=30_522,
        hidden_size=768,
        num_heads=12,
        intermediate_size=3072,
        window_layers=6 if is_windows else 4,
        upper_layers=6,
        max_tokens=256,
        vectors_per_ngram=find_lower_form(lower_form).vectors_per_ngram(3),
        lower_layers=6,
        lower_form=lower_form,
    )
    torch.manual_seed(seed)
    lower, upper = make_lower(config), UpperLayers(config)
    for half in (lower, upper):
        for module in half.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
    tokenizer = (minilm_folder() / "tokenizer.json").read_bytes()
    about = {"original": "none: seeded weights", "seed": seed}
    bases.save(store.base(BERT_BASE), config, lower.state_dict(), upper.state_dict(), tokenizer, about)
    return bases.load(store.base(BERT_BASE))


def make_whole_bert_base(store: Store, seed: int) -> Base:
    """Save a whole base of BERT-base's shape with seeded weights: good for measurements, not for answers."""
    config = BaseConfig(
        name=f"{BERT_BASE}-{WHOLE}",
        vocab_size=30_522,
        hidden_size=768,
        num_heads=12,
        intermediate_size=3072,
        window_layers=0,
        upper_layers=12,
        max_tokens=256,
        vectors_per_ngram=1,
        window=1,
        lower_form=WHOLE,
        adapter_layers=6,
        token_types=2,
    )
    torch.manual_seed(seed)
    original = OriginalEncoder(config, config.upper_layers)
    nn.init.normal_(original.token_types, std=0.02)
    for module in original.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
    tokenizer = (minilm_folder() / "tokenizer.json").read_bytes()
    return publish_whole_base(store, config, original, tokenizer, {"original": "none: seeded weights", "seed": seed})


def make_pool_plot(
    store: Store, base: Base, texts: Sequence[str], progress: Progress, percent: float | None = None
) -> None:
    """Write a PLOT without shorter n-grams, so that all n-grams that the root table lacks are computed.

    The root table has every n-gram of `texts`. With a `percent` it has that share of the n-grams of the demo's sources instead,
    the most frequent ones; 0 gives an empty table.
    """
    lower, dtype = load_lower(base), choose_dtype("auto", CPU)
    # Packed as for serving, so that the table holds what a miss would compute.
    pack_lower(lower, dtype)
    if percent is None:
        grams = count_grams(texts, base, progress).grams
    else:
        documents = [text for source in PLOT_SOURCES for text in SOURCES[source]()]
        grams = count_grams(documents, base, progress).top(percent)[: None if percent else 0]
    bar = progress.add_task("compute root windows", total=len(grams))
    for level, rows in (("bigram", grams[:0, :2]), ("unigram", grams[:0, :1]), ("root", grams)):
        write_ngrams(
            store.table(PLOT, level),
            level,
            rows,
            lower,
            base.fingerprint,
            {"corpus": {"texts": len(texts)}},
            dtype,
            lambda count: progress.update(bar, advance=count),
        )


def make_benchmark_repository(
    folder: Path,
    shape: Shape,
    lower_form: str,
    percent: float | None,
    tenants: int,
    seed: int,
    progress: Progress,
    tuned: FineTunedFleet | None,
    pooling: Pooling,
    reduction_factor: int,
    is_whole: bool = False,
) -> Path:
    """Build what is missing in `folder`: `store/`, `texts.txt` and `models/`. Sound parts are kept. Return `models`.

    If `is_whole`, the base is whole: it has no tables, and `lower_form` and `percent` mean nothing.

    `texts.txt` holds the pool, one sentence a line. If `tuned` is given, its tenants are fine-tuned by its settings. Else the
    tenants are synthetic, with `pooling` and `reduction_factor`. Raises ConfigError if the folder was built with another
    shape, form, table, seed, pooling, width, fleet or data.
    """
    if tuned and shape == BERT_BASE:
        raise ConfigError("bert-base has seeded weights, which cannot learn a task: use --shape minilm with --task")
    if tuned:
        reduction_factor = tuned.settings.reduction_factor
    about: dict[str, Any] = {"shape": shape, "lower_form": WHOLE if is_whole else lower_form, "seed": seed}
    about |= {} if percent is None else {"top_percent": percent}
    if tuned:
        about |= tuned.about
    else:  # folders from before there was a choice do not name these
        about |= {"pooling": pooling} if pooling != "mean" else {}
        about |= {"reduction_factor": reduction_factor} if reduction_factor != REDUCTION_FACTOR else {}
    check_same_fleet(folder, about)
    store = Store(folder / "store")
    steps = progress.add_task(f"{shape}: base, tables, {tenants:,} tenants, models", total=4)
    base = bench_base(store, shape, WHOLE if is_whole else lower_form, seed)
    root = ROOT_OF_WHOLE if is_whole else PLOT
    progress.update(steps, advance=1)
    texts = draw_texts(base.load_text_encoder(), seed)
    listed = "\n".join(texts) + "\n"
    path = folder / TEXTS
    if is_whole:
        path.write_text(listed)
    elif not has_plot(store, base, PLOT) or not path.is_file() or path.read_text() != listed:
        path.unlink(missing_ok=True)
        make_pool_plot(store, base, texts, progress, percent)
        path.write_text(listed)
    progress.update(steps, advance=1)
    name_root(store, base, root)
    if (bank := _complete_bank(store, base, tenants)) is None:
        bank = fresh_bank(store, BANK)
        if tuned:
            domain = open_features(store, base, [store.table(PLOT, "root").parent])
            fine_tune_fleet(store, base, domain, bank, tuned, bar_report(progress, BANK))
        else:
            make_fleet(store, base, bank, tenants, seed, progress, pooling=pooling, reduction_factor=reduction_factor)
    if not any(version.path == store.relative(store.bank(bank)) for version in served(store)):
        publish_bank(store, base, root, bank)
    progress.update(steps, advance=1)
    models = folder / "models"
    plot = LookupSettings(store="", base=base.config.name, table=root)
    export(store, models, plot, EncodeSettings(store="", base=base.config.name, reduction_factor=reduction_factor))
    progress.update(steps, advance=1)
    return models


def check_same_fleet(folder: Path, wanted: dict[str, Any]) -> None:
    """Refuse a folder with another fleet, mark a new folder with the `wanted` one. Raises ConfigError, CorruptArtifactError."""
    path = folder / ABOUT
    if path.is_file():
        tasks = [{key: value for key, value in task.items() if key != DATA} for task in wanted.get("tasks", ())]
        # Older fleets do not name the checksum of their data.
        without_checksums = {**wanted, "tasks": tasks} if tasks else wanted
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CorruptArtifactError(
                f"{path} is damaged ({error}), so it does not say which fleet {folder} holds: "
                "remove the folder to build it again, or choose another folder"
            ) from None
        if stored not in (wanted, without_checksums):
            raise ConfigError(f"{folder} holds a fleet of {stored}, expected {wanted}: choose another folder")
        return
    folder.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{ABOUT}")
    partial.write_text(json.dumps(wanted) + "\n")
    partial.rename(path)


def bench_base(store: Store, shape: Shape, lower_form: str, seed: int) -> Base:
    """Return the base of a shape with these lower layers, or the whole base for WHOLE; make it if it is missing."""
    if lower_form == WHOLE:
        name = f"{shape}-{WHOLE}"
        with suppress(ArtifactError):
            return bases.load(store.base(name))
        if shape == BERT_BASE:
            return make_whole_bert_base(store, seed)
        return make_whole_base(
            store, minilm_folder(), name=name, origin=MINILM, adapters="upper", max_tokens=WHOLE_TOKENS
        )
    if shape == "minilm":
        return ensure_base(store, shipped_with(lower_form))
    try:
        return bases.load(store.base(BERT_BASE))
    except ArtifactError:
        return make_bert_base(store, lower_form, seed)


def _complete_bank(store: Store, base: Base, tenants: int) -> str | None:
    """Return a bank of `tenants` tenants that is served, or was built but never published. Replaced banks do not count."""
    with closing(Registry.open_read_only(store)) as registry:
        known = registry.snapshot().paths
    served_paths = {version.path for version in served(store)}
    for folder, names in banks_of(store, base).items():
        path = store.relative(folder)
        if len(names) == tenants and (path in served_paths or path not in known):
            return folder.name
    return None
