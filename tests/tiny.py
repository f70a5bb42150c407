"""A base so small that whole servers start in seconds: random weights, a real tokenizer, real tables and tenants."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from hplm_builder.export import export
from hplm_builder.plots import build_plot
from rich.progress import Progress
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from hplm.adapters import tenant as tenants
from hplm.adapters.packed import Adapter, pack
from hplm.adapters.tenant import Head, Task, Tenant, TenantCard
from hplm.config import BaseConfig, PlotSettings, UpperSettings
from hplm.nn import base as bases
from hplm.nn.encoder import UpperEncoder, WindowEncoder
from hplm.store.layout import Store

WORDS = [
    *("the", "a", "of", "and", "red", "blue", "green", "cat", "dog", "bird", "runs", "sleeps", "sings", "fast", "slow"),
    *("over", "under", "river", "hill", "Paris", "Anna", "Berlin", "Rome", "Oslo", "Bob", "Eve", "Tom", "one", "two"),
]
TASKS: dict[str, tuple[Task, tuple[str, ...]]] = {
    "alpha": ("classification", ("yes", "no")),
    "beta": ("classification", ("red", "green", "blue")),
    "gamma": ("classification", ("low", "high")),
    "tagger": ("tagging", ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")),
}


def tokenizer() -> Tokenizer:
    """WordPiece over WORDS and single characters."""
    letters = [chr(c) for c in range(33, 127)]
    pieces = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        *(word.lower() for word in WORDS),
        *letters,
        *("##" + c for c in letters),
    ]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    made = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])]
    )
    return made


def config(window: int = 3, name: str = "tiny") -> BaseConfig:
    return BaseConfig(
        name=name,
        vocab_size=tokenizer().get_vocab_size(),
        hidden_size=48,
        num_heads=4,
        intermediate_size=96,
        window_layers=2,
        upper_layers=2,
        max_tokens=40,
        window=window,
    )


def sentences(count: int, seed: int = 0) -> list[str]:
    """Random word sequences of 1 to 30 words."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(1, 30))) for _ in range(count)]


def make_base(store: Store, shape: BaseConfig, seed: int = 0) -> bases.Base:
    """A base of random weights, large enough that every part shows in the answer."""
    torch.manual_seed(seed)
    lower, upper = WindowEncoder(shape), UpperEncoder(shape)
    for module in (lower, upper):
        for name, parameter in module.named_parameters():
            if "norm" not in name:
                torch.nn.init.normal_(parameter, std=0.2)
    made = tokenizer().to_str().encode()
    bases.save(store.base(shape.name), shape, lower.state_dict(), upper.state_dict(), made, {})
    return bases.load(store.base(shape.name))


def make_tenant(store: Store, base: bases.Base, name: str, seed: int) -> Tenant:
    """A tenant of random weights with one of TASKS."""
    rng = np.random.default_rng(seed)
    task, labels = TASKS[name]
    layers, hidden, reduced = base.config.upper_layers, base.config.hidden_size, base.config.hidden_size // 16
    shapes = ((layers, reduced, hidden), (layers, reduced), (layers, hidden, reduced), (layers, hidden))
    adapter = Adapter(*(rng.normal(0, 0.3, shape).astype(np.float32) for shape in shapes))
    head = Head(*(rng.normal(0, 0.5, shape).astype(np.float32) for shape in ((len(labels), hidden), (len(labels),))))
    pooling = "cls" if name == "gamma" else "mean"
    card = TenantCard(name, task, labels, base.fingerprint, pooling, example="Anna sings in Paris")
    made = Tenant(card, pack(adapter), head)
    tenants.save(store.tenant(name), made)
    return made


def make_repository(folder: Path, *, miss: str = "compute", dtype: str = "float32", num_slots: int = 3) -> Path:
    """A store and model folders; fewer slots than tenants, so that slots are swapped."""
    store = Store(folder / "store")
    base = make_base(store, config())
    build_plot(store, "tiny", "general", sentences(50), 30.0, Progress(disable=True), dtype="float32")
    for seed, name in enumerate(TASKS, 1):
        make_tenant(store, base, name, seed)
    plot = PlotSettings(store="", base="tiny", table="general", miss=miss, dtype=dtype, overlay_windows=64)  # type: ignore[arg-type]
    upper = UpperSettings(store="", base="tiny", num_slots=num_slots, dtype=dtype)  # type: ignore[arg-type]
    export(store, folder / "models", plot, upper)
    return folder / "models"
