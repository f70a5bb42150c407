"""Shared parts of the tests of `hplm eval`: a tiny base, a model of the same shape as its original, and two small tasks."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hplm_builder.cli.evaluate import app
from hplm_builder.tables.plot_tables import build_plot
from rich.progress import Progress
from transformers import BertConfig, BertModel
from typer.testing import CliRunner

from hplm.models.base import Base
from hplm.store.layout import Store
from tests import tiny

ORIGINAL_LAYERS = 4


@dataclass(frozen=True)
class Place:
    """A folder with a store, an original model and two tasks: the classification `colours` and the tagging `places`."""

    folder: Path
    store: Store
    base: Base

    @property
    def original(self) -> Path:
        return self.folder / "original"

    @property
    def root(self) -> Path:
        return self.folder / "tasks"

    def options(self, command: str) -> list[str]:
        """Return the options with which a command finds everything, with --quick."""
        found = [command, "--root", str(self.root), "--store", str(self.store.root), "--quick", "--threads", "1"]
        if command == "students":  # of classifications only: tasks are given one by one
            return [command, *found[3:]]
        return found if command == "cuts" else [*found, "--base", "tiny"]


def make_place(folder: Path) -> Place:
    """Make a base of random weights with a PLOT, an original of the same shape, and tasks of 60 / 30 / 30 examples."""
    store = Store(folder / "store")
    base = tiny.make_base(store, tiny.config())
    build_plot(store, "tiny", tiny.PLOT, tiny.sentences(50), 30.0, Progress(disable=True))
    make_original(folder / "original")
    for part, seed, count in (("train", 0, 60), ("dev", 1, 30), ("test", 2, 30)):
        write_part(folder / "tasks", part, seed, count)
    return Place(folder, store, base)


def make_original(folder: Path) -> None:
    """Save a BERT of the tiny base's shape in Hugging Face's layout."""
    shape = tiny.config()
    torch.manual_seed(0)
    BertModel(
        BertConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            num_hidden_layers=ORIGINAL_LAYERS,
            num_attention_heads=shape.num_heads,
            intermediate_size=shape.intermediate_size,
            max_position_embeddings=64,
            initializer_range=0.2,
        )
    ).save_pretrained(folder)
    tiny.tokenizer().save(str(folder / "tokenizer.json"))


def write_part(root: Path, part: str, seed: int, count: int) -> None:
    """Write texts that name a colour, which is their class, and texts with names of places, which are their entities."""
    rng = np.random.default_rng(seed)
    colours, places = [], []
    for _ in range(count):
        colour = str(rng.choice(["red", "red", "blue", "green"]))
        words = [*rng.choice(["the", "cat", "runs", "fast"], 4), colour]
        colours.append(json.dumps({"text": " ".join(rng.permutation(words)), "label": colour}))
        words = list(rng.choice(["the", "cat", "Anna", "Paris", "Berlin", "Bob", "runs"], 6))
        places.append("".join(f"{word} X O {'B-PLACE' if word in ('Paris', 'Berlin') else 'O'}\n" for word in words))
    for name, text in (("colours/" + part + ".jsonl", colours), ("places/" + part + ".conll", places)):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(text) + "\n")


def report_of(place: Place, command: str, *arguments: str) -> dict[str, Any]:
    """Run a command and return the benchmark result that it writes. Raises what the command raises."""
    path = place.folder / "report.json"
    done = CliRunner().invoke(
        app, [*place.options(command), *arguments, "--json", str(path)], catch_exceptions=False, standalone_mode=False
    )
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def trained(folder: Path) -> dict[str, int]:
    """Return the runs in a --resume folder, each with the time when it was written."""
    return {
        path.relative_to(folder).as_posix(): path.stat().st_mtime_ns for path in sorted(folder.rglob("seed-*.json"))
    }


def reports_of_two(command: Sequence[str], folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Run a command in two processes at once; return their benchmark results and their stderr."""
    paths = [folder / f"{number}.json" for number in range(2)]
    processes = [subprocess.Popen([*command, "--json", str(path)], stderr=subprocess.PIPE, text=True) for path in paths]
    said = [process.communicate(timeout=800)[1] for process in processes]
    assert not any(process.returncode for process in processes), said
    return [json.loads(path.read_text()) for path in paths], said
