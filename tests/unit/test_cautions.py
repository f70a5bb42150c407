"""What is said about odd data before they are learned."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hplm_builder.cautions import cautions
from hplm_builder.labelled import Entity, LabelledData, LabelledText
from hplm_builder.tenants import encoder_of

from hplm.errors import DataError
from hplm.nn.base import Base
from hplm.text import TextEncoder

TEXT = "anna runs to paris"
WHOLE = LabelledText(TEXT, None, (Entity("PER", 0, 4), Entity("CITY", 13, 18)))
BEGINS_WITHIN = LabelledText(TEXT, None, (Entity("PER", 2, 4),))
ENDS_WITHIN = LabelledText(TEXT, None, (Entity("CITY", 13, 16),))
BEYOND = LabelledText("the " * 60 + "paris", None, (Entity("CITY", 240, 245),))


@pytest.fixture(scope="module")
def encoder(tiny_base: Base) -> TextEncoder:
    return encoder_of(tiny_base)


def tagging(train: list[LabelledText], dev: list[LabelledText] | None = None) -> LabelledData:
    return LabelledData("tagging", ("O", "B-CITY", "I-CITY", "B-PER", "I-PER"), train, dev or [WHOLE], [])


def test_entities_that_can_be_found_are_no_matter(encoder: TextEncoder) -> None:
    spaced = replace(WHOLE, entities=(Entity("PER", 0, 5),))
    assert cautions(tagging([WHOLE, spaced]), encoder) == []


def test_entities_that_can_never_be_found_are_counted(encoder: TextEncoder) -> None:
    (said,) = cautions(tagging([WHOLE, BEGINS_WITHIN, ENDS_WITHIN, BEYOND]), encoder)
    assert said.startswith("3 of 5 entities of the train data can never be found: they begin or end within a word")
    assert f"beyond the {encoder.max_tokens} tokens" in said


@pytest.mark.parametrize("one", [BEGINS_WITHIN, ENDS_WITHIN, BEYOND], ids=["begins", "ends", "beyond"])
def test_a_part_of_which_no_entity_can_be_found_is_refused(encoder: TextEncoder, one: LabelledText) -> None:
    with pytest.raises(DataError, match="none of the 2 entities of the train data can be learned"):
        cautions(tagging([one, one]), encoder)
    with pytest.raises(DataError, match="none of the 1 entities of the dev data"):
        cautions(tagging([WHOLE], [one]), encoder)
