"""Pairs of texts in the client: their tensors, the spans of their answers, and the inputs of the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from hplm_client import LabelledSpan, Prediction
from hplm_client.cli.predict_input import PredictInput, read_inputs
from hplm_client.infer_tensors import input_tensors

from hplm.errors import BadInputError, TextEncodingError

HPLM = Path(sys.executable).parent / "hplm"


@pytest.mark.parametrize("module", [tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
def test_a_pair_travels_as_two_elements_of_one_tensor(module: Any) -> None:
    for pair, shape in ((None, [1, 1]), ("ö", [1, 2])):
        text, tenant = input_tensors(module, [("films", "a", pair)])
        assert (text.name(), text.shape(), text.datatype()) == ("TEXT", shape, "BYTES")
        assert (tenant.name(), tenant.shape()) == ("TENANT", [1, 1])


def test_either_text_of_a_pair_must_be_text() -> None:
    for texts in (("\ud800", "a"), ("a", "\ud800")):
        with pytest.raises(TextEncodingError, match="lone surrogate"):
            input_tensors(tritonclient.http, [("films", *texts)])


def test_an_answer_holds_its_texts() -> None:
    span = LabelledSpan("score", 3.5, 0, 7)
    single, pair = (Prediction("t", "one", (span,), False, None, second) for second in (None, "two"))
    assert (single.as_dict()["pair"], pair.as_dict()["pair"]) == (None, "two")
    assert (pair.label, pair.score) == ("score", 3.5)
    assert "one two"[span.start : span.end] == "one two"


def test_a_line_is_a_text_or_an_object_under_the_names_of_labelled_data() -> None:
    # The first line begins with a byte order mark.
    lines = [b"\xef\xbb\xbfa, b\r\n", b"\n", '{"text": "ö"}\n'.encode()]
    assert list(read_inputs(lines, None, None, jsonl=False)) == [
        PredictInput(("a, b", None), 1),
        PredictInput(('{"text": "ö"}', None), 3),
    ]
    objects = [
        b'{"text": "a", "text_pair": "b"}',
        b'{"sentence1": "a", "sentence2": "b"}',
        b'{"text": "a", "label": 1}',
    ]
    inputs = read_inputs(objects, None, None, jsonl=True)
    assert [item.texts for item in inputs] == [("a", "b"), ("a", "b"), ("a", None)]
    assert list(read_inputs([b"never read"], "a", "b", jsonl=False)) == [PredictInput(("a", "b"))]


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ('{"text": "a"', "line 1 is not JSON"),
        ("\n[1]", "line 2: expected an object"),
        ('{"text_pair": "a"}', "line 1: expected an object with text"),
        ('{"text": "a", "text_pair": 1}', "line 1: expected an object with text"),
        (r'{"text": "a", "text_pair": "\ud800"}', "line 1 has a lone surrogate"),
    ],
)
def test_a_line_without_texts_is_named_and_later_lines_are_read(typed: str, words: str) -> None:
    *_, bad, good = read_inputs([*typed.encode().split(b"\n"), b'{"text": "a"}'], None, None, jsonl=True)
    assert isinstance(bad.texts, BadInputError | TextEncodingError)
    assert words in str(bad.texts)
    assert good.texts == ("a", None)


def test_a_line_that_is_not_utf8_is_named_and_later_lines_are_read() -> None:
    first, bad, last = read_inputs([b"a\n", b"\xf6\n", "\u3000\n".encode(), b"b\n"], None, None, jsonl=False)
    assert (first, last) == (PredictInput(("a", None), 1), PredictInput(("b", None), 4))
    assert isinstance(bad.texts, TextEncodingError)
    assert "line 2 is not UTF-8: byte 0" in str(bad.texts)


@pytest.mark.parametrize(
    ("arguments", "words"), [(["--pair", "b"], "give the first one too"), (["--jsonl", "a"], "leave the text out")]
)
def test_options_that_do_not_go_together_are_refused_before_a_request_is_sent(arguments: list[str], words: str) -> None:
    command = [str(HPLM), "predict", "-t", "films", "--url", "grpc://127.0.0.1:1", *arguments]
    done = subprocess.run(command, input="", capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_answers_with_logits_can_be_compared_and_kept_in_sets() -> None:
    span = LabelledSpan("ok", 0.5, 0, 1)
    first, second = (Prediction("t", "one", (span,), False, np.zeros((2, 2), np.float32)) for _ in range(2))
    assert first == second
    assert len({first, second}) == 1
