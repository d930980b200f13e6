"""Placement against other policies: production traces on simulated replicas, on virtual time."""
