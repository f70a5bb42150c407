"""The tables of the first release of format 2. A new registry is made from `schema.py`, so this revision has no steps."""

revision = "2.0001"
down_revision = None
branch_labels = None
depends_on = None
