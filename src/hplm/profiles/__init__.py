"""Measured profiles of bases: how long requests of a length take, and what memory they need, on one machine."""
