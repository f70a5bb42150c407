"""`hplm predict` shows what was asked and what came of it, a text at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.unit.clients.answering import answering

HPLM = Path(sys.executable).parent / "hplm"


def predict(url: str, *arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    command = [str(HPLM), "predict", "-t", "films", "--url", url, *arguments]
    return subprocess.run(command, input=typed, capture_output=True, text=True, check=False)


def test_a_text_is_shown_as_it_is() -> None:
    text = "at 10:30 :smile: [bold]not bold[/bold]\tA:B"
    with answering() as server:
        done = predict(server.url, text)
        assert server.texts == [text]
    assert done.stdout == f"{text}\n  ok  0.500  'a'\n"
