"""Budgets of running streams: what a stream may output, and how it gets more."""
