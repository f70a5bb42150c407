"""The command `hplm tenant students`, the options of students, and how a tenant's students are shown."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

import typer

from hplm.errors import BadInputError


@dataclasses.dataclass(frozen=True)
class StudentOptions:
    """The options of students, which `hplm tenant create` and `hplm tenant students` share."""

    form: Annotated[
        Literal["shared", "own"] | None,
        typer.Option(
            help="shared (default): students are adapters in the trunk's layers; own: each student has its own layers."
        ),
    ] = None
    teacher: Annotated[
        str | None,
        typer.Option(
            help="auto (default): the tenant's best model on --dev; full: a full fine-tuning; or a base whose adapter teaches."
        ),
    ] = None
    most_students: Annotated[
        int | None, typer.Option(min=1, help="Most students to train; --dev decides how many stay. Default: 6.")
    ] = None

    @property
    def named(self) -> dict[str, Any]:
        """The options that were given, as a request names them."""
        options = {"form": self.form, "teacher": self.teacher, "most": self.most_students}
        return {key: value for key, value in options.items() if value is not None}

    def of_new_tenant(self, *, has_students: bool, has_levels: bool) -> dict[str, Any] | None:
        """Return the options of a new tenant's request, None without students. Raises BadInputError for options alone."""
        if self.named and not (has_students or has_levels):
            raise BadInputError("--form, --teacher and --most-students are for a tenant with students: add --students")
        return self.named if has_students or self.named else None
