"""Scaling and admission against other policies, an oracle and what physics allows, on virtual time."""
