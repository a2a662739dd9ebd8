"""Measurements that can be trusted: interleaved, gated on correctness, kept as raw rows.

Peers are timed on the same problem in the same process; a peer that fails the correctness gate has
no figures.
"""
