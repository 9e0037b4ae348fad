"""Compiles islands ahead, in helper processes of a rank that share Inductor's cache with it."""
