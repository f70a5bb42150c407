"""The error tree."""

from __future__ import annotations

import typing

import pytest

from hplm import errors


@pytest.mark.parametrize("leaf", list(errors.leaves()))
def test_every_leaf_has_a_wire_code_a_status_and_a_line_in_the_tree(leaf: type[errors.HplmError]) -> None:
    assert leaf.code
    assert leaf.status in typing.get_args(errors.Status)
    line = next(line for line in str(errors.__doc__).splitlines() if leaf.__name__ in line)
    assert leaf.code in line.split()
    assert leaf.status in line.split()


def test_no_two_leaves_share_a_code() -> None:
    codes = [leaf.code for leaf in errors.leaves()]
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize("leaf", list(errors.leaves()))
def test_an_error_survives_the_wire_also_with_tritons_words_in_front(leaf: type[errors.HplmError]) -> None:
    back = errors.from_wire("in ensemble 'hbert', " + leaf("the reason").wire())
    assert type(back) is leaf
    assert str(back) == "the reason"


def test_a_message_without_a_code_is_no_error_of_ours() -> None:
    assert errors.from_wire("unexpected shape for input 'TEXT'") is None
