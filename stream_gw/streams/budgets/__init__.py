"""Budgets of a plan at the edge: which of them a request counts against, and what its caller is told."""
