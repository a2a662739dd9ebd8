"""Bounds on what is read, so that no file, however made, can exhaust the machine."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Where reading stops with an error."""

    max_bytes: int = 16 * 2**30
    """Decompressed bytes of one trace."""
    max_ratio: int = 300
    """Decompressed over compressed bytes, beyond the first 64 MiB; profiles reach 10 to 40."""
    max_event_bytes: int = 16 * 2**20
    """One event, or everything in the file that is not events; each byte may take some 50."""
    max_name_bytes: int = 512 * 2**20
    """Memory of all distinct names and arguments of one trace."""
    max_events: int = 30_000_000
    """Events of one trace; each takes some 65 bytes, twice while they are sorted."""
    max_rows: int = 4096
    """Host threads, and device streams, of one trace; some of the work is done for each."""
    max_traces: int = 4096
    """Traces of one job."""
