"""Contracts, plans, budgets and agreement."""
