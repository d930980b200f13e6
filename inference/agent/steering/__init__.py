"""Steering: a running stream gets an input, and goes on with another answer."""
