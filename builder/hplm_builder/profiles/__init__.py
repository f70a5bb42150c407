"""Measuring the profile of a base in one process, without Triton."""
