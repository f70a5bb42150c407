"""Long commands that get SIGTERM continue from a checkpoint, to the same bits; checkpoints are written by time."""

from __future__ import annotations

import json
import logging
import shutil
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hplm_builder.convert.checkpoint import EVERY_S, Checkpoint
from safetensors.torch import load_file

from hplm.core.settings import WHOLE
from hplm.housekeeping.removal_plan import LOCAL_WORK_S
from hplm.registry.registry import Registry
from hplm.store.layout import LOCAL, Store
from tests import tiny
from tests.unit.builder.evaluation import evaluated
from tests.unit.hplm.manage import making
from tests.unit.hplm.manage.nursery import Nursery

SIX = ("base", "trunk", "domain", "tenant", "students", "eval")


@dataclass(frozen=True)
class Place:
    """A folder with a store and files for each command."""

    folder: Path

    @property
    def store(self) -> Store:
        return Store(self.folder / "store")

    def arguments(self, command: str) -> list[str]:
        """Return the arguments of `hplm`; none for students, which a worker trains."""
        in_store, corpus = ["--store", str(self.store.root)], str(self.folder / "corpus.txt")
        short = ["--text", corpus, "--tokens", "4000", "--batch-tokens", "500", *in_store]
        model = ["--model", str(self.folder / "original"), "--lower", "2", "--window-layers", "1", "--max-tokens", "40"]
        tokens = ["--tokens", "12000", "--warmup-tokens", "4000", "--least", "1000"]
        tasks = ["--root", str(self.folder / "tasks"), "--original", str(self.folder / "original")]
        kept = ["--resume", str(self.folder / "runs"), "--json", str(self.folder / "made.json")]
        return {
            "base": ["build", "base", *model, "--name", "made", *short],
            "trunk": ["build", "base", "--trunk", "2", "--from", "parent", "--name", "made", *short],
            "domain": ["build", "domain", "made", "--corpus", corpus, *tokens, "--base", "tiny", *in_store],
            "tenant": [
                *("build", "tenant", "made", "--train", str(self.folder / "train.csv")),
                *("--epochs", "3", "--base", "tiny", *in_store),
            ],
            "students": [],
            "eval": [
                *("eval", "methods", *tasks, "--quick", "--threads", "1", "--method", "hbert"),
                *("--base", "tiny", *in_store, *kept),
            ],
        }[command]

    def made(self, command: str) -> dict[str, object]:
        """Return all numbers that the command made, by name."""
        if command == "eval":
            rows = json.loads((self.folder / "made.json").read_text())["rows"]
            return {
                str(number): {key: row[key] for key in row if "second" not in key} for number, row in enumerate(rows)
            }
        found: dict[str, object] = {}
        for path in sorted(self.store.root.rglob("*.safetensors")):
            if any(part.startswith("made") for part in path.parts):
                for name, tensor in load_file(path).items():
                    # Without the version's number, because an interrupted command used up a number.
                    where = [part for part in path.relative_to(self.store.root).parts if not part.isdigit()]
                    found[f"{'/'.join(where)} {name}"] = tensor.double().tolist()
        return found

    def checkpoints(self) -> list[Path]:
        return sorted(self.folder.rglob("*.pt"))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A base with a root, a whole base and a trunk of two layers, with a job for students in the queue."""
    place = Place(tmp_path_factory.mktemp("prepared"))
    store = making.make_store(place.store.root)
    tiny.make_base(store, replace(tiny.config(form=WHOLE), name="parent"))
    shape = replace(tiny.config(form=WHOLE, name="trunk"), upper_layers=2, adapter_layers=0)
    trunk = tiny.make_base(store, shape, seed=1, trunk_of="tiny")
    (place.folder / "corpus.txt").write_text(making.corpus(documents=400))
    (place.folder / "train.csv").write_text(making.colours(120))
    evaluated.make_original(place.folder / "original")
    for part, seed, count in (("train", 0, 60), ("dev", 1, 30), ("test", 2, 30)):
        evaluated.write_part(place.folder / "tasks", part, seed, count)
    shutil.rmtree(place.folder / "tasks" / "places")
    with closing(Registry.open(store)) as registry:
        registry.publish_base("trunk", trunk.fingerprint, "bases/trunk", making.NOW_S)
        registry.publish_domain(
            "trunk", "general", "bases/trunk", making.NOW_S, parent_id=None, about={}, expected=None
        )
    with closing(making.make_service(store, bases={"trunk": {"domain": "general"}})) as service:
        data = {"train": {"upload": making.upload(service, making.colours(120))}}
        students = {"most": 2, "form": "own", "teacher": "tiny"}
        making.ask(
            service,
            "tenant.create",
            tenant="made-by-job",
            data=data,
            settings={"epochs": 3, "patience": 3},
            students=students,
        )
    return place


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    opened = Nursery()
    yield opened
    opened.close()


# A step of the second adapter of a tenant, and of the second run of a study. Of students a step of the teacher, of the second
# student and of the training of all prefixes.
@pytest.mark.parametrize(
    ("command", "stop_at"),
    [
        ("base", 5),
        ("trunk", 5),
        ("domain", 4),
        ("tenant", 32),
        *(("students", step) for step in (10, 49, 65)),
        ("eval", 6),
    ],
)
def test_a_long_command_that_gets_sigterm_continues_to_the_same_bits(
    prepared: Place, nursery: Nursery, tmp_path: Path, command: str, stop_at: int
) -> None:
    cut, whole = Place(tmp_path / "cut"), Place(tmp_path / "whole")
    for place in (cut, whole):
        shutil.copytree(prepared.folder, place.folder)
    status = nursery.run(cut.arguments(command), cut.folder / "first.txt", stop_at)
    said = (cut.folder / "first.txt").read_text()
    # A worker gives its job back and ends well.
    assert (status == 0) == (command == "students"), said
    assert cut.checkpoints(), said
    assert not cut.made(command) if command != "eval" else not (cut.folder / "made.json").exists()
    assert nursery.run(cut.arguments(command), cut.folder / "second.txt") == 0
    said = (cut.folder / "second.txt").read_text()
    assert "continues after step" in said, said
    assert nursery.run(whole.arguments(command), whole.folder / "only.txt") == 0
    assert "continues" not in (whole.folder / "only.txt").read_text()
    assert cut.made(command) == whole.made(command) != {}
    # The teacher of students of `hplm eval` stays as a result; everything else is removed.
    assert not cut.checkpoints()


def counting(checkpoint: Checkpoint) -> list[int]:
    """Go on counting to 10 from the checkpoint; return the numbers that are counted here."""
    saved = checkpoint.load(torch.device("cpu"))
    done = saved["step"] if saved else 0
    counted = []
    with checkpoint.keeping(lambda: {"step": done}):
        while done < 10:
            done += 1
            counted.append(done)
            checkpoint.reached()
    return counted


def test_a_killed_process_loses_at_most_a_minute(tmp_path: Path) -> None:
    path, seconds = tmp_path / "c.pt", [0.0]

    def clock() -> float:
        return seconds[0]

    class Killed(Exception):
        pass

    class Slow(Checkpoint):
        def reached(self) -> None:
            seconds[0] += EVERY_S / 3
            super().reached()
            if seconds[0] > 2.5 * EVERY_S:
                raise Killed

    with pytest.raises(Killed):
        counting(Slow(path, {}, clock=clock))
    assert counting(Checkpoint(path, {})) == [7, 8, 9, 10]


def test_a_signal_after_the_last_step_acts_once_the_checkpoint_is_written(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "kept.pt", {})
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), checkpoint.keeping(lambda: {"step": 7}):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert checkpoint.load(torch.device("cpu")) == {"step": 7}


@pytest.mark.parametrize("content", [b"", b"x" * 100, None], ids=["empty", "other", "cut"])
def test_a_damaged_checkpoint_is_told_and_the_work_begins_again(
    tmp_path: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = Checkpoint(tmp_path / "c.pt", {}, precious=True)
    checkpoint.save({"step": 4})
    path = tmp_path / "c.pt"
    path.write_bytes(path.read_bytes()[:-30] if content is None else content)
    with caplog.at_level(logging.WARNING):
        assert counting(checkpoint) == [*range(1, 11)]
    assert f"the checkpoint {path} is damaged" in caplog.text
    assert "begins again" in caplog.text


def test_garbage_collection_removes_the_work_of_a_command_that_nobody_continued_in_two_weeks(tmp_path: Path) -> None:
    store = making.make_store(tmp_path / "store")
    Checkpoint(store.local_work("base-made") / "training.pt", {}).save({"step": 4})
    making.work(store, later_s=LOCAL_WORK_S - 3600)
    assert store.scratch(f"{LOCAL}base-made").is_dir()
    making.work(store, later_s=LOCAL_WORK_S + 3600)
    assert not store.scratch(f"{LOCAL}base-made").exists()
