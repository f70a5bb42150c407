"""Locust's one user, in a process of its own: to import it patches the standard library."""

from __future__ import annotations

import subprocess
import sys

from tests.unit.clients.answering import answering

FOLLOW = """
import sys
from hplm_loadtest.locustfile import Errand, follow
from hplm.progress import progress_bars

def make_plan():
    print("planned", flush=True)
    raise ValueError("our own mistake")

with progress_bars() as progress:
    follow(sys.argv[1], "steady", Errand(make_plan, str, 5.0, progress), None)
"""


def test_a_mistake_of_our_own_ends_the_load_and_is_not_tried_again_for_ever() -> None:
    with answering() as server:
        command = [sys.executable, "-c", FOLLOW, server.url]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert done.stdout.split() == ["planned"]
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: our own mistake"
