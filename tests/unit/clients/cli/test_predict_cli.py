"""`hplm predict` shows each text with its answer or error."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(("students", "line"), [(1, ""), (3, "  (answered by 3 students)\n")])
def test_the_number_of_students_is_printed_above_one(students: int, line: str) -> None:
    with answering() as server:
        server.students = students
        done = predict(server.url, "a")
    assert done.stdout == f"a\n  ok  0.500\n{line}"


def refuse(text: str) -> None:
    raise ValueError(f"BAD_INPUT: {HOSTILE}")


HOSTILE = "\x1b]0;owned\x07\x9b2J\r\u202egnp"
HARMLESS = r"\u001b]0;owned\u0007\u009b2J\u000d\u202egnp"


@pytest.mark.parametrize("typed", ["", f"{HOSTILE}\n"])
def test_control_characters_of_a_text_or_a_message_do_not_reach_the_terminal(typed: str) -> None:
    with answering(refuse) as server:
        done = predict(server.url, *([] if typed else [HOSTILE]), typed=typed)
    assert f"BAD_INPUT: {HARMLESS}" in (done.stdout if typed else done.stderr)
    assert not set(HOSTILE) & set(done.stdout + done.stderr) - set(HARMLESS)


def test_json_holds_texts_and_messages_with_escaped_control_characters() -> None:
    with answering(refuse) as server:
        done = predict(server.url, "--json", HOSTILE)
    assert json.loads(done.stdout)["text"] == HOSTILE
    assert json.loads(done.stdout)["error"] == f"BAD_INPUT: {HARMLESS}"
    assert not set(HOSTILE) & set(done.stdout) - set(HARMLESS)


def drop_the_third(text: str) -> None:
    if text == "text 3":
        raise ConnectionError


TYPED = "".join(f"text {number}\n" for number in range(1, 41))


def test_a_refused_text_is_json_with_the_option_and_is_else_cut() -> None:
    long = "long " * 1000
    with answering(lambda text: drop_the_third("text 3")) as server:
        done = predict(server.url, "--json", "one text")
        assert json.loads(done.stdout)["error"].startswith("UNREACHABLE")
        assert done.stderr.startswith("hplm: UNREACHABLE")
        assert done.returncode == 1
        done = predict(server.url, typed=f"{long}\n")
        assert done.stdout.splitlines()[0] == f"{long[:200]}..."


@pytest.mark.parametrize(("arguments", "text"), [(["one text"], "one text"), ([], None)])
def test_a_server_that_is_absent_from_the_start_is_an_error_in_json_too(arguments: list[str], text: str | None) -> None:
    with answering() as server:
        url = server.url
    done = predict(url, "--json", *arguments, typed=TYPED)
    shown = json.loads(done.stdout)
    assert shown.pop("error").startswith("UNREACHABLE")
    assert shown == {"tenant": "films", "text": text, "pair": None}
    assert done.stderr.startswith("hplm: UNREACHABLE")
    assert done.returncode == 1


@pytest.mark.parametrize("deadline", ["0", "-6", "nan", "1e9"])
def test_a_deadline_out_of_range_is_refused_by_name(deadline: str) -> None:
    with answering() as server:
        done = predict(server.url, f"--deadline={deadline}", "one")
        assert not server.texts
    assert "BAD_INPUT: a deadline is a number of seconds above 0" in done.stderr


def test_a_deadline_limits_a_call_to_a_server_that_hangs() -> None:
    gone = threading.Event()
    with answering(lambda text: gone.wait(60)) as server:
        started_s = time.monotonic()
        done = predict(server.url, "--deadline=0.1", "one")
        gone.set()
        # Without a deadline the call would take 35 s.
        assert time.monotonic() - started_s < 30
    assert "DEADLINE_UNMEETABLE: no answer came within the deadline of 0.1 s" in done.stderr


def test_a_text_without_an_answer_loses_no_other_answers() -> None:
    with answering(drop_the_third) as server:
        done = predict(server.url, "--json", typed=TYPED)
    shown = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["line"] for record in shown] == list(range(1, 41))
    assert [record["line"] for record in shown if "error" in record] == [3]
    assert shown[2]["error"].startswith(f"UNREACHABLE: {server.url} does not answer")
    assert done.returncode == 1


def test_a_server_that_goes_away_ends_the_command_with_one_line() -> None:
    with answering(drop_the_third) as server:
        server.is_ready = False
        done = predict(server.url, "--json", typed=TYPED)
    shown = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["line"] for record in shown] == [1, 2, 3]
    assert [record["line"] for record in shown if "error" in record] == [3]
    assert "UNREACHABLE" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.returncode == 1


def test_an_answer_does_not_wait_for_the_next_line() -> None:
    with answering() as server:
        command = [str(HPLM), "predict", "-t", "films", "--json", "--url", server.url]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            for number in (1, 2):
                process.stdin.write(f"text {number}\n".encode())
                process.stdin.flush()
                assert json.loads(process.stdout.readline())["line"] == number
            process.stdin.close()
            assert process.wait() == 0


def test_an_error_of_all_lines_ends_the_command_while_standard_input_is_open() -> None:
    with answering(drop_the_third) as server:
        server.is_ready = False
        command = [str(HPLM), "predict", "-t", "films", "--url", server.url]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdin is not None
            assert process.stderr is not None
            process.stdin.write(b"text 3\n")
            process.stdin.flush()
            message = process.stderr.read().decode()
            assert process.wait() == 1
    assert message.startswith("hplm: UNREACHABLE")
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("redirected", "words"),
    [
        ("one > /dev/full", "BAD_INPUT: standard output takes no more: No space left on device"),
        ("one >&-", "standard output is closed"),
        ("<&-", "BAD_INPUT: standard input is closed: give a text, or lines to read"),
    ],
)
def test_closed_input_or_output_is_one_line_and_status_1(redirected: str, words: str) -> None:
    with answering() as server:
        command = f"exec {shlex.quote(str(HPLM))} predict -t films --url {server.url} {redirected}"
        env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, env=env, check=False)
    assert done.stderr == f"hplm: {words}\n"
    assert done.returncode == 1
