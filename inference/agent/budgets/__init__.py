"""Budgets of running streams: the output that a stream may have, and how it gets more."""
