"""Proofs between stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hplm.access.proof import PROOF_CHARACTERS, VALID_S, Prover
from hplm.errors import ForbiddenError

SECRET = bytes(range(32))


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def prover(clock: Clock) -> Prover:
    return Prover(SECRET, clock)


def test_a_proof_is_valid_for_ten_minutes(prover: Prover, clock: Clock) -> None:
    proof = prover.sign("films", "7")
    clock.now_s += VALID_S
    assert prover.check(proof, "films", "7") == 1_000_000.0
    clock.now_s += 1
    with pytest.raises(ForbiddenError):
        prover.check(proof, "films", "7")


def test_a_proof_of_a_clock_that_has_stepped_back_a_little_is_valid(prover: Prover, clock: Clock) -> None:
    proof = prover.sign("films", "7")
    clock.now_s -= 1
    prover.check(proof, "films", "7")
    clock.now_s -= 100
    with pytest.raises(ForbiddenError):
        prover.check(proof, "films", "7")


@pytest.mark.parametrize(("tenant", "subject"), [("film", "7"), ("films", "8"), ("films", ""), ("film", "s7")])
def test_a_proof_is_for_one_tenant_and_one_version(prover: Prover, tenant: str, subject: str) -> None:
    with pytest.raises(ForbiddenError):
        prover.check(prover.sign("films", "7"), tenant, subject)


def test_a_proof_of_another_start_is_refused(prover: Prover, clock: Clock) -> None:
    with pytest.raises(ForbiddenError):
        prover.check(Prover(bytes(32), clock).sign("films", "7"), "films", "7")


@given(st.binary(max_size=80))
def test_no_other_bytes_are_a_proof(raw: bytes) -> None:
    with pytest.raises(ForbiddenError):
        Prover(SECRET).check(raw, "films", "7")


@given(st.integers(0, 52), st.sampled_from(b"ABCxyz019-_"))
def test_a_proof_with_another_character_is_refused(place: int, character: int) -> None:
    prover = Prover(SECRET)
    proof = bytearray(prover.sign("films", "7"))
    if proof[place] != character:
        proof[place] = character
        with pytest.raises(ForbiddenError):
            prover.check(bytes(proof), "films", "7")


def test_a_proof_is_ascii_and_the_secret_is_not_shown(prover: Prover) -> None:
    proof = prover.sign("films", "7")
    assert proof.isascii()
    assert len(proof) == PROOF_CHARACTERS
    assert SECRET.hex() not in repr(prover)
    assert repr(SECRET) not in f"{prover!r} {prover}"
