"""`hplm eval`: the studies of quality."""

from __future__ import annotations

import typer

from hplm_builder.evaluation.studies.cascade import cascade
from hplm_builder.evaluation.studies.methods import methods
from hplm_builder.evaluation.studies.students import students

app = typer.Typer(
    no_args_is_help=True,
    help="Measure the quality of tenants, compared with plain fine-tuning.",
    epilog="Example: hplm eval methods --root data --resume runs --json methods.json",
)
app.command()(methods)
app.command()(cascade)
app.command()(students)
