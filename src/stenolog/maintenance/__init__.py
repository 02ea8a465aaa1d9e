"""Maintenance of a workspace: the doctor, its repairs, and retention rules."""
