"""Measuring the machine: times of ops and collectives in, a cluster file for ``autoplan search`` out."""
