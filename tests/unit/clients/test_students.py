"""Clients tell the number of students of an answer, if the server has this output."""

from __future__ import annotations

import asyncio

import pytest
from hplm_client import AsyncClient, Client

from hplm.errors import BadInputError
from tests.unit.clients.answering import answering


@pytest.mark.parametrize("students", [None, 3])
@pytest.mark.parametrize("model", [None, "hbert"])
def test_an_answer_has_its_number_of_students_if_the_model_tells_it(students: int | None, model: str | None) -> None:
    async def ask(url: str) -> list[int | None]:
        async with AsyncClient(url, model=model) as client:
            return [(await client.predict("films", "a")).students for _ in range(2)]

    with answering() as server:
        server.students = students
        with Client(server.url, model=model) as client:
            assert [client.predict("films", "a").students for _ in range(2)] == [students] * 2
            assert [one.students for one in client.predict_many([("films", "a")] * 3)] == [students] * 3
        assert asyncio.run(ask(server.url)) == [students] * 2


def test_a_client_asks_again_after_the_server_was_replaced_by_one_without_this_output() -> None:
    with answering() as server:
        server.students = 3
        with Client(server.url) as client:
            assert client.predict("films", "a").students == 3
            server.students = None
            with pytest.raises(BadInputError, match="unexpected inference output 'STUDENTS'"):
                client.predict("films", "a")
            assert client.predict("films", "a").students is None


def test_json_of_an_answer_has_the_number_only_if_the_server_tells_it() -> None:
    with answering() as server, Client(server.url) as client:
        assert "students" not in client.predict("films", "a").as_dict()
    with answering() as server, Client(server.url) as client:
        server.students = 1
        assert client.predict("films", "a").as_dict()["students"] == 1
