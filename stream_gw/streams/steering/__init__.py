"""Inputs of running streams: the client steers an answer that is being made."""
