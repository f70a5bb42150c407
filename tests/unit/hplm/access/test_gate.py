"""The gates of stages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hplm.access.access_mode import AccessMode
from hplm.access.gate import (
    MANAGE,
    NO_PROOF,
    PROOF_BYTES,
    TEXTS,
    Credentials,
    KeyGate,
    OpenGate,
    is_server,
    open_gate,
    proof_rows,
    server_header,
    server_proof,
)
from hplm.access.key_ring import REFUSED
from hplm.access.keys import HEADER, new_key
from hplm.access.proof import Prover
from hplm.errors import ForbiddenError
from hplm.registry.access.keys import AccessKey
from hplm.registry.registry import Registry
from hplm.store.layout import Store

MODE = AccessMode(bytes(range(32)))
TEMPLATES = Path(__file__).parents[4] / "model_repository"


@pytest.fixture
def keys(registry: Registry) -> dict[str, bytes]:
    """A key of each tenant."""
    made = {}
    for tenant in ("films", "news"):
        key = new_key()
        registry.add_key(AccessKey(key.id, tenant, "infer", key.sha256(), time.time()))
        made[tenant] = key.text().encode()
    return made


@pytest.fixture
def gate(store: Store, keys: dict[str, bytes]) -> Iterator[KeyGate]:
    made = open_gate(store, MODE)
    assert isinstance(made, KeyGate)
    with closing(made):
        yield made


def bearer(key: bytes) -> Credentials:
    return Credentials(b"Bearer " + key)


def test_without_keys_a_gate_admits_every_text(store: Store, registry: Registry) -> None:
    gate = open_gate(store, AccessMode())
    assert isinstance(gate, OpenGate)
    assert gate.admit([b"films", b"nobody"], Credentials()) == ["", ""]
    gate.admit_inner([b"films"], [-1], None)
    assert gate.sign("", "films", 1) == NO_PROOF


def test_a_gate_returns_the_id_of_each_texts_key(gate: KeyGate, keys: dict[str, bytes]) -> None:
    own = [keys["films"], keys["news"]]
    ids = [key.split(b"_")[1].decode() for key in own]
    assert gate.admit([b"films", b"news"], Credentials(keys=own)) == ids
    assert gate.admit([b"films", b"films"], bearer(keys["films"])) == [ids[0]] * 2


@pytest.mark.parametrize("tenant", [b"news", b"nobody", b"", b"caf\xe9", b"fil\0ms"])
def test_a_key_is_refused_for_any_other_tenant(gate: KeyGate, keys: dict[str, bytes], tenant: bytes) -> None:
    with pytest.raises(ForbiddenError, match=f"^{REFUSED}$"):
        gate.admit([tenant], bearer(keys["films"]))


def test_the_error_names_the_first_text_that_is_refused(gate: KeyGate, keys: dict[str, bytes]) -> None:
    with pytest.raises(ForbiddenError, match=f"^text 2 of 3: {REFUSED}$"):
        gate.admit([b"films", b"news", b"news"], bearer(keys["films"]))


def test_a_key_for_each_text_takes_the_place_of_the_header(gate: KeyGate, keys: dict[str, bytes]) -> None:
    with pytest.raises(ForbiddenError):
        gate.admit([b"films"], Credentials(bearer(keys["films"]).header, keys=[b""]))
    assert gate.admit([b"films"], Credentials(b"Basic b3RoZXI=", keys=[keys["films"]]))


def test_a_proof_of_a_checked_key_admits_its_tenant_to_a_first_stage_until_the_key_is_revoked(
    gate: KeyGate, keys: dict[str, bytes], registry: Registry
) -> None:
    (key_id,) = gate.admit([b"films"], bearer(keys["films"]))
    proof = Credentials(proofs=[gate.sign(key_id, "films")])
    assert gate.admit([b"films"], proof) == [key_id]
    with pytest.raises(ForbiddenError):
        gate.admit([b"news"], proof)
    registry.revoke_key(key_id, time.time())
    gate.ring.refresh()
    with pytest.raises(ForbiddenError, match=REFUSED):
        gate.admit([b"films"], proof)


def test_a_proof_admits_to_inner_stages_for_its_version_alone(gate: KeyGate, keys: dict[str, bytes]) -> None:
    (key_id,) = gate.admit([b"films"], bearer(keys["films"]))
    proof = gate.sign(key_id, "films", 7)
    gate.admit_inner([b"films"], [7], [proof])
    first = gate.sign(key_id, "films")
    for tenant, version, shown in (
        (b"films", 8, proof),
        (b"news", 7, proof),
        (b"films", 7, first),
        (b"films", -1, proof),
    ):
        with pytest.raises(ForbiddenError):
            gate.admit_inner([tenant], [version], [shown])
    with pytest.raises(ForbiddenError):
        gate.admit_inner([b"films"], [7], None)
    # A client must not claim that another model of this server asks, which counts the request.
    with pytest.raises(ForbiddenError):
        gate.admit_inner([b"films"], [7], [proof], is_inner=True)
    gate.admit_inner([b"films"], [7], [gate.sign(key_id, "films", 7, is_inner=True)], is_inner=True)
    # The proof of a version is none for a first stage.
    with pytest.raises(ForbiddenError):
        gate.admit([b"films"], Credentials(proofs=[proof]))


def test_a_proof_of_one_key_is_not_valid_with_the_id_of_another(gate: KeyGate, keys: dict[str, bytes]) -> None:
    (films,) = gate.admit([b"films"], bearer(keys["films"]))
    (news,) = gate.admit([b"news"], bearer(keys["news"]))
    proof = gate.sign(films, "films", 7)
    with pytest.raises(ForbiddenError):
        gate.admit_inner([b"films"], [7], [news.encode() + proof[len(news) :]])


def test_the_server_itself_is_admitted_by_its_header_and_no_other_start_is(
    gate: KeyGate, store: Store, keys: dict[str, bytes]
) -> None:
    header = server_header(MODE, "films")[HEADER].encode()
    assert gate.admit([b"films"], Credentials(header))
    with pytest.raises(ForbiddenError):
        gate.admit([b"news"], Credentials(header))
    with pytest.raises(ForbiddenError):
        gate.admit([b"films"], Credentials(server_header(AccessMode(bytes(32)), "films")[HEADER].encode()))
    assert server_header(AccessMode(), "films") == {}


def test_the_server_itself_proves_to_the_manager_that_it_asks_and_no_other_start_does() -> None:
    proof, prover = server_proof(MODE, "", MANAGE), Prover(MODE.proof_secret or b"")
    assert proof is not None
    assert is_server(prover, proof)
    others = (
        server_proof(AccessMode(bytes(32)), "", MANAGE),
        server_proof(MODE, "films", TEXTS),
        proof[:30] + bytes([proof[30] ^ 1]) + proof[31:],
        b"a" + proof[1:],
        b"",
    )
    assert not any(is_server(prover, other or b"") for other in others)
    assert server_proof(AccessMode(), "", MANAGE) is None


def test_proofs_are_as_long_as_the_tensor_of_the_models(gate: KeyGate) -> None:
    for key_id in ("a" * 16, "b" * 16):
        assert len(gate.sign(key_id, "films")) == len(gate.sign(key_id, "films", 10**12)) == PROOF_BYTES
    assert proof_rows([NO_PROOF, NO_PROOF]).shape == (2, PROOF_BYTES)
    for template in TEMPLATES.glob("*/config.pbtxt"):
        text = template.read_text()
        assert text.count('name: "PROOF"') == text.count(f'name: "PROOF" data_type: TYPE_UINT8 dims: [ {PROOF_BYTES} ]')


def test_every_template_that_clients_call_takes_a_key_but_needs_none() -> None:
    for template in TEMPLATES.glob("*/config.pbtxt"):
        inputs = template.read_text().split("output [", 1)[0]
        wanted = 'name: "KEY" data_type: TYPE_STRING dims: [ 1 ] optional: true'
        assert (wanted in inputs) == (not template.parent.name.startswith("hbert_upper")), template
